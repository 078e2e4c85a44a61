"""Exercises of lesson 02: reservations, holes and blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hypothesis import strategies as st

from labkit.memory.arena import FirstFitArena

from .engine_runs import run_with_pool
from .exercise import Exercise
from .judging import as_list, close, on_all, same


def wasted_share(lengths: Sequence[int], block_size: int) -> float:
    """Empty slots over all slots of the requests' blocks."""
    slots = sum(-(-length // block_size) * block_size for length in lengths)
    return 1 - sum(lengths) / slots


def _judge_wasted_share(attempt: Callable[..., float]) -> None:
    def compare(case: tuple[list[int], int]) -> None:
        close(attempt(*case), wasted_share(*case), "the wasted share")

    lengths = st.lists(st.integers(1, 3000), min_size=1, max_size=6)
    on_all(st.tuples(lengths, st.sampled_from([16, 1, 8, 256])), compare)


def first_fit(holes: Sequence[tuple[int, int]], length: int) -> int | None:
    """The start of the first hole that is long enough."""
    return next((start for start, size in holes if size >= length), None)


def _judge_first_fit(attempt: Callable[..., int | None]) -> None:
    def compare(case: tuple[list[int], int]) -> None:
        sizes, length = case
        arena, runs = FirstFitArena(64), []
        for size in sizes:
            start = arena.allocate(size)
            if start is not None:
                runs.append((start, size))
        for start, size in runs[::2]:  # every other run goes: holes of different sizes
            arena.free(start, size)
        holes = arena.holes
        same(attempt(list(holes), length), first_fit(holes, length), f"the place for {length} blocks in holes {holes}")

    on_all(st.tuples(st.lists(st.integers(1, 12), min_size=1, max_size=10), st.integers(1, 16)), compare)


class FreeList:
    """A stack of block ids: the block that came back last goes out first."""

    def __init__(self, num_blocks: int) -> None:
        self._free = list(range(num_blocks))

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` free blocks."""
        return [self._free.pop() for _ in range(count)]

    def free(self, block_ids: list[int]) -> None:
        """Take blocks back."""
        self._free.extend(block_ids)


def _judge_free_list(attempt: type) -> None:
    run_with_pool(attempt)


def blocks_to_copy(
    block_table: Sequence[int], ref_cnt: Sequence[int], first_token: int, num_tokens: int, block_size: int
) -> list[int]:
    """Blocks that will be written to and that somebody else holds as well."""
    first, last = first_token // block_size, (first_token + num_tokens - 1) // block_size
    return [block for block in block_table[first : last + 1] if ref_cnt[block] > 1]


def _judge_blocks_to_copy(attempt: Callable[..., list[int]]) -> None:
    def compare(case: tuple[list[int], int, int, int]) -> None:
        counts, block_size, first, count = case
        table = list(range(len(counts)))[::-1]
        first %= len(counts) * block_size
        arguments = table, counts, first, count, block_size
        what = f"blocks to copy, table {table}, ref_cnt {counts},"
        same(as_list(attempt(*arguments), what), blocks_to_copy(*arguments), what)

    counts = st.lists(st.integers(1, 3), min_size=1, max_size=5)
    on_all(st.tuples(counts, st.sampled_from([4, 1, 2]), st.integers(0, 20), st.integers(1, 9)), compare)


EXERCISES = (
    Exercise(
        "02-wasted-share",
        "What block rounding wastes",
        "Write wasted_share(lengths, block_size): the share of the slots in the requests' blocks that hold no token.",
        (
            "How many slots does a request of 17 tokens hold with blocks of 16?",
            "Add up slots and tokens over all requests, then compare.",
            "1 - tokens / slots.",
        ),
        _judge_wasted_share,
        wasted_share,
    ),
    Exercise(
        "02-first-fit",
        "The first hole that fits",
        "Before paging, a request needed one run of blocks. Write first_fit(holes, length): holes is a list of "
        "(start, length) in order of start; return the start of the first that is long enough, or None.",
        (
            "Walk through the holes from the left.",
            "A hole that is longer than needed will do: its rest stays a hole.",
            "None if no single hole is long enough, even if all together would be.",
        ),
        _judge_first_fit,
        first_fit,
    ),
    Exercise(
        "02-free-list",
        "A free list for the real engine",
        "Write a class with __init__(num_blocks), allocate(count) -> list of block ids, and free(block_ids). The "
        "engine of this lab runs on it: twelve requests, forks, and preemptions because the pool is small. A block "
        "must never be handed out while somebody holds it, and every block must come back.",
        (
            "Which blocks are free at the start? Keep exactly those that nobody holds.",
            "A list used as a stack is enough: pop to allocate, extend to free.",
            "The engine asks for no more blocks than are free; num_blocks ids from 0.",
        ),
        _judge_free_list,
        FreeList,
    ),
    Exercise(
        "02-copy-on-write",
        "Who must be copied before a write",
        "Write blocks_to_copy(block_table, ref_cnt, first_token, num_tokens, block_size) -> list of block ids: the "
        "blocks into which the sequence is about to write tokens first_token to first_token + num_tokens - 1 and "
        "which others hold too. Blocks beyond the end of the table are new and need no copy.",
        (
            "Into which entries of the table do the tokens fall?",
            "From first_token // block_size to (first_token + num_tokens - 1) // block_size.",
            "Of those, the ones with ref_cnt above 1.",
        ),
        _judge_blocks_to_copy,
        blocks_to_copy,
    ),
)
