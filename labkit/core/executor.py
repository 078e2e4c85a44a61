"""The executor protocol: whoever computes a step, be it a model on a GPU or a cost model on a clock."""

from __future__ import annotations

from typing import Protocol

from labkit.scheduling import StepPlan, StepResult


class ExecutorLost(RuntimeError):
    """The executor is gone for good: no step can follow, and the one under way has no result."""


class Executor(Protocol):
    """Runs step plans in the order they were submitted.

    ``submit`` starts a step and may return before it is done; ``collect`` waits for the oldest submitted step and
    returns its result. A synchronous executor computes in ``submit`` and hands the result over in ``collect``.
    An exception from either fails the requests of that step, and only those; the step is then no longer under way,
    nor are its swaps. :class:`ExecutorLost` is raised on to the caller of the engine. A plan may hold swaps only.

    ``depth`` is how many steps may be under way at once: 1, or 2 if the executor keeps sampled tokens where it
    needs them, so that a step can begin before the host knows the tokens of the one before. In such a step a
    request's newest token lies beyond the end of ``request.token_ids``.
    """

    depth: int

    def submit(self, plan: StepPlan) -> None:
        """Start a step."""
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest step that was submitted and return what it produced."""
        ...

    def reset(self) -> None:
        """Forget the steps under way: wait until they do no more harm, and drop their results."""
        ...

    def now(self) -> float:
        """Seconds on this executor's clock: wall time for a model, simulated time for a simulator."""
        ...
