"""What memory went where: one bar for a moment, areas for a run."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
import plotly.graph_objects as go

from labkit.kv_math import GIB, format_bytes

from .style import COLOURS, styled

# Parts of labkit.engine.MemorySnapshot in the order of its fields; others get the colours left over.
_PART_COLOURS = {
    "weights": "#009e73",
    "kv_live": COLOURS["live"],
    "kv_fragmentation": COLOURS["fragmentation"],
    "kv_in_flight": "#a6761d",
    "kv_cached": COLOURS["cached"],
    "kv_free": "rgba(86,180,233,0.35)",
    "kv_tails": "#0072b2",
    "graphs": "#f0e442",
    "activations": "#e69f00",
    "allocator_reserve": "#cc79a7",
    "process_other": "#999999",
    "other_processes": "#666666",
    "free": COLOURS["free"],
}
_MORE_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442")


def memory_split(parts: Mapping[str, int], *, title: str = "What memory went where") -> go.Figure:
    """One horizontal bar of ``parts``, bytes by name, such as ``MemorySnapshot.parts()``. Parts of 0 are left out.

    Raises ValueError if a part is negative or nothing is left to draw.
    """
    for name, num_bytes in parts.items():
        if num_bytes < 0:
            raise ValueError(f"parts must be >= 0 bytes, got {name}={num_bytes}")
    drawn = {name: num_bytes for name, num_bytes in parts.items() if num_bytes}
    if not drawn:
        raise ValueError(f"parts must hold at least one above 0 bytes, got {dict(parts)}")
    total = sum(drawn.values())
    traces = [
        go.Bar(
            y=[""],
            x=[num_bytes / GIB],
            orientation="h",
            name=f"{_label(name)} {format_bytes(num_bytes)}",
            marker=dict(color=_colour(name, number), line_width=0),
            hovertemplate=f"{_label(name)}: {format_bytes(num_bytes)}, {num_bytes / total:.1%}<extra></extra>",
        )
        for number, (name, num_bytes) in enumerate(drawn.items())
    ]
    figure = go.Figure(traces)
    figure.update_xaxes(title="GiB", range=[0, total / GIB])
    styled(figure, title=title, height=210)
    legend = dict(x=0, xanchor="left", y=-0.75, yanchor="top")  # below: there are many parts, with their sizes
    return figure.update_layout(barmode="stack", hovermode="closest", margin_l=10, legend=legend)


def memory_timeline(table: pd.DataFrame, *, title: str = "Memory over time") -> go.Figure:
    """Stacked areas of ``MemoryMonitor.timeline()``: a column ``time`` in seconds, one column of bytes for each part.

    Free memory is left out, so that the axis ends where use does. Raises ValueError if the table is empty.
    """
    if table.empty:
        raise ValueError("table must hold at least one snapshot, got none")
    parts = [name for name in table.columns if name not in ("time", "total", "free") and max(table[name]) > 0]
    traces = [
        go.Scatter(
            x=table["time"],
            y=table[name] / GIB,
            name=_label(name),
            stackgroup="bytes",
            mode="lines",
            line_width=0,
            fillcolor=_colour(name, number),
            hovertemplate="%{y:.3f} GiB",
        )
        for number, name in enumerate(parts)
    ]
    figure = go.Figure(traces)
    figure.update_xaxes(title="seconds")
    figure.update_yaxes(title="GiB", rangemode="tozero")
    return styled(figure, title=title)


def _label(name: str) -> str:
    return name.replace("kv_", "KV ").replace("_", " ")


def _colour(name: str, number: int) -> str:
    return _PART_COLOURS.get(name, _MORE_COLOURS[number % len(_MORE_COLOURS)])
