"""Block tables: admission, growth, sharing, copy on write, and the split of the slots."""

import pytest

from labkit.memory import KVCacheManager
from labkit.observe import BlockCopied, BlocksAllocated, BlocksCached, BlocksEvicted, BlocksFreed, BlocksShared


def manager(num_blocks: int = 8, block_size: int = 4, **options) -> KVCacheManager:
    kv = KVCacheManager(num_blocks, block_size, **options)
    kv.events = []
    return kv


def compute(kv: KVCacheManager, request_id: str, tokens: list[int]) -> None:
    """Admit a sequence (through the prefix cache) and say that all its tokens are computed."""
    assert kv.admit(request_id, len(tokens), prefix=kv.match_prefix(tokens))
    kv.commit(request_id, tokens, len(tokens))
    kv.check()


def test_a_table_has_just_enough_blocks():
    kv = manager()
    for name, num_tokens, num_blocks in [("one", 1, 1), ("full", 4, 1), ("over", 5, 2)]:
        assert kv.admit(name, num_tokens)
        assert len(kv.block_table(name)) == num_blocks
    kv.check()


def test_admission_that_does_not_fit_changes_nothing():
    kv = manager(num_blocks=4)
    assert kv.admit("a", 8)
    assert not kv.admit("b", 12)
    assert not kv.admit("b", 8, keep_free=1)
    assert "b" not in kv
    assert kv.num_free_blocks == 2
    assert kv.admit("b", 8)
    kv.check()


def test_growth_takes_a_block_only_at_a_block_boundary():
    kv = manager()
    compute(kv, "a", [1, 2, 3])
    assert kv.extend("a", 3, 1) == [] and len(kv.block_table("a")) == 1
    assert kv.extend("a", 4, 1) == [] and len(kv.block_table("a")) == 2
    assert kv.extend("a", 4, 29) is None and len(kv.block_table("a")) == 2
    kv.check()


def test_usage_adds_up_and_counts_each_slot_once():
    kv = manager(num_blocks=8)
    compute(kv, "a", list(range(10)))
    usage = kv.usage()
    assert (usage.num_referenced_blocks, usage.num_live_tokens, usage.num_fragmented_slots) == (3, 10, 2)
    assert usage.kv_cache_usage == 3 / 8 and usage.internal_fragmentation == 2 / 12
    compute(kv, "b", [*range(8), 99])  # shares two full blocks
    assert kv.usage().num_live_tokens == 11
    kv.free("a")
    assert kv.usage().num_live_tokens == 9
    kv.free("b")
    usage = kv.usage()
    assert (usage.num_referenced_blocks, usage.num_live_tokens, usage.num_cached_free_blocks) == (0, 0, 2)
    assert usage.num_free_blocks == 6
    kv.check()


def test_a_prefix_hit_shares_blocks_and_leaves_one_token_to_compute():
    kv = manager()
    compute(kv, "a", list(range(8)))
    assert len(kv.match_prefix(list(range(8)))) == 1  # the whole prompt is cached, yet its last block is computed
    assert len(kv.match_prefix(list(range(9)))) == 2
    compute(kv, "b", list(range(9)))
    assert kv.block_table("b")[:2] == kv.block_table("a")
    assert [kv.pool.ref_cnt[b] for b in kv.block_table("b")] == [2, 2, 1]


def test_cached_blocks_outlive_their_sequence_until_they_are_needed():
    kv = manager(num_blocks=4)
    compute(kv, "a", list(range(8)))
    kv.free("a")
    assert len(kv.match_prefix([*range(8), 9])) == 2
    assert kv.admit("b", 12)  # takes the two empty blocks, then evicts the end of a's sequence
    assert len(kv.match_prefix([*range(8), 9])) == 1
    assert BlocksEvicted((1,)) in (kv.events or [])
    kv.check()


def test_fork_copies_only_what_is_written():
    kv = manager()
    compute(kv, "a", list(range(6)))
    kv.fork("a", "b")
    assert kv.block_table("b") == kv.block_table("a") and kv.usage().num_referenced_blocks == 2
    src = kv.block_table("a")[1]
    copies = kv.extend("a", 6, 1)
    assert copies == [(src, kv.block_table("a")[1])]
    assert kv.extend("b", 6, 1) == []  # b is now alone with the old block
    assert kv.block_table("b")[0] == kv.block_table("a")[0] and kv.block_table("b")[1] == src
    assert kv.usage().num_live_tokens == 8
    kv.check()


def test_copy_on_write_without_a_free_block_changes_nothing():
    kv = manager(num_blocks=2)
    compute(kv, "a", list(range(6)))
    kv.fork("a", "b")
    before = list(kv.block_table("a"))
    assert kv.extend("a", 6, 1) is None
    assert kv.block_table("a") == before
    kv.check()


def test_reset_forgets_cached_content_for_good():
    kv = manager()
    compute(kv, "a", list(range(8)))
    compute(kv, "b", list(range(100, 108)))
    kv.free("b")
    kv.reset_prefix_cache()
    assert kv.match_prefix([*range(8), 9]) == []
    assert kv.usage().num_cached_free_blocks == 0
    kv.extend("a", 8, 4)
    kv.commit("a", list(range(12)), 12)  # caches its third block behind entries that nobody finds
    assert kv.match_prefix([*range(8, 12), 1]) == [] and kv.match_prefix([*range(12), 1]) == []
    kv.check()


def test_without_prefix_caching_nothing_is_found():
    kv = manager(enable_prefix_caching=False)
    compute(kv, "a", list(range(8)))
    kv.free("a")
    assert kv.match_prefix([*range(8), 9]) == []
    assert kv.usage().num_free_blocks == 8


def test_events_say_what_happened_in_order():
    kv = manager()
    compute(kv, "a", list(range(5)))
    kv.fork("a", "b")
    kv.extend("b", 5, 1)
    kv.free("b")
    assert kv.events == [
        BlocksAllocated("a", 0, (0, 1)),
        BlocksCached((0,)),
        BlocksShared("b", 0, (0, 1), 5),
        BlockCopied("b", 1, 1, 2),
        BlocksFreed("b", (0, 2)),
    ]


@pytest.mark.parametrize("block_size", [0, -1, 3, 24])
def test_block_sizes_that_are_no_power_of_two_are_refused(block_size):
    with pytest.raises(ValueError, match=f"block_size must be a power of two >= 1, got {block_size}"):
        KVCacheManager(4, block_size)


def test_an_id_in_use_is_refused():
    kv = manager()
    kv.admit("a", 1)
    with pytest.raises(ValueError, match="'a' already has a block table"):
        kv.admit("a", 1)
    with pytest.raises(ValueError, match="'a' already has a block table"):
        kv.fork("a", "a")
