"""Who ran when: one bar a request, from arrival to its last token."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import plotly.graph_objects as go

from labkit.observe import BlocksFreed, RequestArrived, RequestFinished, RequestPreempted, Trace

from .style import styled

MAX_REQUESTS = 200
_COLOURS = {
    "waiting": "rgba(128,128,128,0.35)",
    "prefill": "#e69f00",
    "decode": "#0072b2",
    "done, batch goes on": "rgba(213,94,0,0.45)",
    "preempted": "#cc79a7",
}


class Span(NamedTuple):
    """Something that a request did from ``start`` to ``end``, seconds."""

    request_id: str
    what: str
    start: float
    end: float


def batch_timeline(trace: Trace, *, title: str = "Who ran when") -> go.Figure:
    """Bars of waiting, prefill, decode and preemption for each request, in order of arrival, on the executor's clock.

    A request whose blocks are kept after its last token, as static batching does, shows that too. The first
    ``MAX_REQUESTS`` requests are drawn, and the title says so if there are more. Raises ValueError for an empty trace.
    """
    if not trace.steps:
        raise ValueError("trace must hold at least one step, got none")
    spans = request_spans(trace)
    order = list(dict.fromkeys(span.request_id for span in spans))
    drawn = set(order[:MAX_REQUESTS])
    begin = min(span.start for span in spans)
    figure = go.Figure()
    for what, colour in _COLOURS.items():
        mine = [span for span in spans if span.what == what and span.request_id in drawn]
        if mine:
            figure.add_bar(
                y=[span.request_id for span in mine],
                x=[span.end - span.start for span in mine],
                base=[span.start - begin for span in mine],
                orientation="h",
                name=what,
                marker=dict(color=colour, line_width=0),
                hovertemplate=f"%{{y}} {what}: %{{base:.3f}} s, for %{{x:.3f}} s<extra></extra>",
            )
    more = f" (the first {MAX_REQUESTS} of {len(order)} requests)" if len(order) > MAX_REQUESTS else ""
    figure.update_xaxes(title="seconds")
    figure.update_yaxes(
        categoryorder="array",
        categoryarray=order[:MAX_REQUESTS][::-1],
        showticklabels=len(drawn) <= 40,
        title="request",
    )
    height = min(900, 140 + 14 * len(drawn))
    return styled(figure, title=title + more, height=height).update_layout(
        barmode="overlay", hovermode="closest", bargap=0.1
    )


def request_spans(trace: Trace) -> list[Span]:
    """What each request did, runs of equal steps joined, in order of arrival and time."""
    arrived: dict[str, float] = {}
    spans: dict[str, list[Span]] = defaultdict(list)
    waiting_since: dict[str, tuple[str, float]] = {}
    last_token: dict[str, float] = {}
    finished: set[str] = set()
    for step in trace:
        for event in step.events:
            if isinstance(event, RequestArrived):
                arrived[event.request_id] = event.time
                waiting_since[event.request_id] = ("waiting", event.time)
            elif isinstance(event, RequestPreempted):
                waiting_since[event.request_id] = ("preempted", step.start)
            elif isinstance(event, RequestFinished):
                finished.add(event.request_id)
        for request_id, num_tokens in zip(step.scheduled_ids, step.num_scheduled_tokens, strict=True):
            what = "decode" if num_tokens == 1 and request_id in last_token else "prefill"
            if request_id in waiting_since:
                why, since = waiting_since.pop(request_id)
                _extend(spans[request_id], Span(request_id, why, since, step.start))
            _extend(spans[request_id], Span(request_id, what, step.start, step.end))
        for request_id in step.sampled_ids:
            last_token[request_id] = step.end
        for event in step.events:
            if isinstance(event, BlocksFreed) and event.request_id in finished and event.request_id in last_token:
                held = Span(event.request_id, "done, batch goes on", last_token[event.request_id], step.end)
                _extend(spans[event.request_id], held)
    return [span for request_id in spans for span in spans[request_id]]


def _extend(spans: list[Span], new: Span) -> None:
    """Add a span, or lengthen the last one if it is of the same kind: pauses between steps belong to it."""
    if new.end <= new.start:
        return
    if spans and spans[-1].what == new.what:
        spans[-1] = spans[-1]._replace(end=new.end)
    else:
        spans.append(new)
