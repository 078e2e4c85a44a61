"""Show me, still: plotly figures from traces and tables, readable on light and dark.

Exports :func:`usage_timeline` and :func:`batch_timeline` (of a trace), :func:`memory_split` and
:func:`memory_timeline` (of a memory monitor), and :func:`show`, which prints the source of a class or function.
"""

from .batch_timeline import batch_timeline
from .memory import memory_split, memory_timeline
from .source import show
from .usage import usage_timeline

__all__ = ["batch_timeline", "memory_split", "memory_timeline", "show", "usage_timeline"]
