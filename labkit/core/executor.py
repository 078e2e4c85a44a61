"""The executor protocol: whoever computes a step, be it a model on a GPU or a cost model on a clock."""

from __future__ import annotations

from typing import Protocol

from labkit.scheduling import StepPlan, StepResult


class Executor(Protocol):
    """Runs step plans in the order they were submitted.

    ``submit`` starts a step and may return before it is done; ``collect`` waits for the oldest submitted step and
    returns its result. A synchronous executor computes in ``submit`` and hands the result over in ``collect``.
    An exception from either fails the requests of that step, and only those.
    """

    def submit(self, plan: StepPlan) -> None:
        """Start a step."""
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest step that was submitted and return what it produced."""
        ...

    def now(self) -> float:
        """Seconds on this executor's clock: wall time for a model, simulated time for a simulator."""
        ...
