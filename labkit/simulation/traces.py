"""Readers of published request traces. The files themselves do not ship with the package."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from .workloads import Workload


def read_azure_csv(path: str | Path) -> Workload:
    """The Azure LLM inference traces of 2023: TIMESTAMP, ContextTokens, GeneratedTokens.

    Source: Patel et al., Splitwise (ISCA 2024). Raises ValueError if a column is missing.
    """
    stamps, prompts, outputs = _columns(path, "TIMESTAMP", "ContextTokens", "GeneratedTokens")
    nanoseconds = np.array(stamps, dtype="datetime64[ns]").astype(np.int64)
    return _in_order((nanoseconds - nanoseconds.min()) / 1e9, prompts, outputs)


def read_mooncake_jsonl(path: str | Path) -> Workload:
    """Mooncake's traces: one object a line with timestamp (milliseconds), input_length and output_length.

    Source: Qin et al., Mooncake (FAST 2025). Raises ValueError if a field is missing.
    """
    with open(path, encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines if line.strip()]
    fields = ("timestamp", "input_length", "output_length")
    if missing := [name for name in fields if any(name not in row for row in rows)]:
        raise ValueError(f"{path} is no Mooncake trace: a line has no {', '.join(missing)}")
    times, prompts, outputs = ([row[name] for row in rows] for name in fields)
    return _in_order(np.array(times) / 1e3, prompts, outputs)


def read_burstgpt_csv(path: str | Path) -> Workload:
    """BurstGPT's traces: Timestamp (seconds), Request tokens, Response tokens; failed requests (no response) dropped.

    Source: Wang et al., BurstGPT (2024). Raises ValueError if a column is missing.
    """
    times, prompts, outputs = _columns(path, "Timestamp", "Request tokens", "Response tokens")
    answered = np.array(outputs, dtype=np.int64) > 0
    seconds = np.array(times, dtype=np.float64)[answered]
    start = seconds.min() if seconds.size else 0.0
    return _in_order(seconds - start, np.array(prompts)[answered], np.array(outputs)[answered])


def read_vidur_csv(path: str | Path) -> Workload:
    """Vidur's length files: num_prefill_tokens, num_decode_tokens. They have no times: all arrive at once.

    Source: Agrawal et al., Vidur (MLSys 2024). Raises ValueError if a column is missing.
    """
    prompts, outputs = _columns(path, "num_prefill_tokens", "num_decode_tokens")
    return _in_order(np.zeros(len(prompts)), prompts, outputs)


def _columns(path: str | Path, *names: str) -> list[list[str]]:
    with open(path, encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file)
        if missing := [name for name in names if name not in (rows.fieldnames or ())]:
            raise ValueError(f"{path} has no column {', '.join(missing)}; it has {', '.join(rows.fieldnames or ())}")
        columns = [tuple(row[name] for name in names) for row in rows]
    return [list(column) for column in zip(*columns, strict=True)] if columns else [[] for _ in names]


def _in_order(seconds: ArrayLike, prompts: ArrayLike, outputs: ArrayLike) -> Workload:
    """A workload sorted by time. Lengths of 0 become 1: the engine needs a token to begin, and always makes one."""
    times = np.asarray(seconds, dtype=np.float64)
    order = np.argsort(times, kind="stable")
    lengths = [np.maximum(np.asarray(column, dtype=np.int64), 1)[order] for column in (prompts, outputs)]
    return Workload(times[order], *lengths)
