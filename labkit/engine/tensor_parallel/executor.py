"""The executor of the front: plans go to the ranks, rank 0's tokens come back."""

from __future__ import annotations

import time

from labkit.scheduling import StepPlan, StepResult

from .interrupts import interrupts_deferred
from .messages import Collect, Reset, Result, Submit
from .plan_codec import PlanEncoder
from .ranks import Ranks


class RanksExecutor:
    """Runs step plans on :class:`Ranks`; ``depth`` is that of the ranks' own executors.

    A failure of any rank ends them all (ExecutorLost): ranks that are not in the same step wait for each other forever.
    """

    def __init__(self, ranks: Ranks, depth: int) -> None:
        self.depth = depth
        self._ranks = ranks
        self._encoder = PlanEncoder()
        self._num_collected = 0

    def now(self) -> float:
        """Seconds on the machine's monotonic clock."""
        return time.perf_counter()

    def submit(self, plan: StepPlan) -> None:
        """Send a step to every rank."""
        self._ranks.check()
        with interrupts_deferred():  # what was encoded must arrive
            self._ranks.broadcast(Submit(self._encoder.encode(plan)))

    def collect(self) -> StepResult:
        """The oldest step's result, when rank 0 has it."""
        self._num_collected += 1
        self._ranks.send(0, Collect(self._num_collected))
        while True:
            answer: Result = self._ranks.receive(0)
            if answer.number == self._num_collected:  # an earlier one was wanted by somebody who was interrupted
                return answer.result

    def reset(self) -> None:
        """Forget the steps under way."""
        if self._ranks.connections:
            self._ranks.broadcast(Reset())
