"""Lengths of real requests, as percentile tables that ship with the package."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from labkit.paths import data_path

PERCENTS = (*range(100), 99.5, 99.9, 100)
"""The percentiles in a table: each whole one, and two more where the tail is long."""

Quantity = Literal["prompt_tokens", "output_tokens", "total_tokens"]


@dataclass(frozen=True, slots=True, eq=False)
class LengthTable:
    """Percentiles of the lengths in a published trace of requests.

    Attributes:
        num_requests: requests in the trace.
        prompt_tokens, output_tokens, total_tokens: [len(PERCENTS)] float64, lengths at :data:`PERCENTS`.
        means: mean of each of the three in the trace.
        arrivals: requests a second ("rate") and coefficient of variation of the gaps ("cv"); None without times.
        source, licence: where the trace is from, and on what terms.
    """

    name: str
    num_requests: int
    prompt_tokens: NDArray[np.float64]
    output_tokens: NDArray[np.float64]
    total_tokens: NDArray[np.float64]
    means: dict[str, float]
    arrivals: dict[str, float] | None
    source: str
    licence: str

    @staticmethod
    def names() -> list[str]:
        """The tables that ship."""
        return sorted(path.stem for path in data_path("lengths").glob("*.json"))

    @classmethod
    def load(cls, name: str) -> LengthTable:
        """Load a table by name, such as "azure_conv". Raises ValueError, naming the tables, if there is none."""
        if name not in cls.names():
            raise ValueError(f"unknown length table {name!r}: there are {', '.join(cls.names())}")
        fields = json.loads(data_path(f"lengths/{name}.json").read_text(encoding="utf-8"))
        if tuple(fields.pop("percents")) != PERCENTS:
            raise ValueError(f"length table {name!r} has other percentiles than labkit's PERCENTS")
        for quantity in ("prompt_tokens", "output_tokens", "total_tokens"):
            fields[quantity] = np.array(fields[quantity], dtype=np.float64)
        return cls(**fields)

    def percentile(self, quantity: Quantity, percent: float) -> float:
        """The length that ``percent`` percent of requests do not exceed, linear between the table's entries."""
        if not 0 <= percent <= 100:
            raise ValueError(f"percent must be in [0, 100], got {percent}")
        return float(np.interp(percent, PERCENTS, getattr(self, quantity)))

    def sample(self, n: int, rng: int | np.random.Generator = 0) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Draw ``n`` prompt lengths and ``n`` output lengths, each [n] int64 and at least 1.

        Inverse-CDF sampling, linear between percentiles. The two are drawn independently, as they nearly are in the
        Azure traces (Pearson -0.11 and 0.00).
        """
        generator = np.random.default_rng(rng)

        def draw(percentiles: NDArray[np.float64]) -> NDArray[np.int64]:
            lengths = np.interp(generator.uniform(0, 100, n), PERCENTS, percentiles)
            return np.maximum(np.rint(lengths), 1).astype(np.int64)

        return draw(self.prompt_tokens), draw(self.output_tokens)
