"""The ladder of the combined experiment as bars, with predictions and the article's claims beside them."""

from __future__ import annotations

from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from .style import COLOURS, styled

_PANELS = (
    ("max_concurrency", "predicted_concurrency", "claimed_concurrency", "requests at once"),
    ("tokens_per_second", "predicted_tokens_per_second", None, "tokens/s"),
)


def combined_ladder(table: pd.DataFrame) -> go.Figure:
    """Requests at once and tokens/s of each rung, of one ladder of ``labkit.experiments.combined_report.ladder_table``.

    Bars are what was measured (none where it was not), diamonds the prediction made before, lines what the article
    claims: requests as they stand, tokens/s as the claimed speed-up times the measured baseline. Raises ValueError
    unless the table holds exactly one model, memory limit and length setting.
    """
    names = ["model", "memory_limit_gib", "lengths"]
    ladders = table[names].drop_duplicates()
    if len(ladders) != 1:
        raise ValueError(f"table must hold one ladder, got {len(ladders)}: choose by {', '.join(names)}")
    model, limit, lengths = ladders.iloc[0]
    figure = make_subplots(rows=1, cols=2, subplot_titles=[panel[3] for panel in _PANELS], horizontal_spacing=0.09)
    for column, (measured, predicted, claimed, unit) in enumerate(_PANELS, start=1):
        claims = table[claimed] if claimed else table["claimed_speedup"] * table[measured].iloc[0]
        traces = (
            go.Bar(x=table["rung"], y=table[measured], name="measured", marker_color=COLOURS["live"]),
            _markers(table["rung"], table[predicted], "predicted", "diamond-open", COLOURS["fragmentation"], 9),
            _markers(table["rung"], claims, "article's claim", "line-ew-open", COLOURS["in flight"], 26),
        )
        for trace in traces:
            trace.update(legendgroup=trace.name, showlegend=column == 1, hovertemplate=f"%{{y:,.3~g}} {unit}")
            figure.add_trace(trace, row=1, col=column)
    figure.update_yaxes(rangemode="tozero")
    styled(figure, title=f"{model} in {limit:g} GiB, {lengths} lengths", height=420)
    return figure.update_layout(legend=dict(y=1.1), margin_t=80, margin_b=110)


def _markers(x: Any, y: Any, name: str, symbol: str, colour: str, size: int) -> go.Scatter:
    marker = dict(symbol=symbol, color=colour, size=size, line_width=3)
    return go.Scatter(x=x, y=pd.to_numeric(y), name=name, mode="markers", marker=marker)
