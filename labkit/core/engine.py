"""The engine: the one loop that everything in the lab runs through."""

from __future__ import annotations

from labkit.observe import EngineStats, Event, RequestArrived, StepRecord, Trace
from labkit.scheduling import Request, Scheduler, StepPlan, StepResult

from .executor import Executor


class Engine:
    """Schedules, has the executor compute, and takes the result in; one event batch a step goes to the trace.

    The same loop drives a model on a GPU and a simulator on a laptop: nothing here knows which.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, trace: Trace | None = None) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.trace = trace
        self.stats = EngineStats()
        self._events: list[Event] = []
        scheduler.kv.events = self._events

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is waiting or running."""
        return self.scheduler.has_unfinished

    def add_request(self, request: Request) -> None:
        """Queue a request; it runs when :meth:`step` is called. Raises ValueError if it can never fit."""
        self.scheduler.add(request)
        arrived = RequestArrived(request.request_id, request.num_prompt_tokens, self.executor.now())
        self._events.append(arrived)

    def abort(self, request_id: str) -> bool:
        """End all sequences of a request now and free their blocks; False if it has ended already."""
        sequences = self.scheduler.unfinished(request_id)
        for request in sequences:
            self.finish(request, "abort")
        return bool(sequences)

    def finish(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        """End one sequence for a reason that only the caller can see, such as a stop string in its text."""
        self.scheduler.finish(request, reason, stop_reason)
        if not self.has_unfinished:  # no step will follow that could carry this event
            now = self.executor.now()
            self._record(StepPlan(self.scheduler.num_steps, ()), now, now, 0)

    def step(self) -> list[Request]:
        """Run one step; return the requests that got tokens or ended in it.

        An exception in the executor ends the requests of this step with finish reason "error" and leaves the
        others as they were. An interrupt (KeyboardInterrupt) aborts the requests of this step and is raised again.
        """
        plan = self.scheduler.schedule()
        if not plan.requests:
            return []
        num_events_before = len(self._events)
        start = self.executor.now()
        try:
            self.executor.submit(plan)
            result = self.executor.collect()
        except Exception as error:
            result = StepResult({}, failed={entry.request.request_id: error for entry in plan.requests})
        except BaseException:
            for entry in plan.requests:
                self.finish(entry.request, "abort")
            raise
        end = self.executor.now()
        changed = self.scheduler.update(plan, result)
        sampled_ids = tuple(r.request_id for r in changed if r.finish_reason != "error")
        self._record(plan, start, end, num_events_before, sampled_ids)
        return changed

    def _record(
        self,
        plan: StepPlan,
        start: float,
        end: float,
        num_events_before: int,
        sampled_ids: tuple[str, ...] = (),
    ) -> None:
        record = StepRecord(
            step=plan.step,
            start=start,
            end=end,
            scheduled_ids=tuple(entry.request.request_id for entry in plan.requests),
            num_scheduled_tokens=tuple(entry.num_scheduled_tokens for entry in plan.requests),
            sampled_ids=sampled_ids,
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            num_events_before=num_events_before,
            events=tuple(self._events),
        )
        self._events.clear()
        self.stats.update(record, self.scheduler.kv.usage())
        if self.trace is not None:
            self.trace.record(record)
