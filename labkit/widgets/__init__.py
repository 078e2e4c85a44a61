"""Show me: interactive views for notebooks.

Exports :class:`BlockTable`, the block pool as a picture: live while a model generates, or as a player for a trace.
"""

from .block_table import BlockTable

__all__ = ["BlockTable"]
