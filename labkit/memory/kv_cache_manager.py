"""Block tables for sequences: who holds which blocks, with sharing, copy on write and a prefix cache."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.observe import BlockCopied, BlocksLanded, BlocksSwappedIn, BlocksSwappedOut, Event

from .accounting import check_accounting
from .block_pool import BlockPool
from .block_store import BlockStore
from .prefix_cache import CachedBlock, PrefixCache
from .sequence_blocks import SequenceBlocks
from .swap_space import BlockPairs, SwapSpace
from .usage import KVCacheUsage


class KVCacheManager:
    """Gives sequences the blocks they need, and takes them back.

    A sequence's position p lives in block ``block_table[p // block_size]`` at offset ``p % block_size``. A block
    stands in one table, or in several that begin with the same tokens; ``ref_cnt`` says in how many. The manager
    takes ids and token ids, never requests, and each call either succeeds whole or changes nothing.

    With ``num_host_blocks`` a sequence can leave the pool and keep what was computed (:class:`SwapSpace`); a copy that
    is under way counts in ``ref_cnt`` as a table does.

    With ``shares_partial_blocks`` False only full blocks are shared by forks and moved to host memory: whoever goes on
    from them computes the tokens after the last block boundary, at most ``block_size`` - 1, itself. KV formats need
    this whose scales span the tokens of a block, since an unfinished block is not in the pool yet::

        fork at token 10, blocks of 4      True: [b0][b1][b2 __]  child [b0][b1][b2 __], copied by who writes first
                                          False: [b0][b1][b2 __]  child [b0][b1], computes tokens 8 and 9

    ``events`` is where it says what it did; set it to a list to record, to None to save the time.
    """

    can_share = True

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        num_host_blocks: int = 0,
        shares_partial_blocks: bool = True,
    ) -> None:
        """Make a manager of ``num_blocks`` blocks of ``block_size`` tokens, and ``num_host_blocks`` to swap to.

        Raises ValueError unless ``num_blocks`` >= 1, ``num_host_blocks`` >= 0 and ``block_size`` is a power of two.
        """
        if block_size < 1 or block_size & (block_size - 1):
            raise ValueError(f"block_size must be a power of two >= 1, got {block_size}")
        self.block_size = block_size
        self.shares_partial_blocks = shares_partial_blocks
        self.blocks = BlockStore(num_blocks, block_size, PrefixCache(block_size) if enable_prefix_caching else None)
        self.swap_space = SwapSpace(num_host_blocks)
        self._sequences: dict[str, SequenceBlocks] = {}

    @property
    def pool(self) -> BlockPool:
        """Free list and reference counts of the blocks."""
        return self.blocks.pool

    @property
    def prefix_cache(self) -> PrefixCache | None:
        """Finds blocks by content; None without prefix caching."""
        return self.blocks.prefix_cache

    @property
    def events(self) -> list[Event] | None:
        """Where manager and blocks say what they did."""
        return self.blocks.events

    @events.setter
    def events(self, events: list[Event] | None) -> None:
        self.blocks.events = events

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now, those with cached content included."""
        return self.pool.num_free

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def block_table(self, request_id: str) -> list[int]:
        """The blocks of a sequence, in order. The list is the manager's own: do not change or keep it."""
        return self._sequences[request_id].block_ids

    def num_computed_tokens(self, request_id: str) -> int:
        """Tokens of a sequence with K and V in its blocks, or in host memory, as far as :meth:`commit` was told."""
        if request_id in self.swap_space:
            return self.swap_space.num_computed_tokens(request_id)
        return self._sequences[request_id].num_computed_tokens

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._sequences or request_id in self.swap_space

    # ------------------------------------------------------------------ taking blocks

    def match_prefix(self, token_ids: Sequence[int], salt: str | None = None) -> list[CachedBlock]:
        """Cached blocks that hold the beginning of ``token_ids``; at least one token is left to compute."""
        if self.prefix_cache is None:
            return []
        longest = (len(token_ids) - 1) // self.block_size * self.block_size
        return self.prefix_cache.match(token_ids[:longest], salt)

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
        """Give a new sequence a table for its first ``num_tokens`` tokens, beginning with the blocks of ``prefix``.

        Paging needs no forecast, so ``max_total_tokens`` is not looked at; the contiguous allocators reserve by it.
        Returns False, and changes nothing, if fewer than ``keep_free`` blocks would stay free. Raises ValueError if
        the sequence is here already.
        """
        if request_id in self._sequences:
            raise ValueError(f"request_id {request_id!r} already has a block table")
        ref_cnt = self.pool.ref_cnt
        num_revived = sum(1 for entry in prefix if ref_cnt[entry.block_id] == 0)
        num_new = self.blocks_for(num_tokens) - len(prefix)
        if num_revived + num_new + keep_free > self.pool.num_free:
            return False
        sequence = self._sequences[request_id] = SequenceBlocks(request_id, self.blocks, salt)
        if prefix:
            sequence.begin_with(prefix)
        if num_new > 0:
            sequence.append(num_new)
        return True

    def extend(self, request_id: str, first_token: int, num_tokens: int) -> list[tuple[int, int]] | None:
        """Make positions ``[first_token, first_token + num_tokens)`` of a sequence writable.

        Grows the table, and replaces blocks in that range that others hold as well by copies of their own. Returns
        the copies to make as (src, dst) block ids, or None, with nothing changed, if there are too few blocks.
        """
        sequence = self._sequences[request_id]
        block_ids, ref_cnt, size = sequence.block_ids, self.blocks.pool.ref_cnt, self.block_size
        num_new = -(-(first_token + num_tokens) // size) - len(block_ids)
        first_index = first_token // size
        if num_new <= 0 and first_index == len(block_ids) - 1 and ref_cnt[block_ids[first_index]] == 1:
            return []  # a decoding sequence, fifteen times of sixteen
        shared = [i for i in range(first_index, len(block_ids)) if ref_cnt[block_ids[i]] > 1]
        if max(num_new, 0) + len(shared) > self.pool.num_free:
            return None
        copies = []
        for index in shared:
            src = block_ids[index]
            dst = block_ids[index] = self.blocks.take_for_copy(src)
            self.blocks.release([src])
            copies.append((src, dst))
            if self.events is not None:
                self.events.append(BlockCopied(request_id, index, src, dst))
        if num_new > 0:
            sequence.append(num_new)
        return copies

    def fork(self, parent_id: str, child_id: str) -> None:
        """Give ``child_id`` the computed blocks of ``parent_id``, or the full ones of them. Takes no block.

        Whoever writes to a shared block first gets a copy.
        """
        if child_id in self._sequences:
            raise ValueError(f"request_id {child_id!r} already has a block table")
        parent = self._sequences[parent_id]
        self._sequences[child_id] = parent.fork(child_id, self._num_movable_tokens(parent))

    # ------------------------------------------------------------------ after a step

    def commit(self, request_id: str, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        """Say that the first ``num_computed_tokens`` of ``token_ids`` have K and V in the sequence's blocks.

        Full blocks among them become findable in the prefix cache.
        """
        sequence = self._sequences[request_id]
        sequence.set_computed(num_computed_tokens)
        if self.blocks.prefix_cache is not None:
            sequence.cache_full_blocks(token_ids)

    def free(self, request_id: str) -> None:
        """Take all blocks of a sequence back. Cached content stays findable until the block is needed."""
        if request_id in self.swap_space:
            self.swap_space.drop(request_id)
        else:
            self._sequences.pop(request_id).release()

    def reset_prefix_cache(self) -> None:
        """Forget all cached content; running sequences are not affected.

        What they go on to cache hangs on entries that are no longer findable, so nobody finds it either.
        """
        self.blocks.forget_cached()

    # ------------------------------------------------------------------ to host memory and back

    def swap_out(self, request_id: str) -> BlockPairs | None:
        """Free a sequence's blocks but keep its computed tokens: the copies to make, as (block, host block).

        :meth:`num_computed_tokens` then says how many were kept. What is copied is in flight until :meth:`land`.
        Returns None, with nothing changed, if too few host blocks are free or no token could be kept.
        """
        sequence = self._sequences[request_id]
        num_tokens = self._num_movable_tokens(sequence)
        block_ids = sequence.block_ids[: self.blocks_for(num_tokens)]
        copies = self.swap_space.store(request_id, block_ids, num_tokens)
        if copies is None:
            return None
        self.pool.share(block_ids)
        if self.events is not None:
            self.events.append(BlocksSwappedOut(request_id, tuple(block_ids), tuple(host for _, host in copies)))
        self._sequences.pop(request_id).release()
        return copies

    def swap_in(
        self,
        request_id: str,
        num_tokens: int,
        *,
        prefix: Sequence[CachedBlock] = (),
        salt: str | None = None,
        keep_free: int = 0,
    ) -> BlockPairs | None:
        """Give a swapped-out sequence a new table, as :meth:`admit` does: the copies to make, as (host block, block).

        What ``prefix`` holds is not copied. The sequence must not run before :meth:`land`. Returns None, with nothing
        changed, if too few blocks are free or its copies to the host have not landed.
        """
        if not self.swap_space.is_stored(request_id):
            return None
        if not self.admit(request_id, num_tokens, prefix=prefix, salt=salt, keep_free=keep_free):
            return None
        sequence, first_index = self._sequences[request_id], len(prefix)
        copies, num_computed_tokens = self.swap_space.load(request_id, sequence.block_ids, first_index)
        if copies:
            self.pool.share([block for _, block in copies])
            sequence.set_computed(num_computed_tokens)
            if self.events is not None:
                hosts, blocks = zip(*copies, strict=True)
                self.events.append(BlocksSwappedIn(request_id, first_index, blocks, hosts, num_computed_tokens))
        return copies

    def land(self, swap_outs: BlockPairs, swap_ins: BlockPairs) -> None:
        """Say that these copies, as :meth:`swap_out` and :meth:`swap_in` gave them, have landed."""
        block_ids = self.swap_space.land(swap_outs, swap_ins)
        self.blocks.release(block_ids)
        if self.events is not None and block_ids:
            self.events.append(BlocksLanded(tuple(block_ids)))

    # ------------------------------------------------------------------ looking

    def usage(self) -> KVCacheUsage:
        """Where the slots are now. O(1), and O(1) more for each block that a copy is under way for."""
        return self.blocks.usage(self.swap_space.num_copies)

    def check(self) -> None:
        """Raise AssertionError unless the accounting equation holds: every block is counted once, and rightly."""
        check_accounting(self)

    # ------------------------------------------------------------------ inside

    def _num_movable_tokens(self, sequence: SequenceBlocks) -> int:
        """Computed tokens that others can go on from: all, or those of full blocks."""
        if self.shares_partial_blocks:
            return sequence.num_computed_tokens
        return sequence.num_computed_tokens // self.block_size * self.block_size
