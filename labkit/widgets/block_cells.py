"""Block tables as the numbers that the browser draws.

One block is a *cell* of three 32-bit words, little endian:

    word 0    number of the request that holds it, from 1; 0 for a free block
    word 1    logical index in that request's block table
    word 2    bits 0-15 tokens written, 16-29 ref_cnt, 30 in flight (a swap), 31 findable in the prefix cache

A cell names the request that has held its block longest; who else holds a shared block is said apart, in ``sharers``.
A whole trace is sent once, as the cells that each step changed: see :mod:`labkit.widgets.block_recording`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from labkit.observe import BlockTableState, StepRecord

MAX_TOKENS_PER_BLOCK = 0xFFFF
MAX_REF_CNT = 0x3FFF
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
    """A pool followed record by record, as cells.

    Attributes:
        cells: of all blocks.
        sharers: numbers of the requests that hold a block, for blocks that several hold.
        request_ids: by number, from 1.
    """

    def __init__(self, num_blocks: int, block_size: int, request_ids: list[str] | None = None) -> None:
        """Begin with an empty pool, and with numbers that requests have already.

        Raises ValueError for a block size that a cell cannot hold.
        """
        if not 1 <= block_size <= MAX_TOKENS_PER_BLOCK:
            raise ValueError(f"block_size must be 1 to {MAX_TOKENS_PER_BLOCK} to be drawn, got {block_size}")
        self.table = BlockTableState(num_blocks, block_size)
        self.cells: Cells = np.zeros((num_blocks, 3), "<u4")
        self.sharers: dict[int, frozenset[int]] = {}
        self.request_ids: list[str] = list(request_ids or ())
        self._numbers = {request_id: number for number, request_id in enumerate(self.request_ids, 1)}

    def apply(self, record: StepRecord) -> set[int]:
        """Take in a step; returns the ids of the blocks that it changed."""
        changed = self.table.apply(record)
        if changed:
            self.cells[list(changed)] = [self._cell(block_id) for block_id in changed]
        for block_id in changed:
            holders = self.table.holders(block_id)
            if len(holders) > 1:
                self.sharers[block_id] = frozenset(map(self._number, holders))
            else:
                self.sharers.pop(block_id, None)
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
