"""Run a workload through the real scheduler and allocator, on a simulated clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable

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
    arrivals = iter(requests)
    upcoming = next(arrivals, None)
    while upcoming is not None or engine.has_unfinished:
        if not engine.has_unfinished and upcoming is not None:
            executor.advance_to(upcoming.arrival_time)
        while upcoming is not None and upcoming.arrival_time <= executor.now():
            engine.add_request(upcoming)
            following = next(arrivals, None)
            if following is not None and following.arrival_time < upcoming.arrival_time:
                raise ValueError(
                    f"requests must be in order of arrival_time, got {following.request_id!r} at "
                    f"{following.arrival_time} after {upcoming.arrival_time}"
                )
            upcoming = following
        engine.step()
        if on_step is not None:
            on_step(engine)
    return engine
