"""Show me: interactive views for notebooks.

Exports :class:`BlockTable`, the block pool as a picture: live while a model generates, or as a player for a trace; and
:class:`KVPlanner`, what fits a GPU, with the arithmetic.
"""

from .block_table import BlockTable
from .kv_planner import KVPlanner

__all__ = ["BlockTable", "KVPlanner"]
