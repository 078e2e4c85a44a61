"""Run a workload through the real scheduler and allocator, on a simulated clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from labkit.core import Engine
from labkit.observe import Trace
from labkit.scheduling import Request, Scheduler

from .executor import SimulatedExecutor

StepObserver = Callable[[Engine], None]
"""Called after each step, to look at the engine."""


def simulate(
    requests: Iterable[Request],
    scheduler: Scheduler,
    executor: SimulatedExecutor,
    *,
    trace: Trace | None = None,
    on_step: StepObserver | None = None,
) -> Engine:
    """Serve ``requests`` (in order of ``arrival_time``, seconds) to the end and return the engine with its stats.

    A request enters the queue at the first step that begins after it arrived; when nobody is there, the clock jumps
    to the next arrival. Raises ValueError for a request that can never fit, or if arrivals are out of order.
    """
    engine = Engine(scheduler, executor, trace)
    arrivals = _in_order(requests)
    upcoming = next(arrivals, None)
    while upcoming is not None or engine.has_unfinished:
        if upcoming is not None:
            if not engine.has_unfinished:
                executor.advance_to(upcoming[0])
            while upcoming is not None and upcoming[0] <= executor.now():
                engine.add_request(upcoming[1])
                upcoming = next(arrivals, None)
        engine.step()
        if on_step is not None:
            on_step(engine)
    return engine


def _in_order(requests: Iterable[Request]) -> Iterator[tuple[float, Request]]:
    """Requests with their arrival times (0 where none is given); ValueError at the first that goes back."""
    last = 0.0
    for request in requests:
        time = request.arrival_time or 0.0
        if time < last:
            raise ValueError(
                f"requests must be in order of arrival_time, got {request.request_id!r} at {time} after {last}"
            )
        last = time
        yield time, request
