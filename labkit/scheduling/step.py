"""What the scheduler asks of an executor, and what comes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .request import Request


class ScheduledRequest(NamedTuple):
    """One request's share of a step.

    The tokens at positions ``[num_computed_tokens, num_computed_tokens + num_scheduled_tokens)`` of
    ``request.token_ids`` are run through the model and their K and V written to the cache; position p goes to slot
    ``block_table[p // block_size] * block_size + p % block_size``. ``num_samples`` new tokens are drawn from the
    last position's logits: 0 in the middle of a prompt, 1 usually, n at the end of a prompt with n > 1.
    ``block_table`` is the manager's own list: read it in ``submit``, do not keep it.
    """

    request: Request
    num_computed_tokens: int
    num_scheduled_tokens: int
    block_table: Sequence[int]
    num_samples: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step for an executor: do ``copies``, then run ``requests`` as one batch; ``requests`` may be empty.

    ``copies`` are pairs of (src, dst) block ids; every source is read before any destination is written.

    ``swap_outs``, pairs of (block, host block), and ``swap_ins``, (host block, block), may run beside the batch, which
    touches none of these blocks: after all steps before this one, and done when the step's result is collected.

    ``ended_ids`` are requests that finished, were aborted or preempted since the last plan: an executor that keeps
    something per request drops it.
    """

    step: int
    requests: tuple[ScheduledRequest, ...]
    copies: tuple[tuple[int, int], ...] = ()
    ended_ids: tuple[str, ...] = ()
    swap_outs: tuple[tuple[int, int], ...] = ()
    swap_ins: tuple[tuple[int, int], ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute and nothing to move."""
        return not (self.requests or self.swap_outs or self.swap_ins)

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens to compute in this step, over all requests."""
        return sum(r.num_scheduled_tokens for r in self.requests)


@dataclass(slots=True)
class StepResult:
    """What a step produced.

    Attributes:
        token_ids: for each request with ``num_samples`` > 0, that many new token ids.
        logprobs: for requests that asked, one mapping {token id: log-probability} per sample.
        prompt_logprobs: for requests that asked, one mapping for each *next* token of the positions computed in
            this step that lies inside the prompt.
        failed: requests that could not be computed, with the reason; the others are not affected.
        swaps_done: whether the plan's swaps were carried out; if not, their requests are computed again.
    """

    token_ids: Mapping[str, Sequence[int]]
    logprobs: Mapping[str, Sequence[Mapping[int, float]]] = field(default_factory=dict)
    prompt_logprobs: Mapping[str, Sequence[Mapping[int, float]]] = field(default_factory=dict)
    failed: Mapping[str, Exception] = field(default_factory=dict)
    swaps_done: bool = True
