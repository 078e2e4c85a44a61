"""Where does it live?

Exports :class:`BlockPool` (free list and reference counts), :class:`PrefixCache` (finding blocks by content),
:class:`KVCacheManager` (block tables, sharing, copy on write) and :class:`KVCacheUsage` (the split of the slots).
Nothing here knows of requests, models or torch.
"""

from .block_pool import BlockPool
from .kv_cache_manager import KVCacheManager
from .prefix_cache import CachedBlock, PrefixCache
from .usage import KVCacheUsage

__all__ = ["BlockPool", "CachedBlock", "KVCacheManager", "KVCacheUsage", "PrefixCache"]
