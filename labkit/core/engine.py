"""The engine: the one loop that everything in the lab runs through."""

from __future__ import annotations

from dataclasses import dataclass

from labkit.observe import EngineStats, Event, RequestArrived, StepRecord, Trace
from labkit.scheduling import Request, RequestStatus, Scheduler, StepPlan, StepResult

from .executor import Executor, ExecutorLost


@dataclass(slots=True)
class _UnderWay:
    """A step between submission and collection."""

    plan: StepPlan
    start: float
    error: Exception | None = None


class Engine:
    """Schedules, has the executor compute, and takes the result in; one event batch a step goes to the trace.

    The same loop drives a model on a GPU and a simulator on a laptop: nothing here knows which.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, trace: Trace | None = None) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.trace = trace
        self.stats = EngineStats()
        self._under_way: list[_UnderWay] = []  # submitted and not yet collected, oldest first
        self._events: list[Event] = []
        scheduler.kv.events = self._events

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is waiting or running."""
        return self.scheduler.has_unfinished

    def add_request(self, request: Request) -> None:
        """Queue a request; it runs when :meth:`step` is called. Raises ValueError if it can never fit."""
        self.scheduler.add(request)
        if request.arrival_time is None:
            request.arrival_time = self.executor.now()
        arrived = RequestArrived(request.request_id, request.num_prompt_tokens, request.arrival_time)
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
            self._forget_steps_under_way()
            now = self.executor.now()
            self._record(StepPlan(self.scheduler.num_steps, ()), now, now, 0)

    def restart_records(self) -> None:
        """Begin statistics and trace anew. Raises RuntimeError while requests are unfinished."""
        if self.has_unfinished:
            raise RuntimeError("records can be restarted only when no request is unfinished")
        self.stats = EngineStats()
        if self.trace is not None:
            self.trace.steps.clear()

    def step(self) -> list[Request]:
        """Run one step; return the requests that got tokens or ended in it.

        With an executor of depth 2 the next step is scheduled and submitted first, so that it runs while the result
        of this one is taken in; the very first call then returns nothing yet.

        An exception in the executor ends the requests of its step with finish reason "error" and leaves the others
        as they were. An interrupt (KeyboardInterrupt) aborts the requests under way and is raised again, as is
        :class:`ExecutorLost`.
        """
        try:
            if self._submit() and len(self._under_way) < self.executor.depth:
                return []
            return self._collect() if self._under_way else []
        except BaseException:
            for step in self._under_way:
                for entry in step.plan.requests:
                    if entry.request.status is not RequestStatus.FINISHED:
                        self.finish(entry.request, "abort")
            self._forget_steps_under_way()
            raise

    def _submit(self) -> bool:
        """Schedule a step and hand it to the executor; False if there is nothing to run, or trouble to see to."""
        if any(step.error for step in self._under_way):
            return False
        plan = self.scheduler.schedule()
        if plan.is_empty:
            return False
        self._under_way.append(_UnderWay(plan, self.executor.now()))
        try:
            self.executor.submit(plan)
        except ExecutorLost:
            raise
        except Exception as error:
            self._under_way[-1].error = error
        return True

    def _collect(self) -> list[Request]:
        """Take in the result of the oldest step under way."""
        step = self._under_way[0]
        num_events_before = len(self._events)
        try:
            if step.error is not None:
                raise step.error
            result = self.executor.collect()
        except ExecutorLost:
            raise
        except Exception as error:
            failed = {entry.request.request_id: error for entry in step.plan.requests}
            result = StepResult({}, failed=failed, swaps_done=False)
        del self._under_way[0]
        end = self.executor.now()
        changed = self.scheduler.update(step.plan, result)
        if not self.has_unfinished:
            self._forget_steps_under_way()  # run ahead for requests that have ended meanwhile
        sampled_ids = tuple(r.request_id for r in changed if r.finish_reason != "error")
        self._record(step.plan, step.start, end, num_events_before, sampled_ids)
        return changed

    def _forget_steps_under_way(self) -> None:
        if self._under_way:
            self.executor.reset()
            for step in self._under_way:
                self.scheduler.end_swaps(step.plan, done=False)
            self._under_way.clear()

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
            scheduled_ids=tuple([request.request_id for request, _, _, _, _ in plan.requests]),
            num_scheduled_tokens=tuple([num_tokens for _, _, num_tokens, _, _ in plan.requests]),
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
