"""Readers of published request traces. The files themselves do not ship with the package."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .workloads import TOKENS_PER_HASH_ID, Workload


def read_trace(path: str | Path) -> Workload:
    """A trace in any of the formats below, told by its first line. Raises ValueError if it is none of them."""
    with _opened(path) as file:
        first = file.readline()
    if first.lstrip().startswith("{"):
        return read_mooncake_jsonl(path)
    for column, read in _READERS.items():
        if column in first:
            return read(path)
    raise ValueError(
        f"{path} is no trace that labkit knows: its first line must be a JSON object (Mooncake) or name the columns of "
        f"an Azure, BurstGPT or Vidur file, got {first.strip()[:80]!r}"
    )


def read_azure_csv(path: str | Path) -> Workload:
    """The Azure LLM inference traces of 2023: TIMESTAMP, ContextTokens, GeneratedTokens.

    Source: Patel et al., Splitwise (ISCA 2024). Raises ValueError for a missing column or an entry that is no number.
    """
    stamps, prompts, outputs = _columns(path, "TIMESTAMP", "ContextTokens", "GeneratedTokens")
    times = _converted(path, "TIMESTAMP", stamps, lambda stamp: np.datetime64(stamp, "ns"))
    nanoseconds = np.array(times, dtype="datetime64[ns]").astype(np.int64)
    start = nanoseconds.min() if nanoseconds.size else 0
    return _in_order(
        (nanoseconds - start) / 1e9,
        _converted(path, "ContextTokens", prompts, int),
        _converted(path, "GeneratedTokens", outputs, int),
    )


def read_mooncake_jsonl(path: str | Path) -> Workload:
    """Mooncake's traces: one object a line with timestamp (milliseconds), input_length and output_length.

    Its hash_ids, one for each 512 tokens of a prompt begun, are kept: prompts with equal ids at their beginning begin
    with the same tokens (:func:`labkit.simulation.hashed_prompts`).

    Source: Qin et al., Mooncake (FAST 2025). Raises ValueError, naming the line, if it is no such object.
    """
    rows = []
    with _opened(path) as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                rows.append(_mooncake_row(path, number, line))
    times, prompts, outputs, hash_ids = zip(*rows, strict=True) if rows else ([], [], [], None)
    return _in_order(np.array(times) / 1e3, prompts, outputs, hash_ids)


def read_burstgpt_csv(path: str | Path) -> Workload:
    """BurstGPT's traces: Timestamp (seconds), Request tokens, Response tokens; failed requests (no response) dropped.

    Source: Wang et al., BurstGPT (2024). Raises ValueError for a missing column or an entry that is no number.
    """
    times, prompts, outputs = _columns(path, "Timestamp", "Request tokens", "Response tokens")
    answers = np.array(_converted(path, "Response tokens", outputs, int), dtype=np.int64)
    answered = answers > 0
    seconds = np.array(_converted(path, "Timestamp", times, float), dtype=np.float64)[answered]
    start = seconds.min() if seconds.size else 0.0
    questions = np.array(_converted(path, "Request tokens", prompts, int), dtype=np.int64)
    return _in_order(seconds - start, questions[answered], answers[answered])


def read_vidur_csv(path: str | Path) -> Workload:
    """Vidur's length files: num_prefill_tokens, num_decode_tokens. They have no times: all arrive at once.

    Source: Agrawal et al., Vidur (MLSys 2024). Raises ValueError for a missing column or an entry that is no number.
    """
    names = ("num_prefill_tokens", "num_decode_tokens")
    prompts, outputs = (
        _converted(path, name, column, int) for name, column in zip(names, _columns(path, *names), strict=True)
    )
    return _in_order(np.zeros(len(prompts)), prompts, outputs)


_READERS: dict[str, Callable[[str | Path], Workload]] = {
    "ContextTokens": read_azure_csv,
    "Request tokens": read_burstgpt_csv,
    "num_prefill_tokens": read_vidur_csv,
}
"""Readers of CSV files by a column that only theirs have."""


def _opened(path: str | Path) -> TextIO:
    return open(path, encoding="utf-8-sig", newline="")


def _columns(path: str | Path, *names: str) -> list[list[str]]:
    with _opened(path) as file:
        rows = csv.DictReader(file)
        if missing := [name for name in names if name not in (rows.fieldnames or ())]:
            raise ValueError(f"{path} has no column {', '.join(missing)}; it has {', '.join(rows.fieldnames or ())}")
        columns = [tuple(row[name] for name in names) for row in rows]
    return [list(column) for column in zip(*columns, strict=True)] if columns else [[] for _ in names]


def _converted(path: str | Path, name: str, entries: Sequence[str], convert: Callable[[str], Any]) -> list[Any]:
    """The entries of column ``name`` as numbers or times; the first that is none is named with its line."""
    values = []
    for number, entry in enumerate(entries, start=2):  # line 1 has the names
        try:
            values.append(convert(entry))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: {name} must be a number or time, got {entry!r}") from error
    return values


def _mooncake_row(path: str | Path, number: int, line: str) -> tuple[float, int, int, tuple[int, ...]]:
    try:
        row = json.loads(line)
        fields = float(row["timestamp"]), int(row["input_length"]), int(row["output_length"])
        hash_ids = tuple(int(i) for i in row["hash_ids"])
    except KeyError as error:
        raise ValueError(f"{path} is no Mooncake trace: line {number} has no {error.args[0]}") from error
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is no Mooncake trace: line {number} is {line.strip()[:80]!r}") from error
    expected = -(-max(fields[1], 1) // TOKENS_PER_HASH_ID)
    if len(hash_ids) != expected:
        raise ValueError(
            f"{path}, line {number}: a prompt of {fields[1]} tokens must have {expected} hash_ids, got {len(hash_ids)}"
        )
    return *fields, hash_ids


def _in_order(
    seconds: ArrayLike,
    prompts: ArrayLike,
    outputs: ArrayLike,
    hash_ids: Sequence[tuple[int, ...]] | None = None,
) -> Workload:
    """A workload sorted by time. Lengths of 0 become 1: the engine needs a token to begin, and always makes one."""
    times = np.asarray(seconds, dtype=np.float64)
    order: NDArray[np.int64] = np.argsort(times, kind="stable")
    prompt_lengths, output_lengths = (
        np.maximum(np.asarray(column, dtype=np.int64), 1)[order] for column in (prompts, outputs)
    )
    ids = None if hash_ids is None else tuple(hash_ids[i] for i in order.tolist())
    return Workload(times[order], prompt_lengths, output_lengths, ids)
