"""An executor without a model: a clock that a cost model moves, and tokens from a rule."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from labkit.scheduling import Request, StepPlan, StepResult

StepCost = Callable[[StepPlan], float]
"""Seconds that a step takes."""

NextToken = Callable[[Request, int], int]
"""The token that a request gets next, for one of its samples."""


def free_of_charge(plan: StepPlan) -> float:
    """The cost model in which every step takes no time."""
    return 0.0


def filler_token(request: Request, sample_index: int) -> int:
    """A token id in [1000, 32000) that depends on the request's seed, the position and the sample."""
    return 1000 + (request.seed * 7919 + len(request.token_ids) * 31 + sample_index + request.sample_index) % 31_000


class SimulatedExecutor:
    """Computes nothing, at a price: each step moves the clock by what ``step_cost`` says it takes.

    ``host_cost`` is what the host does for a step before the device can begin it. With ``depth`` 2 it does so while
    the device still works on the step before, as a GPU executor does::

        depth 1   host ██          ██                 depth 2   host ██ ██     ██
                  device ███████     ███████                  device   ███████████████

    Give requests ``ignore_eos`` and ``max_tokens`` to force their lengths, or a ``next_token`` rule that replays a
    real run's tokens: then the scheduler and allocator do exactly what they did there.
    """

    def __init__(
        self,
        step_cost: StepCost = free_of_charge,
        next_token: NextToken = filler_token,
        depth: int = 1,
        host_cost: StepCost = free_of_charge,
    ) -> None:
        """``depth`` 2 lets the scheduler run a step ahead."""
        self.depth = depth
        self._step_cost = step_cost
        self._host_cost = host_cost
        self._next_token = next_token
        self._clock = 0.0
        self._device_is_free_at = 0.0
        self._submitted: deque[tuple[StepPlan, float]] = deque()

    def now(self) -> float:
        """Simulated seconds since the start."""
        return self._clock

    def advance_to(self, time: float) -> None:
        """Let the clock run idle until ``time``; it never runs backwards."""
        self._clock = max(self._clock, time)

    def reset(self) -> None:
        self._submitted.clear()

    def submit(self, plan: StepPlan) -> None:
        self._clock += self._host_cost(plan)
        self._submitted.append((plan, self._clock))

    def collect(self) -> StepResult:
        plan, submitted_at = self._submitted.popleft()
        self._device_is_free_at = max(self._device_is_free_at, submitted_at) + self._step_cost(plan)
        self._clock = max(self._clock, self._device_is_free_at)
        next_token, token_ids = self._next_token, {}
        for request, _, _, _, num_samples in plan.requests:
            if num_samples == 1:
                token_ids[request.request_id] = (next_token(request, 0),)
            elif num_samples:
                token_ids[request.request_id] = tuple(next_token(request, i) for i in range(num_samples))
        return StepResult(token_ids)
