"""A request: its tokens, how far it is computed, and where it stands."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from copy import copy
from enum import Enum

from .sampling_params import SamplingParams


class RequestStatus(Enum):
    """Where a request stands. WAITING covers new and preempted requests alike."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


def forked_id(request_id: str, sample_index: int) -> str:
    """Id of sequence ``sample_index`` of a request with n > 1; sample 0 keeps the request's own id."""
    return request_id if sample_index == 0 else f"{request_id}#{sample_index}"


class Request:
    """One sequence on its way through the engine.

    There is no prefill or decode phase: ``num_computed_tokens`` catches up with ``num_tokens``. A new prompt is
    many tokens behind, a decoding sequence one, a preempted one starts again from zero.

    Attributes:
        token_ids: prompt tokens, then generated ones.
        num_computed_tokens: how many of them have K and V in the cache, or will have after the steps under way; of a
            waiting request, how many have them in host memory.
        is_arriving: its blocks are on their way back from host memory; it runs when they are there.
        num_sequences: sequences that this one stands for: n until it gets its first token and forks, then 1.
        max_num_tokens: the length at which it ends, set by the scheduler that takes it.
        block_table: the allocator's own list while it runs.
        num_pending_tokens: new tokens that steps under way will bring.
        cache_salt: prefix-cache entries are shared only between equal salts.
        arrival_time: seconds on the executor's clock; None becomes the moment when the engine takes it.
        priority: smaller runs first.
        queue_key: (priority, arrival number, sample_index): the order in which requests are served.
        takes_argmax: its next token is the argmax of the logits, and nothing else is asked of them.
        parent_id, sample_index: set for the sequences forked from a request with n > 1.
    """

    __slots__ = (
        "arrival_time",
        "block_table",
        "cache_salt",
        "finish_reason",
        "is_arriving",
        "logprobs",
        "max_num_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_pending_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_sequences",
        "parent_id",
        "priority",
        "prompt_logprobs",
        "queue_key",
        "request_id",
        "sample_index",
        "sampling_params",
        "seed",
        "status",
        "stop_reason",
        "stop_token_ids",
        "takes_argmax",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams,
        *,
        arrival_time: float | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        eos_token_ids: Sequence[int] = (),
        seed: int = 0,
    ) -> None:
        self.request_id = request_id
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.sampling_params = sampling_params
        eos = () if sampling_params.ignore_eos else eos_token_ids
        self.stop_token_ids = frozenset((*eos, *(sampling_params.stop_token_ids or ())))
        self.takes_argmax = sampling_params.takes_argmax
        self.arrival_time = arrival_time
        self.priority = priority
        self.cache_salt = cache_salt
        self.seed = seed if sampling_params.seed is None else sampling_params.seed
        self.status = RequestStatus.WAITING
        self.queue_key: tuple[int, int, int] = (priority, 0, 0)
        self.num_computed_tokens = 0
        self.num_pending_tokens = 0
        self.is_arriving = False
        self.num_sequences = sampling_params.n
        self.max_num_tokens = self.max_total_tokens(sys.maxsize)
        self.block_table: Sequence[int] = ()
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.parent_id: str | None = None
        self.sample_index = 0
        self.logprobs: list[Mapping[int, float]] = []
        self.prompt_logprobs: list[Mapping[int, float] | None] = []

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    def fork(self, sample_index: int) -> Request:
        """A sequence that goes on from the same tokens, as sample ``sample_index`` of this request."""
        child = copy(self)
        child.request_id = forked_id(self.request_id, sample_index)
        child.parent_id, child.sample_index = self.request_id, sample_index
        child.num_sequences = 1
        child.token_ids = list(self.token_ids)
        child.queue_key = (*self.queue_key[:2], sample_index)
        child.logprobs, child.prompt_logprobs = list(self.logprobs), list(self.prompt_logprobs)
        return child

    def num_runnable_tokens(self) -> int:
        """Tokens that could be computed now: all that are not yet, and the next one even before it is known.

        The executor has a pending token on its device, so a sequence can run one step ahead of what the host has
        seen. It waits instead if the pending token will be its last for certain, if it is about to fork, or if its
        sampling looks back at its own tokens.
        """
        if self.is_arriving:
            return 0
        pending = self.num_pending_tokens
        num_tokens = len(self.token_ids) + pending
        if pending and (
            pending > 1 or num_tokens >= self.max_num_tokens or self.sampling_params.repetition_penalty != 1
        ):
            return 0
        return num_tokens - self.num_computed_tokens

    def max_total_tokens(self, max_model_len: int) -> int:
        """The longest this request can become."""
        if self.sampling_params.max_tokens is None:
            return max_model_len
        return min(max_model_len, self.num_prompt_tokens + self.sampling_params.max_tokens)

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.value}, prompt={self.num_prompt_tokens}, "
            f"output={self.num_output_tokens}, computed={self.num_computed_tokens})"
        )
