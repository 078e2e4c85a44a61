"""What the browser gets: blocks and steps packed into 32-bit words.

::

    frame  = header, then one record for each block that changed
    header = number of records, step, live tokens, referenced blocks, cached free blocks, running, waiting, milliseconds
    record = block id, request number + 1 (0: none), logical index, num_tokens | ref_cnt << 16 | is_cached << 31

The words are little-endian, as typed arrays are in every browser that exists.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence

from labkit.observe import BlockTableState, StepRecord

HEADER_WORDS = 8
RECORD_WORDS = 4
MAX_BLOCK_SIZE = (1 << 16) - 1
_MAX_REF_CNT = (1 << 15) - 1
_MAX_WORD = (1 << 32) - 1
_WORD = next(code for code in "IL" if array(code).itemsize == 4)


class FramePacker:
    """Numbers requests in the order in which they first hold a block, and packs blocks and steps."""

    def __init__(self, state: BlockTableState) -> None:
        """Raises ValueError for a block size that a record cannot hold."""
        if state.block_size > MAX_BLOCK_SIZE:
            raise ValueError(f"block_size must be <= {MAX_BLOCK_SIZE} to be shown, got {state.block_size}")
        self.state = state
        self.request_ids: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, request_id: str) -> int:
        """The number of a request, from 0."""
        number = self._numbers.get(request_id)
        if number is None:
            number = self._numbers[request_id] = len(self.request_ids)
            self.request_ids.append(request_id)
        return number

    def blocks(self, block_ids: Iterable[int]) -> bytes:
        """The records of some blocks as they are now."""
        words = array(_WORD)
        for block_id in block_ids:
            view = self.state.block(block_id)
            number = 0 if view.request_id is None else self.number(view.request_id) + 1
            packed = view.num_tokens | min(view.ref_cnt, _MAX_REF_CNT) << 16 | view.is_cached << 31
            words.extend((block_id, number, view.logical_index, packed))
        return _little_endian(words)

    def frame(self, step: StepRecord | None, start: float, block_ids: Sequence[int]) -> bytes:
        """Header and records after ``step`` (None: before the first); ``start`` is the second from which time counts."""
        state = self.state
        header = (
            len(block_ids),
            step.step if step else 0,
            state.num_live_tokens,
            state.num_referenced_blocks,
            state.num_cached_free_blocks,
            step.num_running if step else 0,
            step.num_waiting if step else 0,
            min(_MAX_WORD, max(0, round((step.end - start) * 1000))) if step else 0,
        )
        return _little_endian(array(_WORD, header)) + self.blocks(block_ids)


def _little_endian(words: array[int]) -> bytes:
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()
