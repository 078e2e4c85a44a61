"""Prompts and sampling parameters as a caller passed them, made into requests that the scheduler would take."""

from __future__ import annotations

import copy
from collections.abc import Container, Sequence
from itertools import count
from typing import TypeAlias

from labkit.scheduling import Request, SamplingParams, Scheduler

from .prompts import Prompt, PromptReader
from .random_draws import draw_key

ParamsLike: TypeAlias = "SamplingParams | Sequence[SamplingParams] | None"
"""For all prompts, one for each, or None for the defaults."""


class RequestMaker:
    """Makes requests, checked against tokenizer, vocabulary and the scheduler's limits before any is admitted.

    Each has a number: its id unless the caller gives one, and what its random draws follow from, with the engine's
    seed, where its parameters have no seed.
    """

    def __init__(
        self,
        prompts: PromptReader,
        scheduler: Scheduler,
        eos_token_ids: Sequence[int],
        seed: int,
        in_use: Container[str],
    ) -> None:
        """``in_use`` are the ids of unfinished requests."""
        self._prompts = prompts
        self._scheduler = scheduler
        self._eos_token_ids = eos_token_ids
        self._seed = seed
        self._in_use = in_use
        self._next_number = 0

    def make_all(self, prompts: Sequence[Prompt], params: ParamsLike) -> list[tuple[Request, Prompt]]:
        """A request for each prompt, with ids of our own.

        Raises ValueError or TypeError, naming the argument, if any of them cannot be served.
        """
        checked = self._checked(params, len(prompts))
        free_numbers = (n for n in count(self._next_number) if str(n) not in self._in_use)
        requests = [
            (self._request(str(number), number, prompt, one), prompt)
            for prompt, one, number in zip(prompts, checked, free_numbers, strict=False)
        ]
        self._next_number = int(requests[-1][0].request_id) + 1
        return requests

    def make_one(
        self, request_id: str, prompt: Prompt, params: SamplingParams | None, priority: int, cache_salt: str | None
    ) -> Request:
        """A request with the caller's id; call :meth:`count_one` once it is admitted. Raises as :meth:`make_all`."""
        checked = self._checked(params, 1)[0]
        return self._request(request_id, self._next_number, prompt, checked, priority, cache_salt)

    def count_one(self) -> None:
        """Give the next request another number."""
        self._next_number += 1

    def _checked(self, params: ParamsLike, num_prompts: int) -> list[SamplingParams]:
        listed = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * num_prompts
        if len(listed) != num_prompts:
            raise ValueError(f"sampling_params must be one or as many as the {num_prompts} prompts, got {len(listed)}")
        for one in listed:
            if not isinstance(one, SamplingParams):
                raise TypeError(f"sampling_params must be SamplingParams, got {type(one).__name__}")
            self._prompts.check_params(one)
        return [copy.copy(one) for one in listed]

    def _request(
        self,
        request_id: str,
        number: int,
        prompt: Prompt,
        params: SamplingParams,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Request:
        request = Request(
            request_id,
            prompt.token_ids,
            params,
            priority=priority,
            cache_salt=cache_salt,
            eos_token_ids=self._eos_token_ids,
            seed=draw_key(self._seed, 0, number),
        )
        self._scheduler.validate(request)
        return request
