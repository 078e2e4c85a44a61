"""The blocks that one sequence holds, in order, and how far they are filled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from labkit.observe import BlocksAllocated, BlocksCached, BlocksFreed, BlocksShared

from .block_store import BlockStore
from .prefix_cache import CachedBlock


@dataclass(slots=True, eq=False)
class SequenceBlocks:
    """The block table of one sequence, and which of its tokens are in there.

    With blocks of 4 tokens::

        block_ids               [b0]  [b1]  [b2]  [b3]      position p is in block_ids[p // 4]
        num_computed_tokens     ████  ████  ██              10 have K and V
        num_cached_blocks       ████  ████                  2 are full and have been through the prefix cache

    Attributes:
        last_cached: the prefix cache's entry for the last of the cached blocks, whose chain stands for them all.
        salt: only equal salts share cached blocks.
    """

    request_id: str
    store: BlockStore
    salt: str | None = None
    block_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_blocks: int = 0
    last_cached: CachedBlock | None = None

    def begin_with(self, prefix: Sequence[CachedBlock]) -> None:
        """Hold cached blocks that begin with this sequence's tokens; it holds none yet."""
        self.block_ids = [entry.block_id for entry in prefix]
        self.store.revive(self.block_ids)
        self.num_computed_tokens = len(prefix) * self.store.block_size
        self.num_cached_blocks, self.last_cached = len(prefix), prefix[-1]
        self._record_shared()

    def fork(self, child_id: str, num_tokens: int) -> SequenceBlocks:
        """Another sequence that holds the blocks of the first ``num_tokens`` tokens, which are computed, as well."""
        block_ids = self.block_ids[: -(-num_tokens // self.store.block_size)]
        self.store.pool.share(block_ids)
        cached = self.num_cached_blocks, self.last_cached
        child = SequenceBlocks(child_id, self.store, self.salt, block_ids, num_tokens, *cached)
        child._record_shared()
        return child

    def append(self, count: int) -> None:
        """Take ``count`` fresh blocks for the tokens to come."""
        block_ids, events = self.store.take(count), self.store.events
        if events is not None:
            events.append(BlocksAllocated(self.request_id, len(self.block_ids), tuple(block_ids)))
        self.block_ids.extend(block_ids)

    def set_computed(self, num_computed_tokens: int) -> None:
        """Count the first ``num_computed_tokens`` tokens as computed, which is no fewer than before."""
        self.store.write(self.block_ids, self.num_computed_tokens, num_computed_tokens)
        self.num_computed_tokens = num_computed_tokens

    def cache_full_blocks(self, token_ids: Sequence[int]) -> None:
        """Make full blocks findable by their tokens, those that are not yet."""
        size, entered = self.store.block_size, []
        while (end := (self.num_cached_blocks + 1) * size) <= self.num_computed_tokens:
            block_id = self.block_ids[self.num_cached_blocks]
            self.last_cached = self.store.cache(block_id, self.last_cached, token_ids[end - size : end], self.salt)
            self.num_cached_blocks += 1
            if self.last_cached.block_id == block_id:  # else another block with the same tokens was there before
                entered.append(block_id)
        if entered and self.store.events is not None:
            self.store.events.append(BlocksCached(tuple(entered)))

    def release(self) -> None:
        """Let go of all blocks."""
        self.store.release(self.block_ids)
        if self.store.events is not None and self.block_ids:
            self.store.events.append(BlocksFreed(self.request_id, tuple(self.block_ids)))

    def _record_shared(self) -> None:
        if self.store.events is not None and self.block_ids:
            shared = BlocksShared(self.request_id, 0, tuple(self.block_ids), self.num_computed_tokens)
            self.store.events.append(shared)
