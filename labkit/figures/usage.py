"""The KV pool over the steps of a trace."""

from __future__ import annotations

import plotly.graph_objects as go

from labkit.observe import BlockTableState, Trace

from .style import COLOURS, styled

MAX_POINTS = 2000


def usage_timeline(trace: Trace) -> go.Figure:
    """Slots of the pool after each step: live tokens, internal fragmentation, cached, and free up to the top.

    Blocks in flight to or from host memory are shown if there ever are any.

    Of more than 2,000 steps, evenly spaced ones are drawn, and the axis says so. Raises ValueError if the trace is
    empty.
    """
    if not trace.steps:
        raise ValueError("trace must hold at least one step, got none")
    state = BlockTableState(trace.num_blocks, trace.block_size)
    stride = -(-len(trace) // MAX_POINTS)
    steps: list[int] = []
    parts: dict[str, list[int]] = {name: [] for name in COLOURS}
    for index, record in enumerate(trace):
        state.apply(record)
        if index % stride and index + 1 != len(trace):
            continue
        steps.append(index + 1)
        parts["live"].append(state.num_live_tokens)
        parts["fragmentation"].append(state.num_fragmented_slots)
        parts["cached"].append(state.num_cached_free_blocks * trace.block_size)
        parts["in flight"].append(state.num_in_flight_blocks * trace.block_size)
        parts["free"].append(state.num_free_blocks * trace.block_size)
    if not any(parts["in flight"]):
        del parts["in flight"]
    names = {"live": "live tokens", "fragmentation": "internal fragmentation"}
    traces = [
        go.Scatter(
            x=steps,
            y=slots,
            name=names.get(part, part),
            stackgroup="slots",
            mode="lines",
            line=dict(width=0, shape="hv"),
            fillcolor=COLOURS[part],
        )
        for part, slots in parts.items()
    ]
    figure = go.Figure(traces)
    figure.update_xaxes(title="step" if stride == 1 else f"step (every {_ordinal(stride)} is drawn)")
    figure.update_yaxes(title="slots, one token each", range=[0, trace.num_blocks * trace.block_size])
    title = f"KV pool: {trace.num_blocks:,} blocks of {trace.block_size} tokens"
    return styled(figure, title=title)


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
