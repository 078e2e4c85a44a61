"""Requests to serve: seeded, the same for every system that is compared."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from labkit.simulation import Workload, all_at_once, poisson_arrivals


@dataclass(frozen=True, slots=True)
class ServeRequest:
    """A prompt of random tokens, the number of tokens to generate (forced), and its arrival in seconds."""

    prompt_token_ids: list[int]
    num_output_tokens: int
    arrival_time: float = 0.0


def standard_workload(vocab_size: int, num_requests: int = 256, seed: int = 1234) -> list[ServeRequest]:
    """Lognormal prompts (mean 160, 4 to 1,024 tokens) and outputs (mean 210, 8 to 1,024), all there at once.

    With the defaults: 43,368 prompt and 55,994 output tokens. Lengths do not depend on ``vocab_size``.
    """
    rng = np.random.default_rng(seed)
    prompts = _lognormal_lengths(rng, num_requests, mean=160, sigma=1.0, shortest=4, longest=1024)
    outputs = _lognormal_lengths(rng, num_requests, mean=210, sigma=0.8, shortest=8, longest=1024)
    return [
        ServeRequest(rng.integers(10, vocab_size, int(prompt)).tolist(), int(output))
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def table_workload(workload: Workload, vocab_size: int, max_model_len: int, seed: int = 0) -> list[ServeRequest]:
    """Random prompts with the lengths and arrivals of ``workload``; requests longer than the model are left out."""
    rng = np.random.default_rng(seed)
    return [
        ServeRequest(rng.integers(10, vocab_size, prompt).tolist(), output, arrival)
        for arrival, prompt, output in workload.fitting(max_model_len)
    ]


def fixed_workload(
    vocab_size: int, num_requests: int, num_prompt_tokens: int, num_output_tokens: int, rate: float | None, seed: int
) -> list[ServeRequest]:
    """Random prompts of one length and outputs of one length: with all there at once, the batch keeps its size."""
    rng = np.random.default_rng(seed)
    times = all_at_once(num_requests) if rate is None else poisson_arrivals(num_requests, rate, seed)
    prompts = rng.integers(10, vocab_size, (num_requests, num_prompt_tokens)).tolist()
    return [ServeRequest(prompt, num_output_tokens, time) for prompt, time in zip(prompts, times, strict=True)]


def _lognormal_lengths(
    rng: np.random.Generator, count: int, *, mean: float, sigma: float, shortest: int, longest: int
) -> np.ndarray:
    drawn = rng.lognormal(math.log(mean) - sigma**2 / 2, sigma, count)
    return np.clip(np.rint(drawn), shortest, longest).astype(int)
