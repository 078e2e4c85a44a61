"""Workloads: when requests arrive, and how many tokens they bring and want."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import compress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from labkit.scheduling import Request, SamplingParams

from .length_tables import LengthTable

Seed = int | np.random.Generator
"""Where randomness comes from: equal ints give equal results, a generator goes on from where it is."""

TOKENS_PER_HASH_ID = 512
"""Tokens that a hash id of a workload stands for, as in Mooncake's traces."""


class TimedLengths(NamedTuple):
    """One request of a workload. ``arrival_time`` is in seconds from the start."""

    arrival_time: float
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """Requests in order of arrival, without their text.

    Attributes:
        arrival_times: [num_requests] float64, seconds, never falling.
        num_prompt_tokens, num_output_tokens: [num_requests] int64, all at least 1.
        hash_ids: for each request one id for every 512 tokens of its prompt begun, where the trace says so: an id
            stands for these tokens and all before them. None if nothing is known of what prompts share.

    Raises ValueError for arrays of different lengths, times that fall, or a length below 1.
    """

    arrival_times: NDArray[np.float64]
    num_prompt_tokens: NDArray[np.int64]
    num_output_tokens: NDArray[np.int64]
    hash_ids: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        times = np.asarray(self.arrival_times, dtype=np.float64)
        object.__setattr__(self, "arrival_times", times)
        if times.ndim != 1 or np.any(np.diff(times, prepend=0.0) < 0):
            raise ValueError("arrival_times must be one row of seconds >= 0 that never falls")
        for name in ("num_prompt_tokens", "num_output_tokens"):
            lengths = np.asarray(getattr(self, name), dtype=np.int64)
            object.__setattr__(self, name, lengths)
            if lengths.shape != times.shape:
                raise ValueError(f"{name} must have shape {times.shape} as arrival_times has, got {lengths.shape}")
            if lengths.size and lengths.min() < 1:
                raise ValueError(f"{name} must be >= 1, got {lengths.min()}")
        if self.hash_ids is not None and len(self.hash_ids) != len(times):
            raise ValueError(f"hash_ids must have an entry for each of {len(times)} requests, got {len(self.hash_ids)}")

    def __len__(self) -> int:
        return len(self.arrival_times)

    def __iter__(self) -> Iterator[TimedLengths]:
        columns = (self.arrival_times, self.num_prompt_tokens, self.num_output_tokens)
        return map(TimedLengths, *(column.tolist() for column in columns))

    @property
    def num_total_tokens(self) -> NDArray[np.int64]:
        """[num_requests] prompt and output together: the length that a request ends with."""
        return self.num_prompt_tokens + self.num_output_tokens

    def fitting(self, max_model_len: int) -> Workload:
        """The requests whose total length is at most ``max_model_len``; an engine refuses the others."""
        return self._where(self.num_total_tokens <= max_model_len)

    def first(self, num_requests: int) -> Workload:
        """The first ``num_requests`` requests, or all if there are fewer."""
        return self._where(np.arange(len(self)) < num_requests)

    def _where(self, chosen: NDArray[np.bool_]) -> Workload:
        lengths = self.num_prompt_tokens[chosen], self.num_output_tokens[chosen]
        hash_ids = None if self.hash_ids is None else tuple(compress(self.hash_ids, chosen))
        return Workload(self.arrival_times[chosen], *lengths, hash_ids)


def sample_workload(table: LengthTable, arrival_times: NDArray[np.float64], rng: Seed = 0) -> Workload:
    """A request with lengths drawn from ``table`` for each arrival time."""
    return Workload(arrival_times, *table.sample(len(arrival_times), rng))


def all_at_once(num_requests: int) -> NDArray[np.float64]:
    """Arrival times of requests that are all there at the start: [num_requests] zeros."""
    return np.zeros(_require_count(num_requests))


def poisson_arrivals(num_requests: int, rate: float, rng: Seed = 0) -> NDArray[np.float64]:
    """Arrival times [num_requests] of independent requests, ``rate`` a second on average."""
    return gamma_arrivals(num_requests, rate, 1.0, rng)


def gamma_arrivals(num_requests: int, rate: float, cv: float, rng: Seed = 0) -> NDArray[np.float64]:
    """Arrival times [num_requests] with gamma-distributed gaps, ``rate`` requests a second on average.

    ``cv`` is the coefficient of variation of the gaps: 1 is Poisson, below 1 is more even, above comes in bursts (the
    Azure traces have 1.1 for conversations, 13 for code). Raises ValueError unless ``rate`` and ``cv`` are > 0.
    """
    for name, value in (("rate", rate), ("cv", cv)):
        if not 0 < value < np.inf:
            raise ValueError(f"{name} must be > 0 and finite, got {value}")
    shape = cv**-2
    gaps = np.random.default_rng(rng).gamma(shape, 1 / (rate * shape), _require_count(num_requests))
    return np.cumsum(gaps)


def random_prompts(workload: Workload, vocab_size: int, rng: Seed = 0) -> Iterator[list[int]]:
    """A prompt of random token ids in [0, vocab_size) for each request, one at a time; none shares a prefix."""
    if vocab_size < 1:
        raise ValueError(f"vocab_size must be >= 1, got {vocab_size}")
    generator = np.random.default_rng(rng)
    for length in workload.num_prompt_tokens.tolist():
        yield generator.integers(0, vocab_size, length).tolist()


def hashed_prompts(workload: Workload, vocab_size: int) -> Iterator[list[int]]:
    """A prompt for each request of a workload with hash ids, one at a time; equal ids, equal tokens.

    The 512 tokens of an id spell it first, in two digits to the base ``vocab_size``, so different ids differ. Raises
    ValueError without ids, or with one that two digits cannot spell.
    """
    if workload.hash_ids is None:
        raise ValueError("workload must have hash_ids, got none")
    offsets = np.arange(TOKENS_PER_HASH_ID)
    for length, ids in zip(workload.num_prompt_tokens.tolist(), workload.hash_ids, strict=True):
        if max(ids) >= vocab_size**2:
            raise ValueError(f"hash_ids must be < vocab_size squared ({vocab_size**2}), got {max(ids)}")
        hash_ids = np.array(ids)[:, None]
        tokens = (hash_ids + offsets) % vocab_size
        tokens[:, 1] = hash_ids[:, 0] // vocab_size
        yield tokens.ravel()[:length].tolist()


def make_requests(workload: Workload, vocab_size: int = 32_000, rng: Seed = 0) -> Iterator[Request]:
    """Requests "0", "1", ... that generate exactly the tokens the workload says.

    Prompts share what the workload's hash ids say; without those they are random and share nothing.
    """
    if workload.hash_ids is None:
        prompts = random_prompts(workload, vocab_size, rng)
    else:
        prompts = hashed_prompts(workload, vocab_size)
    for i, (entry, prompt) in enumerate(zip(workload, prompts, strict=True)):
        params = SamplingParams(max_tokens=entry.num_output_tokens, ignore_eos=True)
        yield Request(str(i), prompt, params, arrival_time=entry.arrival_time, seed=i)


def _require_count(num_requests: int) -> int:
    if num_requests < 0:
        raise ValueError(f"num_requests must be >= 0, got {num_requests}")
    return num_requests
