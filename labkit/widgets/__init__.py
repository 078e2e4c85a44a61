"""Show me: interactive views for notebooks.

Exports :class:`BlockTable`, the block pool as a picture: live while a model generates, or as a player for a trace; and
:class:`KVPlanner`, what fits a GPU, with the arithmetic; :class:`QuantMicroscope`, a tile of K or V in a format;
:class:`LiveMonitor`, memory and speed of an engine while it runs; :class:`KernelWalk`, which program of a decode step
reads which block.
"""

from .block_table import BlockTable
from .kernel_walk import KernelWalk
from .kv_planner import KVPlanner
from .live_monitor import LiveMonitor
from .quant_microscope import QuantMicroscope

__all__ = ["BlockTable", "KVPlanner", "KernelWalk", "LiveMonitor", "QuantMicroscope"]
