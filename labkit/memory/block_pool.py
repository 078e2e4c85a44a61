"""The pool of KV-cache blocks: a free list threaded through the blocks, and a reference count for each."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from itertools import pairwise


class BlockPool:
    """Hands out block ids and counts who uses them. Every operation costs O(1) a block, whatever the pool's size.

    The free list is a circle through two arrays; index ``num_blocks`` is the sentinel that joins its ends::

        sentinel ─► 7 ─► 2 ─► 9 ─► ... ─► 4 ─► sentinel        _next: one way round
                 ◄─   ◄─   ◄─   ◄─     ◄─   ◄─                 _prev: the other
                 head: taken next          tail: taken last

    A freed block that is worth keeping (its content can be found again) goes to the tail, any other to the head.
    So allocation takes worthless blocks first and then evicts the least recently used: no clock, no search.
    A prefix cache hit takes its block out of the middle.
    """

    def __init__(self, num_blocks: int) -> None:
        """Make a pool of ``num_blocks`` free blocks. Raises ValueError if there would be none."""
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be >= 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.ref_cnt = [0] * num_blocks
        self._next = [*range(1, num_blocks + 1), 0]
        self._prev = [num_blocks, *range(num_blocks)]

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks from the head of the free list, each with ``ref_cnt`` 1.

        Raises RuntimeError if there are not enough; callers look at ``num_free`` first.
        """
        if count > self.num_free:
            raise RuntimeError(f"{count} blocks wanted, {self.num_free} of {self.num_blocks} free")
        links, ref_cnt, sentinel = self._next, self.ref_cnt, self.num_blocks
        block_ids = []
        block_id = links[sentinel]
        for _ in range(count):
            block_ids.append(block_id)
            ref_cnt[block_id] = 1
            block_id = links[block_id]
        links[sentinel] = block_id
        self._prev[block_id] = sentinel
        self.num_free -= count
        return block_ids

    def share(self, block_ids: Iterable[int]) -> list[int]:
        """Add one reference to each block; return those that were free and have been taken off the free list."""
        revived = []
        for block_id in block_ids:
            if self.ref_cnt[block_id] == 0:
                after, before = self._next[block_id], self._prev[block_id]
                self._next[before] = after
                self._prev[after] = before
                self.num_free -= 1
                revived.append(block_id)
            self.ref_cnt[block_id] += 1
        return revived

    def free(self, block_ids: Sequence[int], worth_keeping: Container[int] = ()) -> list[int]:
        """Drop one reference from each block; return those that nobody uses any more.

        Blocks are freed from the last to the first, so that of a request's blocks the end is evicted before the
        beginning, which more requests can share.
        """
        links, back, sentinel = self._next, self._prev, self.num_blocks
        released = []
        for block_id in reversed(block_ids):
            count = self.ref_cnt[block_id] - 1
            if count < 0:
                raise RuntimeError(f"block {block_id} is freed more often than it was allocated")
            self.ref_cnt[block_id] = count
            if count == 0:
                if block_id in worth_keeping:
                    before, after = back[sentinel], sentinel
                else:
                    before, after = sentinel, links[sentinel]
                links[before] = block_id
                back[block_id] = before
                links[block_id] = after
                back[after] = block_id
                released.append(block_id)
        self.num_free += len(released)
        return released

    def free_list(self) -> list[int]:
        """The free blocks from head to tail. O(number of free blocks): for tests and pictures."""
        block_ids = []
        block_id = self._next[self.num_blocks]
        while block_id != self.num_blocks:
            block_ids.append(block_id)
            block_id = self._next[block_id]
        return block_ids

    def check(self) -> None:
        """Raise AssertionError unless the free list is sound and holds exactly the blocks with ``ref_cnt`` 0."""
        forward = self.free_list()
        assert len(forward) == self.num_free, f"{len(forward)} blocks on the free list, {self.num_free} counted"
        around = [self.num_blocks, *forward, self.num_blocks]
        for before, block_id in pairwise(around):
            assert self._prev[block_id] == before, f"free list is torn before block {block_id}"
        unused = {block_id for block_id, count in enumerate(self.ref_cnt) if count == 0}
        assert unused == set(forward), f"ref_cnt and free list disagree on blocks {sorted(unused ^ set(forward))}"
