"""A trace played back: which block holds what after each step, from the events alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .events import (
    BlockCopied,
    BlocksAllocated,
    BlocksCached,
    BlocksEvicted,
    BlocksFreed,
    BlocksLanded,
    BlocksShared,
    BlocksSwappedIn,
    BlocksSwappedOut,
    Event,
    StepRecord,
)


class BlockView(NamedTuple):
    """One block at one moment.

    Attributes:
        request_id: the request that has held it longest; of a block that only the prefix cache knows, or that is in
            flight, the one that held it last; None for a free block.
        logical_index: where the block stands, or stood, in that request's block table.
        num_tokens: slots that hold a computed token; 0 for a free block.
        ref_cnt: how many block tables it stands in.
        is_cached: whether the prefix cache can find it.
        is_in_flight: whether it is in no table, and not free either: a copy from or to host memory is under way.
    """

    request_id: str | None
    logical_index: int
    num_tokens: int
    ref_cnt: int
    is_cached: bool
    is_in_flight: bool = False


FREE_BLOCK = BlockView(None, 0, 0, 0, False)


class BlockTableState:
    """Block tables, reference counts and the split of the pool, rebuilt from a trace record by record.

    It mirrors the allocator without its free list or hashes: what an event does to a block is all there is::

        for record in trace:
            changed = state.apply(record)       # ids of the blocks that look different now

    The split adds up as in :class:`labkit.memory.KVCacheUsage`:
    live tokens + internal fragmentation + cached + in flight + free = all slots.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """Begin with an empty pool. Raises ValueError unless both are >= 1."""
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks and block_size must be >= 1, got {num_blocks} and {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.block_tables: dict[str, list[int]] = {}
        self.num_computed_tokens: dict[str, int] = {}
        self.num_live_tokens = 0
        self.num_referenced_blocks = 0
        self.num_cached_free_blocks = 0
        self.num_in_flight_blocks = 0
        self._holders: list[dict[str, int]] = [{} for _ in range(num_blocks)]  # request -> index in its table
        self._last_holder: list[tuple[str, int] | None] = [None] * num_blocks
        self._num_written = [0] * num_blocks
        self._is_cached = [False] * num_blocks
        self._num_copies = [0] * num_blocks  # between the block and host memory, under way

    def apply(self, record: StepRecord) -> set[int]:
        """Take in one step; returns the ids of the blocks that it changed.

        Events before the forward pass come first, then its tokens are written, then the rest.
        """
        changed: set[int] = set()
        for event in record.events[: record.num_events_before]:
            self._take_in(event, changed)
        for request_id, num_tokens in zip(record.scheduled_ids, record.num_scheduled_tokens, strict=True):
            if request_id in self.block_tables:  # else aborted or preempted while the step was under way
                self._write(request_id, num_tokens, changed)
        for event in record.events[record.num_events_before :]:
            self._take_in(event, changed)
        return changed

    # ------------------------------------------------------------------ looking

    @property
    def num_free_blocks(self) -> int:
        """Blocks that hold nothing."""
        return self.num_blocks - self.num_referenced_blocks - self.num_cached_free_blocks - self.num_in_flight_blocks

    @property
    def num_fragmented_slots(self) -> int:
        """Slots of referenced blocks that hold no computed token."""
        return self.num_referenced_blocks * self.block_size - self.num_live_tokens

    def block(self, block_id: int) -> BlockView:
        """What a block holds now."""
        holders, is_cached = self._holders[block_id], self._is_cached[block_id]
        is_in_flight = not holders and self._num_copies[block_id] > 0
        if holders:
            request_id, index = next(iter(holders.items()))
        elif is_cached or is_in_flight:
            request_id, index = self._last_holder[block_id] or (None, 0)
        else:
            return FREE_BLOCK
        return BlockView(request_id, index, self._num_written[block_id], len(holders), is_cached, is_in_flight)

    def holders(self, block_id: int) -> list[str]:
        """The requests in whose tables a block stands, the first to hold it first."""
        return list(self._holders[block_id])

    # ------------------------------------------------------------------ inside

    def _take_in(self, event: Event, changed: set[int]) -> None:
        match event:
            case BlocksAllocated(request_id, first_index, block_ids):
                self._join(request_id, first_index, block_ids, changed)
            case BlocksShared(request_id, first_index, block_ids, num_tokens):
                self._join(request_id, first_index, block_ids, changed)
                self.num_computed_tokens[request_id] = num_tokens
            case BlockCopied(request_id, index, src, dst):
                num_written = self._num_written[src]
                self._drop(request_id, src)
                self._hold(request_id, index, dst)
                self._set_written(dst, num_written)
                self.block_tables[request_id][index] = dst
                changed.update((src, dst))
            case BlocksFreed(request_id, block_ids):
                for block_id in block_ids:
                    self._drop(request_id, block_id)
                self.block_tables.pop(request_id, None)
                self.num_computed_tokens.pop(request_id, None)
                changed.update(block_ids)
            case BlocksCached(block_ids):
                self._set_cached(block_ids, True, changed)
            case BlocksEvicted(block_ids):
                self._set_cached(block_ids, False, changed)
            case BlocksSwappedOut(_, block_ids, _):
                self._add_copies(block_ids, 1, changed)
            case BlocksSwappedIn(request_id, first_index, block_ids, _, num_tokens):
                self.num_computed_tokens[request_id] = first_index * self.block_size
                self._write(request_id, num_tokens - first_index * self.block_size, changed)
                self._add_copies(block_ids, 1, changed)
            case BlocksLanded(block_ids):
                self._add_copies(block_ids, -1, changed)
            case _:
                pass  # requests that arrive, are preempted or finish: their blocks have events of their own

    def _join(self, request_id: str, first_index: int, block_ids: Sequence[int], changed: set[int]) -> None:
        """Blocks take their places in a table from ``first_index`` on, instead of what stood there."""
        table = self.block_tables.setdefault(request_id, [])
        self.num_computed_tokens.setdefault(request_id, 0)
        for block_id in table[first_index:]:
            self._drop(request_id, block_id)
            changed.add(block_id)
        del table[first_index:]
        for index, block_id in enumerate(block_ids, first_index):
            self._hold(request_id, index, block_id)
        table.extend(block_ids)
        changed.update(block_ids)

    def _hold(self, request_id: str, index: int, block_id: int) -> None:
        holders = self._holders[block_id]
        if not holders:
            self.num_referenced_blocks += 1
            self._count_unheld(block_id, -1)
            if not self._is_cached[block_id]:
                self._num_written[block_id] = 0
            self.num_live_tokens += self._num_written[block_id]
        holders[request_id] = index

    def _drop(self, request_id: str, block_id: int) -> None:
        holders = self._holders[block_id]
        self._last_holder[block_id] = request_id, holders.pop(request_id)
        if not holders:
            self.num_referenced_blocks -= 1
            self.num_live_tokens -= self._num_written[block_id]
            self._count_unheld(block_id, 1)

    def _count_unheld(self, block_id: int, change: int) -> None:
        """A block that no table holds, any more or yet, joins (1) or leaves (-1) those that it is counted among."""
        if self._num_copies[block_id]:
            self.num_in_flight_blocks += change
        elif self._is_cached[block_id]:
            self.num_cached_free_blocks += change

    def _add_copies(self, block_ids: Iterable[int], change: int, changed: set[int]) -> None:
        for block_id in block_ids:
            if not self._holders[block_id]:
                self._count_unheld(block_id, -1)
            self._num_copies[block_id] += change
            if not self._holders[block_id]:
                self._count_unheld(block_id, 1)
            changed.add(block_id)

    def _write(self, request_id: str, num_tokens: int, changed: set[int]) -> None:
        """The next ``num_tokens`` positions of a request get their K and V."""
        table, size = self.block_tables[request_id], self.block_size
        position = self.num_computed_tokens[request_id]
        end = self.num_computed_tokens[request_id] = position + num_tokens
        while position < end:
            block_id = table[position // size]
            position = min(end, (position // size + 1) * size)
            self._set_written(block_id, (position - 1) % size + 1)
            changed.add(block_id)

    def _set_written(self, block_id: int, num_tokens: int) -> None:
        """Of a block that somebody holds."""
        self.num_live_tokens += num_tokens - self._num_written[block_id]
        self._num_written[block_id] = num_tokens

    def _set_cached(self, block_ids: Iterable[int], is_cached: bool, changed: set[int]) -> None:
        for block_id in block_ids:
            if not self._holders[block_id]:
                self._count_unheld(block_id, -1)
            self._is_cached[block_id] = is_cached
            if not self._holders[block_id]:
                self._count_unheld(block_id, 1)
            changed.add(block_id)
