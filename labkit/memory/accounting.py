"""The accounting equation: every block of the pool is in one place, and the counters say so.

referenced + cached only + free + in flight = all blocks
ref_cnt of a block = block tables it stands in + copies that read or write it
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .kv_cache_manager import KVCacheManager


def check_accounting(kv: KVCacheManager) -> None:
    """Raise AssertionError unless it holds for ``kv``. O(number of blocks): for tests and debugging."""
    kv.pool.check()
    kv.swap_space.check()
    tables = Counter(b for sequence in kv._sequences.values() for b in sequence.block_ids)
    copies = kv.swap_space.num_copies
    for block_id, count in enumerate(kv.pool.ref_cnt):
        assert count == tables[block_id] + copies[block_id], (
            f"block {block_id}: ref_cnt {count}, in {tables[block_id]} tables, {copies[block_id]} copies under way"
        )
    cached_free = [b for b in kv.pool.free_list() if kv.prefix_cache is not None and b in kv.prefix_cache]
    usage = kv.usage()
    assert usage.num_cached_free_blocks == len(cached_free)
    live = sum(kv.blocks.num_written[b] for b in tables)
    assert usage.num_live_tokens == live, f"{usage.num_live_tokens} live tokens counted, {live} found"
    assert usage.num_referenced_blocks == len(tables)
    unreferenced = usage.num_free_blocks + usage.num_cached_free_blocks + usage.num_in_flight_blocks
    assert usage.num_referenced_blocks + unreferenced == kv.num_blocks
    for request_id, sequence in kv._sequences.items():
        assert len(set(sequence.block_ids)) == len(sequence.block_ids), f"{request_id}: a block stands twice"
        assert sequence.num_computed_tokens <= len(sequence.block_ids) * kv.block_size
    if not kv.shares_partial_blocks:
        shared = [b for b, count in tables.items() if count + copies[b] > 1]
        assert all(kv.blocks.num_written[b] == kv.block_size for b in shared), "an unfinished block is shared"
