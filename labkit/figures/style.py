"""How all figures look: no background of their own, and greys that stand out on white and on black."""

from __future__ import annotations

import plotly.graph_objects as go

TEXT, GRID = "#808080", "rgba(128,128,128,0.25)"

# Okabe and Ito, Color Universal Design (2008); the part that holds nothing is grey.
COLOURS = {
    "live": "#0072b2",
    "fragmentation": "#d55e00",
    "cached": "#56b4e9",
    "in flight": "#cc79a7",
    "free": "rgba(128,128,128,0.25)",
}


def styled(figure: go.Figure, *, title: str, height: int = 320) -> go.Figure:
    """Give a figure the common look and its title; returns it."""
    figure.update_layout(
        title=dict(text=title, font_size=15, x=0, xref="paper"),
        height=height,
        margin=dict(l=60, r=10, t=45, b=45),
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font=dict(color=TEXT, family="system-ui, sans-serif"),
        colorway=("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00"),
        legend=dict(orientation="h", x=1, xanchor="right", y=1, yanchor="bottom", traceorder="normal"),
        hovermode="x unified",
    )
    figure.update_xaxes(gridcolor=GRID, zerolinecolor=GRID, linecolor=TEXT, ticks="outside")
    figure.update_yaxes(gridcolor=GRID, zerolinecolor=GRID, linecolor=TEXT)
    return figure
