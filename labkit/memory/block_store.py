"""Blocks with their content: how many tokens each holds, and whether the prefix cache can find them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from labkit.observe import BlocksEvicted, Event

from .block_pool import BlockPool
from .prefix_cache import CachedBlock, PrefixCache
from .usage import KVCacheUsage


class BlockStore:
    """A :class:`BlockPool` whose blocks have content, and the :class:`PrefixCache` over them, if there is one.

    A block that nobody holds any more keeps its content until it is taken for something else::

        ref_cnt > 0                            referenced     its written slots are live tokens
        ref_cnt 0, and the cache finds it      cached only    a hit revives it; to take it is to evict it
        ref_cnt 0                              free

    Counters follow every call, so that :meth:`usage` need not look at the blocks. Of sequences nothing is known here.

    Attributes:
        num_written: computed tokens in each block.
        num_live_tokens: those in blocks that somebody holds, a shared one counted once.
        num_cached_free: blocks that are cached only.
        events: where evictions are recorded; None to save the time.
    """

    def __init__(self, num_blocks: int, block_size: int, prefix_cache: PrefixCache | None) -> None:
        """Make a store of ``num_blocks`` free blocks of ``block_size`` tokens. Raises ValueError if there are none."""
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.num_written = [0] * num_blocks
        self.num_live_tokens = 0
        self.num_cached_free = 0
        self.events: list[Event] | None = None

    def take(self, count: int) -> list[int]:
        """Take ``count`` blocks for new content; what they held can be found no more.

        Raises RuntimeError if fewer are free.
        """
        block_ids = self.pool.allocate(count)
        for block_id in block_ids:
            self.num_written[block_id] = 0
        if self.num_cached_free and self.prefix_cache is not None:
            evicted = [b for b in block_ids if self.prefix_cache.evict(b)]
            self.num_cached_free -= len(evicted)
            self._record_evicted(evicted)
        return block_ids

    def take_for_copy(self, src: int) -> int:
        """Take a block that will be a copy of ``src``, and count it as filled like that one."""
        dst = self.take(1)[0]
        self.num_written[dst] = self.num_written[src]
        self.num_live_tokens += self.num_written[dst]
        return dst

    def revive(self, block_ids: Sequence[int]) -> None:
        """Hold full blocks that the prefix cache found, whether somebody holds them already or not."""
        revived = self.pool.share(block_ids)
        self.num_cached_free -= len(revived)
        self.num_live_tokens += len(revived) * self.block_size

    def release(self, block_ids: Sequence[int]) -> None:
        """Let go of blocks. Content that the prefix cache knows stays findable until the block is taken."""
        cache = self.prefix_cache if self.prefix_cache is not None else ()
        for block_id in self.pool.free(block_ids, worth_keeping=cache):
            self.num_live_tokens -= self.num_written[block_id]
            if block_id in cache:
                self.num_cached_free += 1

    def write(self, block_table: Sequence[int], first_token: int, end_token: int) -> None:
        """Count positions ``[first_token, end_token)`` of the sequence with this block table as written."""
        size, written = self.block_size, self.num_written
        position = first_token
        while position < end_token:
            index = position // size
            block_id = block_table[index]
            filled = end_token - index * size
            if filled > size:  # not min(), which takes longer than the rest: this runs for every decoded token
                filled = size
            self.num_live_tokens += filled - written[block_id]
            written[block_id] = filled
            position = index * size + filled

    def cache(
        self, block_id: int, parent: CachedBlock | None, token_ids: Sequence[int], salt: str | None
    ) -> CachedBlock:
        """Make a full block findable behind ``parent``; the entry that stands for its content from now on.

        Raises as :meth:`PrefixCache.insert` does; RuntimeError without a prefix cache.
        """
        if self.prefix_cache is None:
            raise RuntimeError("this store has no prefix cache")
        entry, displaced = self.prefix_cache.insert(block_id, parent, token_ids, salt)
        if displaced is not None:
            if self.pool.ref_cnt[displaced] == 0:
                self.num_cached_free -= 1
            self._record_evicted([displaced])
        return entry

    def forget_cached(self) -> None:
        """Let the prefix cache find nothing any more; who holds blocks keeps them."""
        if self.prefix_cache is not None:
            self.num_cached_free = 0
            self._record_evicted(self.prefix_cache.clear())

    def usage(self, num_copies: Mapping[int, int]) -> KVCacheUsage:
        """Where the slots are now. ``num_copies`` are the copies under way by block: each holds a reference.

        O(1), and O(1) more for each block in ``num_copies``.
        """
        moving = list(num_copies.items())  # a copy: a monitor's thread may ask at any time
        in_flight = [b for b, count in moving if self.pool.ref_cnt[b] == count]
        num_blocks, num_free = self.pool.num_blocks, self.pool.num_free
        return KVCacheUsage(
            num_blocks=num_blocks,
            block_size=self.block_size,
            num_referenced_blocks=num_blocks - num_free - len(in_flight),
            num_cached_free_blocks=self.num_cached_free,
            num_free_blocks=num_free - self.num_cached_free,
            num_live_tokens=self.num_live_tokens - sum(self.num_written[b] for b in in_flight),
            num_in_flight_blocks=len(in_flight),
        )

    def _record_evicted(self, block_ids: Iterable[int]) -> None:
        if self.events is not None and (evicted := tuple(block_ids)):
            self.events.append(BlocksEvicted(evicted))
