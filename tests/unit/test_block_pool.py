"""The block pool: what allocation takes, what freeing gives back, and in which order."""

import pytest

from labkit.memory import BlockPool


def test_takes_blocks_from_the_head_and_counts_them():
    pool = BlockPool(8)
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.num_free == 5
    assert pool.ref_cnt[:4] == [1, 1, 1, 0]
    pool.check()


def test_blocks_not_worth_keeping_are_reused_first():
    pool = BlockPool(4)
    blocks = pool.allocate(4)
    pool.free(blocks, worth_keeping={1, 3})
    assert pool.free_list() == [0, 2, 3, 1]  # worthless first; of the others the end of the sequence before its start
    pool.check()


def test_a_shared_block_is_free_only_when_all_have_let_go():
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    assert pool.share([block]) == []
    assert pool.free([block]) == []
    assert pool.free([block]) == [block]
    pool.check()


def test_sharing_a_free_block_takes_it_out_of_the_middle_of_the_free_list():
    pool = BlockPool(5)
    pool.free(pool.allocate(5), worth_keeping=range(5))
    assert pool.free_list() == [4, 3, 2, 1, 0]
    assert pool.share([2]) == [2]
    assert pool.free_list() == [4, 3, 1, 0]
    pool.check()


def test_allocating_everything_empties_the_free_list():
    pool = BlockPool(3)
    pool.allocate(3)
    assert pool.free_list() == []
    pool.check()
    with pytest.raises(RuntimeError, match="1 blocks wanted, 0 of 3 free"):
        pool.allocate(1)


def test_freeing_twice_is_caught():
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(RuntimeError, match="freed more often"):
        pool.free(blocks)


def test_an_empty_pool_is_refused():
    with pytest.raises(ValueError, match="num_blocks must be >= 1, got 0"):
        BlockPool(0)
