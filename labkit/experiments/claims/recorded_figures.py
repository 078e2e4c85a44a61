"""Figures of result files that the text of a claim quotes."""

from __future__ import annotations

from typing import Any

from ..recorded import results


def figure(file: str, column: str, section: str | None = None, **match: Any) -> float:
    """A recorded figure: ``column`` of the first row with all of ``match``, in a ``section`` of the file or its top."""
    document = results(file) if section is None else results(file)[section]
    return next(row[column] for row in document["rows"] if match.items() <= row.items())


def ladder(rung: str, lengths: str, column: str = "max_concurrency") -> float:
    """A figure of the combined experiment: Llama-2-13B in 40 GiB, on an H200."""
    shape = {"model": "llama-2-13b", "memory_limit_gib": 40}
    return figure("h200/combined.json", column, **shape, rung=rung, lengths=lengths)


def ladder_times(rung: str, lengths: str, column: str = "tokens_per_second", before: str = "baseline") -> float:
    """The same as a multiple of the rung ``before``."""
    return ladder(rung, lengths, column) / ladder(before, lengths, column)


def whole_run(kv_format: str, **match: Any) -> float:
    """Tokens/s of a KV format over those of bf16 in a pool of 16 GiB: first at the same batch, then at all that fit."""
    return figure("h200/quant.json", "ratio_to_first", "engine", kv_format=kv_format, **match)


def added_perplexity(policy: str) -> float:
    """Percent of the embedded model's perplexity that a way to store K and V adds."""
    return figure("quality.json", "delta_ppl_percent", policy=policy)
