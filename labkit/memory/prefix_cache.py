"""The prefix cache: full blocks that can be found again by the tokens they hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class CachedBlock:
    """A full block that can be found: its tokens, and the cached block of the tokens before it.

    ``chain_hash`` covers all tokens from the start of the sequence; identity of ``parent`` proves them.
    """

    block_id: int
    chain_hash: int
    parent: CachedBlock | None
    token_ids: tuple[int, ...]
    salt: str | None


class PrefixCache:
    """Finds blocks by content. Knows nothing of reference counts or free lists.

    Blocks are looked up by a chained hash::

        h0 = hash(salt, tokens 0..15)   h1 = hash(h0, tokens 16..31)   h2 = hash(h1, tokens 32..47)

    A hash only nominates a block. A hit also requires that the block's own tokens are equal and that its parent
    *is* the block that matched the step before: by induction, every token of the chain has been compared, and two
    prompts whose hashes collide never share a block. A salt stands before the first block, so tenants with
    different salts share nothing.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._by_hash: dict[int, CachedBlock] = {}
        self._by_block: dict[int, CachedBlock] = {}

    def __len__(self) -> int:
        """Number of blocks that can be found."""
        return len(self._by_block)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._by_block

    def match(self, token_ids: Sequence[int], salt: str | None = None) -> list[CachedBlock]:
        """The longest chain of cached blocks that holds a prefix of ``token_ids``, in order."""
        chain: list[CachedBlock] = []
        parent: CachedBlock | None = None
        for start in range(0, len(token_ids) - self.block_size + 1, self.block_size):
            tokens = tuple(token_ids[start : start + self.block_size])
            parent = self._find(parent, tokens, salt)
            if parent is None:
                break
            chain.append(parent)
        return chain

    def insert(
        self, block_id: int, parent: CachedBlock | None, token_ids: Sequence[int], salt: str | None = None
    ) -> tuple[CachedBlock, int | None]:
        """Make a full block findable behind ``parent``.

        Returns the entry that now stands for this content, and the block that had to be forgotten for it, if any:
        one whose hash collides, or whose chain lost its beginning to eviction. If the content is findable already,
        its entry is returned and ``block_id`` is not entered; children chain to that one, so later requests find
        them. Raises ValueError if ``token_ids`` does not fill a block.
        """
        tokens = tuple(token_ids)
        if len(tokens) != self.block_size:
            raise ValueError(f"token_ids must fill a block of {self.block_size}, got {len(tokens)}")
        chain_hash = self._hash(parent, tokens, salt)
        displaced = self._by_hash.get(chain_hash)
        if displaced is not None:
            if self._holds(displaced, parent, tokens, salt):
                return displaced, None
            self.evict(displaced.block_id)
        entry = CachedBlock(block_id, chain_hash, parent, tokens, salt)
        self._by_hash[chain_hash] = entry
        self._by_block[block_id] = entry
        return entry, None if displaced is None else displaced.block_id

    def evict(self, block_id: int) -> bool:
        """Forget a block's content; whether there was any."""
        entry = self._by_block.pop(block_id, None)
        if entry is None:
            return False
        del self._by_hash[entry.chain_hash]
        return True

    def clear(self) -> list[int]:
        """Forget everything; the blocks that could be found."""
        forgotten = list(self._by_block)
        self._by_block.clear()
        self._by_hash.clear()
        return forgotten

    def _find(self, parent: CachedBlock | None, tokens: tuple[int, ...], salt: str | None) -> CachedBlock | None:
        entry = self._by_hash.get(self._hash(parent, tokens, salt))
        return entry if entry is not None and self._holds(entry, parent, tokens, salt) else None

    @staticmethod
    def _holds(entry: CachedBlock, parent: CachedBlock | None, tokens: tuple[int, ...], salt: str | None) -> bool:
        return entry.parent is parent and entry.token_ids == tokens and entry.salt == salt

    @staticmethod
    def _hash(parent: CachedBlock | None, tokens: tuple[int, ...], salt: str | None) -> int:
        return hash((salt if parent is None else parent.chain_hash, tokens))
