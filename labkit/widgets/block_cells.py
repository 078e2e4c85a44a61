"""Block tables as the numbers that the browser draws.

One block is a *cell* of three 32-bit words, little endian:

    word 0    number of the request that holds it, from 1; 0 for a free block
    word 1    logical index in that request's block table
    word 2    bits 0-15 tokens written, 16-29 ref_cnt, 30 in flight (a swap), 31 findable in the prefix cache

A whole trace is sent once, as the cells that each step changed: see :func:`encode_trace`.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from labkit.observe import BlockTableState, StepRecord, Trace

MAX_TOKENS_PER_BLOCK = 0xFFFF
MAX_REF_CNT = 0x3FFF
MAX_CHANGES = 4_000_000
"""Changed cells that a player holds: 64 MB in the browser."""

Cells = npt.NDArray[np.uint32]
"""[num_blocks, 3] words."""


@dataclass(frozen=True, slots=True)
class PoolSplit:
    """What the cells say about the pool; the five kinds of slots add up to all of them."""

    num_blocks: int
    block_size: int
    num_referenced_blocks: int
    num_cached_free_blocks: int
    num_in_flight_blocks: int
    num_live_tokens: int

    @property
    def num_free_blocks(self) -> int:
        return self.num_blocks - self.num_referenced_blocks - self.num_cached_free_blocks - self.num_in_flight_blocks

    @property
    def num_fragmented_slots(self) -> int:
        return self.num_referenced_blocks * self.block_size - self.num_live_tokens

    def __str__(self) -> str:
        in_flight = f"{self.num_in_flight_blocks} in flight, " if self.num_in_flight_blocks else ""
        return (
            f"{self.num_referenced_blocks} of {self.num_blocks} blocks in use, {self.num_live_tokens} live tokens, "
            f"{self.num_fragmented_slots} slots fragmented, {self.num_cached_free_blocks} blocks cached, "
            f"{in_flight}{self.num_free_blocks} free"
        )


class CellState:
    """A pool followed record by record, as cells."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """Begin with an empty pool. Raises ValueError for a block size that a cell cannot hold."""
        if not 1 <= block_size <= MAX_TOKENS_PER_BLOCK:
            raise ValueError(f"block_size must be 1 to {MAX_TOKENS_PER_BLOCK} to be drawn, got {block_size}")
        self.table = BlockTableState(num_blocks, block_size)
        self.cells: Cells = np.zeros((num_blocks, 3), "<u4")
        self.request_ids: list[str] = []
        self._numbers: dict[str, int] = {}

    def apply(self, record: StepRecord) -> set[int]:
        """Take in a step; returns the ids of the blocks that it changed."""
        changed = self.table.apply(record)
        if changed:
            self.cells[list(changed)] = [self._cell(block_id) for block_id in changed]
        return changed

    def split(self) -> PoolSplit:
        """The pool's split now."""
        table = self.table
        return PoolSplit(
            table.num_blocks,
            table.block_size,
            table.num_referenced_blocks,
            table.num_cached_free_blocks,
            table.num_in_flight_blocks,
            table.num_live_tokens,
        )

    def _cell(self, block_id: int) -> tuple[int, int, int]:
        view = self.table.block(block_id)
        ref_cnt = min(view.ref_cnt, MAX_REF_CNT)
        return (
            0 if view.request_id is None else self._number(view.request_id),
            view.logical_index,
            view.num_tokens | ref_cnt << 16 | view.is_in_flight << 30 | view.is_cached << 31,
        )

    def _number(self, request_id: str) -> int:
        number = self._numbers.get(request_id)
        if number is None:
            self.request_ids.append(request_id)
            number = self._numbers[request_id] = len(self.request_ids)
        return number


@dataclass(frozen=True, slots=True)
class EncodedTrace:
    """A trace for the browser, and the picture of its fullest moment for where there is no browser.

    Attributes:
        changes: zlib of four columns of uint32, one row a changed cell: block id, then the cell's three words.
        steps: zlib of six columns of uint32, one row a shown step: rows of ``changes`` up to its end, number of the
            step from 1, milliseconds since the start, running and waiting requests, referenced blocks.
    """

    changes: bytes
    steps: bytes
    request_ids: list[str]
    fullest_step: int
    fullest_cells: Cells
    fullest_split: PoolSplit


def encode_trace(trace: Trace, every: int = 1) -> EncodedTrace:
    """Encode every ``every``-th step of a trace, and its last.

    Raises ValueError if ``every`` < 1, the trace is empty or has more changes than ``MAX_CHANGES``.
    """
    if every < 1:
        raise ValueError(f"every must be >= 1, got {every}")
    if not len(trace):
        raise ValueError("the trace has no steps to show: generate something first")
    state = CellState(trace.num_blocks, trace.block_size)
    changes = tuple(array("I") for _ in range(4))
    steps = tuple(array("I") for _ in range(6))
    start = trace.steps[0].start
    changed: set[int] = set()
    fullest = 0, state.cells.copy(), state.split()
    for number, record in enumerate(trace, 1):
        changed |= state.apply(record)
        if number % every and number != len(trace):
            continue
        _append_changes(changes, changed, state.cells)
        changed = set()
        if len(changes[0]) > MAX_CHANGES:
            raise ValueError(
                f"the first {number} of {len(trace)} steps change more than {MAX_CHANGES} blocks, too many to send: "
                f"raise every (now {every}) to show fewer steps"
            )
        split = state.split()
        milliseconds = max(0, round((record.end - start) * 1000))
        row = len(changes[0]), number, milliseconds, record.num_running, record.num_waiting, split.num_referenced_blocks
        for column, value in zip(steps, row, strict=True):
            column.append(value)
        if split.num_referenced_blocks > fullest[2].num_referenced_blocks:
            fullest = number, state.cells.copy(), split
    return EncodedTrace(_packed(changes), _packed(steps), state.request_ids, *fullest)


def _append_changes(columns: tuple[array[int], ...], changed: Iterable[int], cells: Cells) -> None:
    block_ids = sorted(changed)
    columns[0].extend(block_ids)
    for column, words in zip(columns[1:], cells[block_ids].T, strict=True):
        column.extend(words.tolist())


def _packed(columns: tuple[array[int], ...]) -> bytes:
    return zlib.compress(np.array(columns, "<u4").tobytes(), level=4)
