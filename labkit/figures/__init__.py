"""Show me, still: plotly figures from traces and tables, readable on light and dark.

Exports :func:`usage_timeline` and :func:`batch_timeline` (of a trace), :func:`memory_split` and
:func:`memory_timeline` (of a memory monitor), :func:`utilisation_over_time`, :func:`utilisation_at_final_length`,
:func:`prefix_hit_curve` and :func:`predicted_against_measured` (of simulated experiments), :func:`combined_ladder` (of
the combined experiment), :func:`arena_map` (of a contiguous allocator), and :func:`show`, which prints the source of a
class or function.
"""

from .arena import arena_map
from .batch_timeline import batch_timeline
from .claim_card import claim_cards
from .combined import combined_ladder
from .memory import memory_split, memory_timeline
from .simulation import (
    predicted_against_measured,
    prefix_hit_curve,
    utilisation_at_final_length,
    utilisation_over_time,
)
from .source import show
from .usage import usage_timeline

__all__ = [
    "arena_map",
    "batch_timeline",
    "claim_cards",
    "combined_ladder",
    "memory_split",
    "memory_timeline",
    "predicted_against_measured",
    "prefix_hit_curve",
    "show",
    "usage_timeline",
    "utilisation_at_final_length",
    "utilisation_over_time",
]
