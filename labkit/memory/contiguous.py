"""The world before paging: each sequence in one contiguous run of blocks. For comparison, in the same engine.

A run is expressed as a block table of consecutive ids, so the same kernels read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from labkit.observe import BlockCopied, BlocksAllocated, BlocksFreed, Event

from .arena import FirstFitArena
from .prefix_cache import CachedBlock
from .swap_space import BlockPairs
from .usage import KVCacheUsage

Reservation = Callable[[int, int], int]
"""How many tokens to reserve, from (tokens now, length that the sequence will reach at most)."""


def reserve_max(max_model_len: int) -> Reservation:
    """Reserve the model's maximum for everybody: what an engine must do that knows nothing of lengths."""
    return lambda num_tokens, max_total_tokens: max_model_len


def reserve_power_of_two(num_tokens: int, max_total_tokens: int) -> int:
    """Reserve the next power of two of the final length: a forecast that is right within a factor of two."""
    return 1 << (max_total_tokens - 1).bit_length()


def reserve_oracle(num_tokens: int, max_total_tokens: int) -> int:
    """Reserve exactly the final length: a forecast that is always right. Nobody has one."""
    return max_total_tokens


def reserve_nothing(num_tokens: int, max_total_tokens: int) -> int:
    """Reserve only what is needed now; grow in place while there is a hole behind, else move everything."""
    return num_tokens


def reservation_named(name: str, max_model_len: int) -> Reservation:
    """One of the above by the name that an allocator goes by; ValueError, naming them, for another."""
    reservations: dict[str, Reservation] = {
        "reserve_max": reserve_max(max_model_len),
        "reserve_power_of_two": reserve_power_of_two,
        "reserve_oracle": reserve_oracle,
        "first_fit": reserve_nothing,
    }
    if name not in reservations:
        raise ValueError(f"allocator must be paged or one of {', '.join(reservations)}, got {name!r}")
    return reservations[name]


@dataclass(slots=True)
class _Run:
    start: int
    block_ids: list[int]
    num_computed_tokens: int = 0


class ContiguousKVManager:
    """Gives each sequence one contiguous run of blocks from a first-fit arena.

    Same interface as :class:`KVCacheManager`. No sharing: no prefix cache, no forks. A run that cannot grow in
    place moves to the first hole that is long enough, its own space counted as part of it, and is copied.
    """

    can_share = False

    def __init__(self, num_blocks: int, block_size: int, reservation: Reservation) -> None:
        """Make an arena of ``num_blocks`` blocks; ``reservation`` says how much a new sequence gets."""
        self.block_size = block_size
        self.events: list[Event] | None = None
        self.arena = FirstFitArena(num_blocks)
        self._reservation = reservation
        self._runs: dict[str, _Run] = {}

    @property
    def num_blocks(self) -> int:
        return self.arena.size

    @property
    def num_free_blocks(self) -> int:
        """Free blocks in all holes together; a sequence needs them in one."""
        return self.arena.num_free

    @property
    def external_fragmentation(self) -> float:
        """Share of the free blocks that lie outside the largest hole, 0 to 1."""
        return 1 - self.arena.largest_hole / self.arena.num_free if self.arena.num_free else 0.0

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._runs

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def block_table(self, request_id: str) -> list[int]:
        """The blocks of a sequence, in order, those reserved ahead included."""
        return self._runs[request_id].block_ids

    def num_computed_tokens(self, request_id: str) -> int:
        """Tokens of a sequence that have K and V in its blocks."""
        return self._runs[request_id].num_computed_tokens

    def match_prefix(self, token_ids: Sequence[int], salt: str | None = None) -> list[CachedBlock]:
        """Nothing: a run holds one sequence."""
        return []

    def admit(
        self,
        request_id: str,
        num_tokens: int,
        *,
        max_total_tokens: int | None = None,
        prefix: Sequence[CachedBlock] = (),
        salt: str | None = None,
        keep_free: int = 0,
    ) -> bool:
        """Reserve a run for a new sequence; False, and nothing changed, if no hole is long enough.

        A reservation longer than the whole arena is cut to it.
        """
        if request_id in self._runs:
            raise ValueError(f"request_id {request_id!r} already has a block table")
        reserved = max(num_tokens, self._reservation(num_tokens, max_total_tokens or num_tokens))
        length = min(self.blocks_for(reserved), self.num_blocks)
        start = self.arena.allocate(length) if length + keep_free <= self.num_free_blocks else None
        if start is None:
            return False
        self._runs[request_id] = _Run(start, list(range(start, start + length)))
        self._record_allocated(request_id, 0)
        return True

    def extend(self, request_id: str, first_token: int, num_tokens: int) -> list[tuple[int, int]] | None:
        """Make positions ``[first_token, first_token + num_tokens)`` writable; returns the copies of a move."""
        run = self._runs[request_id]
        old_start, old_length = run.start, len(run.block_ids)
        length = self.blocks_for(first_token + num_tokens)
        if length <= old_length:
            return []
        self.arena.free(old_start, old_length)
        start = self.arena.allocate_at(old_start, length)
        if start is None:
            start = self.arena.allocate(length)
        if start is None:
            self.arena.allocate_at(old_start, old_length)
            return None
        run.start, run.block_ids[:] = start, range(start, start + length)
        if start == old_start:
            self._record_allocated(request_id, old_length)
            return []
        # All before first_token may be written, also by a step that is still under way.
        copies = [(old_start + i, start + i) for i in range(self.blocks_for(first_token))]
        if self.events is not None:
            self.events.extend(BlockCopied(request_id, i, src, dst) for i, (src, dst) in enumerate(copies))
        self._record_allocated(request_id, len(copies))
        return copies

    def fork(self, parent_id: str, child_id: str) -> None:
        """Raises NotImplementedError: runs are not shared."""
        raise NotImplementedError("n > 1 needs blocks that can be shared: use the paged allocator")

    def commit(self, request_id: str, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        """Say that the first ``num_computed_tokens`` tokens have K and V in the sequence's blocks."""
        self._runs[request_id].num_computed_tokens = num_computed_tokens

    def free(self, request_id: str) -> None:
        """Give a sequence's run back."""
        run = self._runs.pop(request_id)
        self.arena.free(run.start, len(run.block_ids))
        if self.events is not None:
            self.events.append(BlocksFreed(request_id, tuple(run.block_ids)))

    def swap_out(self, request_id: str) -> None:
        """Never: there is no host memory here, so a preempted sequence is computed again."""

    def swap_in(
        self,
        request_id: str,
        num_tokens: int,
        *,
        prefix: Sequence[CachedBlock] = (),
        salt: str | None = None,
        keep_free: int = 0,
    ) -> None:
        """Nothing: no sequence was swapped out."""

    def land(self, swap_outs: BlockPairs, swap_ins: BlockPairs) -> None:
        """Nothing is under way."""

    def reset_prefix_cache(self) -> None:
        """Nothing to forget."""

    def usage(self) -> KVCacheUsage:
        """Where the slots are now; what is reserved ahead counts as internal fragmentation."""
        return KVCacheUsage(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            num_referenced_blocks=self.num_blocks - self.arena.num_free,
            num_cached_free_blocks=0,
            num_free_blocks=self.arena.num_free,
            num_live_tokens=sum(run.num_computed_tokens for run in self._runs.values()),
        )

    def check(self) -> None:
        """Raise AssertionError unless runs and holes tile the arena."""
        pieces = sorted([*self.arena.holes, *((run.start, len(run.block_ids)) for run in self._runs.values())])
        position = 0
        for start, length in pieces:
            assert start == position, f"blocks {position} to {start} are in no run and in no hole, or in two"
            position = start + length
        assert position == self.num_blocks
        assert sum(length for _, length in self.arena.holes) == self.arena.num_free

    def _record_allocated(self, request_id: str, first_index: int) -> None:
        if self.events is not None:
            block_ids = tuple(self._runs[request_id].block_ids[first_index:])
            self.events.append(BlocksAllocated(request_id, first_index, block_ids))
