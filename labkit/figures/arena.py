"""The arena of the allocators before paging, drawn to scale: runs, holes, and a request that wants in."""

from __future__ import annotations

import plotly.graph_objects as go

from labkit.memory import ContiguousKVManager

from .style import COLOURS, TEXT, styled


def arena_map(kv: ContiguousKVManager, asked: int) -> go.Figure:
    """One row for the arena, runs and holes in their places; below it a request for ``asked`` blocks in one run.

    Raises ValueError unless ``asked`` is at least 1 and at most the arena.
    """
    if not 1 <= asked <= kv.num_blocks:
        raise ValueError(f"asked must be 1 to {kv.num_blocks} blocks, got {asked}")
    holes = kv.arena.holes
    edges = [0, *(edge for start, length in holes for edge in (start, start + length)), kv.num_blocks]
    taken = [(begin, end - begin) for begin, end in zip(edges[::2], edges[1::2], strict=True) if end > begin]
    figure = go.Figure(
        [
            _pieces("arena", taken, "taken", COLOURS["live"]),
            _pieces("arena", holes, "hole", COLOURS["free"]),
            _pieces("request", [(0, asked)], "wanted in one run", COLOURS["fragmentation"]),
        ]
    )
    figure.update_xaxes(title="block", range=[0, kv.num_blocks])
    figure.update_yaxes(autorange="reversed", showgrid=False)
    free, largest = kv.num_free_blocks, kv.arena.largest_hole
    title = f"{asked} blocks wanted; {free} free, at most {largest} in a row"
    return styled(figure, title=title, height=230).update_layout(
        barmode="overlay", hovermode="closest", margin_l=70, legend=dict(x=1, y=-0.5, yanchor="top")
    )


def _pieces(row: str, pieces: list[tuple[int, int]], name: str, colour: str) -> go.Bar:
    return go.Bar(
        y=[row] * len(pieces),
        base=[start for start, _ in pieces],
        x=[length for _, length in pieces],
        text=[str(length) for _, length in pieces],
        textposition="inside",
        insidetextanchor="middle",
        insidetextfont_color=TEXT if name == "hole" else None,  # holes are as dark as the page
        textangle=0,
        orientation="h",
        name=name,
        marker=dict(color=colour, line=dict(color="#808080", width=1)),
        hovertemplate="blocks %{base} + %{x}<extra>" + name + "</extra>",
    )
