"""Where does it live?

Exports :class:`BlockPool` (free list and reference counts), :class:`PrefixCache` (finding blocks by content),
:class:`BlockStore` (the two together: blocks and what is in them), :class:`KVCacheManager` (block tables, sharing, copy
on write), :class:`SwapSpace` (blocks in host memory) and :class:`KVCacheUsage` (the split of the slots); for comparison
:class:`ContiguousKVManager` with its ways to reserve, over a :class:`FirstFitArena`. Schedulers see any of them as a
:class:`KVAllocator`. Nothing here knows of requests, models or torch.
"""

from .allocator import KVAllocator
from .arena import FirstFitArena
from .block_pool import BlockPool
from .block_store import BlockStore
from .contiguous import (
    ContiguousKVManager,
    Reservation,
    reservation_named,
    reserve_max,
    reserve_nothing,
    reserve_oracle,
    reserve_power_of_two,
)
from .kv_cache_manager import KVCacheManager
from .prefix_cache import CachedBlock, PrefixCache
from .swap_space import BlockPairs, SwapSpace
from .usage import KVCacheUsage

__all__ = [
    "BlockPairs",
    "BlockPool",
    "BlockStore",
    "CachedBlock",
    "ContiguousKVManager",
    "FirstFitArena",
    "KVAllocator",
    "KVCacheManager",
    "KVCacheUsage",
    "PrefixCache",
    "Reservation",
    "SwapSpace",
    "reservation_named",
    "reserve_max",
    "reserve_nothing",
    "reserve_oracle",
    "reserve_power_of_two",
]
