"""Where the slots of a KV cache are at one moment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVCacheUsage:
    """A split of the pool that adds up: live tokens + internal fragmentation + cached + free + in flight = all slots.

    Attributes:
        num_referenced_blocks: blocks that stand in at least one block table.
        num_cached_free_blocks: unreferenced blocks whose content the prefix cache can still find.
        num_free_blocks: unreferenced blocks that hold nothing.
        num_live_tokens: slots of referenced blocks that hold a computed token, a shared slot counted once.
        num_in_flight_blocks: unreferenced blocks that a copy from or to host memory still reads or writes.
    """

    num_blocks: int
    block_size: int
    num_referenced_blocks: int
    num_cached_free_blocks: int
    num_free_blocks: int
    num_live_tokens: int
    num_in_flight_blocks: int = 0

    @property
    def num_slots(self) -> int:
        """Slots in the pool, one token each."""
        return self.num_blocks * self.block_size

    @property
    def num_fragmented_slots(self) -> int:
        """Slots of referenced blocks that hold no computed token: internal fragmentation, in tokens."""
        return self.num_referenced_blocks * self.block_size - self.num_live_tokens

    @property
    def kv_cache_usage(self) -> float:
        """Share of blocks that are referenced, 0 to 1."""
        return self.num_referenced_blocks / self.num_blocks

    @property
    def internal_fragmentation(self) -> float:
        """Share of referenced slots that hold no token, 0 to 1."""
        referenced = self.num_referenced_blocks * self.block_size
        return self.num_fragmented_slots / referenced if referenced else 0.0
