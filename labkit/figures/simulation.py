"""What simulations at trace scale show: KV memory that holds tokens, prefix hits, predictions beside measurements."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from .style import TEXT, styled

# Okabe and Ito; paged block sizes share a hue and differ by dash.
_COLOURS = {
    "reserve_max": "#d55e00",
    "reserve_power_of_two": "#e69f00",
    "first_fit": "#cc79a7",
    "reserve_oracle": "#009e73",
    "paged": "#0072b2",
}
_QUANTITIES = {
    "tokens_per_second": "tokens/s",
    "ttft_p50_s": "first token, median",
    "ttft_p99_s": "first token, 99 %",
    "itl_p50_s": "between tokens, median",
    "itl_p99_s": "between tokens, 99 %",
}
_DASHES = ("solid", "dot", "dash", "dashdot")


def utilisation_over_time(table: pd.DataFrame, *, of: str = "live_of_pool", title: str | None = None) -> go.Figure:
    """Live tokens over slots against simulated seconds, one line for each run of ``experiments.fragmentation``.

    ``of`` is "live_of_pool" or "live_of_reserved"; give the rows of one length table. Raises ValueError if there is
    nothing to draw or ``of`` is something else.
    """
    if of not in ("live_of_pool", "live_of_reserved"):
        raise ValueError(f"of must be 'live_of_pool' or 'live_of_reserved', got {of!r}")
    if table.empty:
        raise ValueError("table must hold at least one run, got none")
    figure = go.Figure()
    num_paged = 0
    for allocator, block_size in table[["allocator", "block_size"]].drop_duplicates().itertuples(index=False):
        run = table.loc[(table["allocator"] == allocator) & (table["block_size"] == block_size)]
        is_paged = allocator == "paged"
        name = f"paged, block {block_size}" if is_paged else allocator.replace("_", " ")
        width = 6 if allocator == "first_fit" else 2  # it often lies under the line of paging
        dash = _DASHES[num_paged % 4] if is_paged else "solid"
        line = dict(color=_COLOURS.get(allocator, TEXT), width=width, dash=dash)
        num_paged += is_paged
        figure.add_scatter(x=run["seconds"], y=run[of], name=name, mode="lines", line=line)
    what = "pool" if of == "live_of_pool" else "reserved slots"
    figure.update_xaxes(title="seconds on a simulated H200")
    figure.update_yaxes(title=f"live tokens / {what}", range=[0, 1.02], tickformat=".0%")
    styled(figure, title=title or f"How much of the {what} holds tokens", height=420)
    return figure.update_layout(legend=dict(x=0, xanchor="left", y=-0.25, yanchor="top"), hovermode="closest")


def utilisation_at_final_length(table: pd.DataFrame, *, title: str = "KV memory that holds tokens") -> go.Figure:
    """Horizontal bars of ``experiments.fragmentation.final_length_utilisation``. ValueError if there are no rows."""
    if table.empty:
        raise ValueError("table must hold at least one row, got none")
    names = [_final_name(row) for row in table.to_dict("records")]
    figure = go.Figure(
        go.Bar(
            x=table["utilisation"],
            y=names,
            orientation="h",
            marker_color=[_COLOURS.get(name, TEXT) for name in table["allocator"]],
            text=[f"{share:.1%}" for share in table["utilisation"]],
        )
    )
    figure.update_xaxes(title="tokens / slots held at the end", range=[0, 1.02], tickformat=".0%")
    figure.update_yaxes(autorange="reversed")
    styled(figure, title=title, height=120 + 24 * len(names))
    return figure.update_layout(hovermode="closest", margin_l=150)


def prefix_hit_curve(table: pd.DataFrame, *, title: str = "Prompt blocks found in the prefix cache") -> go.Figure:
    """Hit ratio against pool size, from ``experiments.prefix_hits``; the largest pool never evicts."""
    if table.empty:
        raise ValueError("table must hold at least one pool size, got none")
    limit = table["hit_ratio"].max()
    figure = go.Figure(
        go.Scatter(x=table["pool_tokens"], y=table["hit_ratio"], mode="lines+markers", line_color=_COLOURS["paged"])
    )
    figure.add_hline(y=limit, line=dict(color=TEXT, dash="dot"), annotation_text=f"never evicting: {limit:.1%}")
    figure.update_xaxes(title="tokens in the pool", type="log")
    figure.update_yaxes(title="hit ratio", tickformat=".0%", rangemode="tozero")
    return styled(figure, title=title)


def predicted_against_measured(table: pd.DataFrame, *, title: str = "Simulator against recorded H200") -> go.Figure:
    """Relative error of each row of ``experiments.simulator_validation``; a grey band is within 15 %."""
    if table.empty:
        raise ValueError("table must hold at least one prediction, got none")
    figure = go.Figure()
    for fitted, name, colour in ((True, "fitted", TEXT), (False, "checked", _COLOURS["paged"])):
        rows = table.loc[table["fitted"] == fitted]
        named = rows.assign(quantity=rows["quantity"].replace(_QUANTITIES)).to_dict("records")
        labels = [f"{row['model']}: {row['source']}, {row['quantity']}" for row in named]
        figure.add_scatter(x=rows["error"], y=labels, name=name, mode="markers", marker=dict(color=colour, size=9))
    figure.add_vrect(x0=-0.15, x1=0.15, fillcolor=TEXT, opacity=0.12, line_width=0)
    figure.update_xaxes(title="predicted / measured - 1", tickformat="+.0%", range=[-0.3, 0.3])
    figure.update_yaxes(autorange="reversed")
    styled(figure, title=title, height=140 + 20 * len(table))
    return figure.update_layout(hovermode="closest", margin_l=330)


def _final_name(row: dict) -> str:
    reserved = "" if pd.isna(row["reserved"]) else f" {int(row['reserved']):,}"
    return f"{row['allocator'].replace('_', ' ')}{reserved}"
