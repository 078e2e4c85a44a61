"""What a scheduler needs of a KV-cache allocator, paged or contiguous."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from labkit.observe import Event

from .prefix_cache import CachedBlock
from .swap_space import BlockPairs
from .usage import KVCacheUsage


class KVAllocator(Protocol):
    """Gives sequences blocks and takes them back; each call succeeds whole or changes nothing.

    :class:`KVCacheManager` is the one to read. The contiguous allocators are there to be compared with it.
    """

    block_size: int

    @property
    def events(self) -> list[Event] | None:
        """Where the allocator says what it did: a list to record, None to save the time."""
        ...

    @events.setter
    def events(self, events: list[Event] | None) -> None: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_free_blocks(self) -> int: ...

    @property
    def can_share(self) -> bool:
        """Whether sequences can hold the same blocks, as forks (n > 1) do."""
        ...

    def __contains__(self, request_id: object) -> bool: ...

    def blocks_for(self, num_tokens: int) -> int: ...

    def block_table(self, request_id: str) -> list[int]: ...

    def num_computed_tokens(self, request_id: str) -> int: ...

    def match_prefix(self, token_ids: Sequence[int], salt: str | None = None) -> list[CachedBlock]: ...

    def admit(
        self,
        request_id: str,
        num_tokens: int,
        *,
        max_total_tokens: int | None = None,
        prefix: Sequence[CachedBlock] = (),
        salt: str | None = None,
        keep_free: int = 0,
    ) -> bool: ...

    def extend(self, request_id: str, first_token: int, num_tokens: int) -> list[tuple[int, int]] | None: ...

    def fork(self, parent_id: str, child_id: str) -> None: ...

    def commit(self, request_id: str, token_ids: Sequence[int], num_computed_tokens: int) -> None: ...

    def free(self, request_id: str) -> None: ...

    def swap_out(self, request_id: str) -> BlockPairs | None: ...

    def swap_in(
        self,
        request_id: str,
        num_tokens: int,
        *,
        prefix: Sequence[CachedBlock] = (),
        salt: str | None = None,
        keep_free: int = 0,
    ) -> BlockPairs | None: ...

    def land(self, swap_outs: BlockPairs, swap_ins: BlockPairs) -> None: ...

    def reset_prefix_cache(self) -> None: ...

    def usage(self) -> KVCacheUsage: ...

    def check(self) -> None: ...
