"""A whole trace as the numbers that a browser plays: what each shown step changed, who shares, and what happened."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from labkit.observe import (
    BlockCopied,
    BlocksAllocated,
    BlocksCached,
    BlocksEvicted,
    BlocksShared,
    BlocksSwappedIn,
    BlocksSwappedOut,
    RequestFinished,
    RequestPreempted,
    StepRecord,
    Trace,
)

from .block_cells import Cells, CellState, PoolSplit

MAX_CHANGES = 4_000_000
"""Changed cells that a player holds: 64 MB in the browser."""

EVENTS = {
    "preemption": (RequestPreempted,),
    "eviction": (BlocksEvicted,),
    "copy": (BlockCopied,),
    "swap": (BlocksSwappedOut, BlocksSwappedIn),
    "sharing": (BlocksShared,),
    "finish": (RequestFinished,),
}
"""What a reader can jump to, each a bit of the mask of a step."""


@dataclass(frozen=True, slots=True)
class EncodedTrace:
    """A trace for the browser, and the picture of its fullest moment for where there is no browser.

    Attributes:
        changes: zlib of four columns of uint32, one row a changed cell: block id, then the cell's three words.
        sharing: zlib of three columns, one row for each request that joins or leaves those that share a block: the
            shown step from 1, block id, number of the request with bit 31 set if it leaves.
        steps: zlib of seven columns, one row a shown step: rows of ``changes`` up to its end, number of the step from
            1, milliseconds since the start, running and waiting requests, referenced blocks, mask of ``EVENTS``.
        is_arena: every table is one contiguous run at all times, as the allocators without paging have it.
    """

    changes: bytes
    sharing: bytes
    steps: bytes
    request_ids: list[str]
    is_arena: bool
    fullest_step: int
    fullest_cells: Cells
    fullest_split: PoolSplit


def encode_trace(trace: Trace, every: int = 1, request_ids: list[str] | None = None) -> EncodedTrace:
    """Encode every ``every``-th step of a trace, and its last; ``request_ids`` have their numbers already.

    Raises ValueError if ``every`` < 1, the trace is empty or has more changes than ``MAX_CHANGES``.
    """
    if every < 1:
        raise ValueError(f"every must be >= 1, got {every}")
    if not len(trace):
        raise ValueError("the trace has no steps to show: generate something first")
    state = CellState(trace.num_blocks, trace.block_size, request_ids)
    changes = tuple(array("I") for _ in range(4))
    sharing = tuple(array("I") for _ in range(3))
    steps = tuple(array("I") for _ in range(7))
    start = trace.steps[0].start
    changed: set[int] = set()
    known_sharers: dict[int, frozenset[int]] = {}
    mask = 0
    fullest = 0, state.cells.copy(), state.split()
    for number, record in enumerate(trace, 1):
        changed |= state.apply(record)
        mask |= _mask(record)
        if number % every and number != len(trace):
            continue
        _append_changes(changes, changed, state.cells)
        _append_sharing(sharing, len(steps[0]) + 1, changed, known_sharers, state.sharers)
        if len(changes[0]) > MAX_CHANGES:
            raise ValueError(
                f"the first {number} of {len(trace)} steps change more than {MAX_CHANGES} blocks, too many to send: "
                f"raise every (now {every}) to show fewer steps"
            )
        split = state.split()
        milliseconds = max(0, round((record.end - start) * 1000))
        counts = record.num_running, record.num_waiting, split.num_referenced_blocks
        for column, value in zip(steps, (len(changes[0]), number, milliseconds, *counts, mask), strict=True):
            column.append(value)
        if split.num_referenced_blocks > fullest[2].num_referenced_blocks:
            fullest = number, state.cells.copy(), split
        changed, mask = set(), 0
    packed = _packed(changes), _packed(sharing), _packed(steps)
    return EncodedTrace(*packed, state.request_ids, _is_arena(trace), *fullest)


def _mask(record: StepRecord) -> int:
    """One bit for each kind of event in the step."""
    return sum(
        1 << bit for bit, kinds in enumerate(EVENTS.values()) if any(isinstance(e, kinds) for e in record.events)
    )


def _is_arena(trace: Trace) -> bool:
    """Whether blocks are only ever handed out in runs, several requests have one, and nothing is shared or cached."""
    holders = set()
    for record in trace:
        for event in record.events:
            if isinstance(event, BlocksShared | BlocksCached):
                return False
            if isinstance(event, BlocksAllocated):
                holders.add(event.request_id)
                if any(after != before + 1 for before, after in pairwise(event.block_ids)):
                    return False
    return len(holders) > 1


def _append_changes(columns: tuple[array[int], ...], changed: Iterable[int], cells: Cells) -> None:
    block_ids = sorted(changed)
    columns[0].extend(block_ids)
    for column, words in zip(columns[1:], cells[block_ids].T, strict=True):
        column.extend(words.tolist())


def _append_sharing(
    columns: tuple[array[int], ...],
    position: int,
    changed: Iterable[int],
    known: dict[int, frozenset[int]],
    sharers: dict[int, frozenset[int]],
) -> None:
    """Append who joined or left since the sharers were ``known``, which is brought up to date."""
    for block_id in sorted(changed):
        before, now = known.get(block_id, frozenset()), sharers.get(block_id, frozenset())
        for request in sorted(before ^ now):
            for column, value in zip(columns, (position, block_id, request | (request in before) << 31), strict=True):
                column.append(value)
        known[block_id] = now


def _packed(columns: tuple[array[int], ...]) -> bytes:
    return zlib.compress(np.array(columns, "<u4").tobytes(), level=4)
