"""Host memory for blocks of sequences that had to leave the pool, and the copies that are under way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from .block_pool import BlockPool

BlockPairs = Sequence[tuple[int, int]]
"""Copies to make, each from a source block to a destination block."""


class SwappedSequence(NamedTuple):
    """What a sequence has in host memory: the K and V of its first ``num_computed_tokens`` tokens."""

    host_ids: list[int]
    num_computed_tokens: int


class SwapSpace:
    """Which host blocks hold which sequence, and which copies between pool and host are under way.

    A copy holds a reference on both its ends until it has landed, so whoever else lets go of them, nobody gets a
    block that is still read or written::

                          pool block held by       host block held by
        swapped out       copy                     copy, sequence
          landed          -                              sequence
        swapped in        copy, block table        copy
          landed                block table        -

    A pool block that only copies hold is *in flight*: neither referenced nor free.
    """

    def __init__(self, num_host_blocks: int) -> None:
        """Make room for ``num_host_blocks`` blocks; 0 means none. Raises ValueError if negative."""
        if num_host_blocks < 0:
            raise ValueError(f"num_host_blocks must be >= 0, got {num_host_blocks}")
        self.num_host_blocks = num_host_blocks
        self.num_copies: Counter[int] = Counter()  # copies under way that read or write a pool block
        self._pool = BlockPool(num_host_blocks) if num_host_blocks else None
        self._sequences: dict[str, SwappedSequence] = {}

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._sequences

    @property
    def num_free_blocks(self) -> int:
        """Host blocks that hold nothing."""
        return self._pool.num_free if self._pool is not None else 0

    def store(self, request_id: str, block_ids: Sequence[int], num_computed_tokens: int) -> BlockPairs | None:
        """Find host blocks for a sequence's computed blocks; the copies (block, host block), or None if full."""
        if self._pool is None or not block_ids or len(block_ids) > self._pool.num_free:
            return None
        host_ids = self._pool.allocate(len(block_ids))
        self._pool.share(host_ids)
        self.num_copies.update(block_ids)
        self._sequences[request_id] = SwappedSequence(host_ids, num_computed_tokens)
        return list(zip(block_ids, host_ids, strict=True))

    def is_stored(self, request_id: str) -> bool:
        """Whether a sequence is here, all of it: its copies have landed."""
        sequence = self._sequences.get(request_id)
        return sequence is not None and self._ref_cnt(sequence.host_ids[0]) == 1

    def num_computed_tokens(self, request_id: str) -> int:
        """Tokens of a sequence whose K and V are here, or on their way."""
        return self._sequences[request_id].num_computed_tokens

    def load(self, request_id: str, block_ids: Sequence[int], first_index: int) -> tuple[BlockPairs, int]:
        """Take a stored sequence out; the copies (host block, block) of its blocks from ``first_index`` on.

        ``block_ids`` is its new block table. Also returns how many of its tokens are computed then.
        """
        assert self._pool is not None
        host_ids, num_computed_tokens = self._sequences.pop(request_id)
        self._pool.free(host_ids[:first_index])
        copies = list(zip(host_ids[first_index:], block_ids[first_index:], strict=False))
        self.num_copies.update(block for _, block in copies)
        return copies, num_computed_tokens

    def drop(self, request_id: str) -> None:
        """Forget a sequence."""
        assert self._pool is not None
        self._pool.free(self._sequences.pop(request_id).host_ids)

    def land(self, swap_outs: BlockPairs, swap_ins: BlockPairs) -> list[int]:
        """End copies: host blocks that nobody needs are free; returns the pool blocks, one for each copy."""
        block_ids = [block for block, _ in swap_outs] + [block for _, block in swap_ins]
        if self._pool is not None:
            self._pool.free([host for _, host in swap_outs] + [host for host, _ in swap_ins])
        self.num_copies.subtract(block_ids)
        for block_id in set(block_ids):
            if not self.num_copies[block_id]:
                del self.num_copies[block_id]
        return block_ids

    def check(self) -> None:
        """Raise AssertionError unless every host block is free, or held by one sequence, a copy, or both."""
        if self._pool is None:
            assert not self._sequences and not self.num_copies
            return
        self._pool.check()
        owners = Counter(host for sequence in self._sequences.values() for host in sequence.host_ids)
        assert all(count == 1 for count in owners.values()), "a host block holds two sequences"
        num_copies = sum(count - owners[host] for host, count in enumerate(self._pool.ref_cnt))
        assert num_copies == sum(self.num_copies.values()), "copies hold as many host blocks as pool blocks"

    def _ref_cnt(self, host_id: int) -> int:
        return self._pool.ref_cnt[host_id] if self._pool is not None else 0
