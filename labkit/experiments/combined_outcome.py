"""What a measured ladder came to, in sentences: beside what was aimed at, and beside what was predicted."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import Any

import pandas as pd

from .combined_report import ladder_table

Row = dict[str, Any]

_LEAST_REQUESTS, _LEAST_SPEEDUP, _LEAST_LIVE = 14, 8, 0.98  # that were aimed at
_NEEDED = {"window_s", "drift", "live_utilisation", "predicted_tokens_per_second", "predicted_itl_p99_s"}
_FAR = 0.5  # a prediction farther off than this share stands by itself
_JOIN = "\N{NO-BREAK SPACE}"  # where no line ends


def outcome_lines(rows: pd.DataFrame) -> list[str]:
    """A section for each model and cap whose baseline and INT8 rung were measured with both kinds of lengths."""
    lines: list[str] = []
    if not _NEEDED.issubset(rows.columns):
        return lines
    measured = rows.dropna(subset=["tokens_per_second"])
    for key, ladder in measured.groupby(["model", "memory_limit_gib"], sort=False):
        model, limit = key  # type: ignore[misc]
        climbed: dict[Any, Any] = {(row["lengths"], row["rung"]): row for row in _records(ladder_table(ladder))}
        if {(kind, rung) for kind in ("full", "azure_conv") for rung in ("baseline", "+ INT8 KV")} <= set(climbed):
            lines += [f"## What came of {model} in {limit:g} GiB", ""]
            for sentence in _sentences(_records(ladder), climbed):
                wrapped = textwrap.wrap(f"- {sentence}", 118, subsequent_indent="  ", break_on_hyphens=False)
                lines += [line.replace(_JOIN, " ") for line in wrapped]
            lines.append("")
    return lines


def _sentences(ladder: list[Row], climbed: dict[Any, Row]) -> list[str]:
    first, full, chat = (
        climbed[key] for key in (("full", "baseline"), ("full", "+ INT8 KV"), ("azure_conv", "+ INT8 KV"))
    )
    continuous = [row for row in ladder if row["scheduler"] == "continuous"]
    live = [100 * row["live_utilisation"] for row in continuous]
    low = [
        f"{_name(row)} with {100 * row['live_utilisation']:.1f}"
        for row in continuous
        if row["live_utilisation"] < _LEAST_LIVE
    ]
    int4 = [row for row in ladder if row["kv_cache_dtype"] == "int4"]
    others = [row for row in ladder if row["kv_cache_dtype"] != "int4"]
    far = [row for row in ladder if abs(_error(row, "itl_p99_s")) > _FAR]
    far_off = [
        f"{_name(row)} {1e3 * row['itl_p99_s']:.0f} ms instead of {1e3 * row['predicted_itl_p99_s']:.0f}" for row in far
    ]
    return [
        f"Windows of {int(min(row['window_s'] for row in ladder))} s or more; with continuous batching their halves "
        f"differ by {100 * max(abs(row['drift']) for row in continuous):.0f} % at most.",
        f"From the baseline to INT8 KV: {full['concurrency_ratio']:.1f} times the requests at full length "
        f"({first['max_concurrency']:.0f} to {full['max_concurrency']:.0f}; {_LEAST_REQUESTS} times were aimed at) and "
        f"{full['speedup']:.1f} times the tokens/s; on lengths of conversations {chat['speedup']:.1f} times the "
        f"tokens/s ({_LEAST_SPEEDUP} times were aimed at).",
        f"With blocks and continuous batching {min(live):.1f} to {max(live):.1f} % of the held slots are live. "
        f"{100 * _LEAST_LIVE:.0f} % were aimed at" + (f", and missed by {' and '.join(low)}." if low else "."),
        f"Predicted against measured: requests at once {_errors(ladder, 'concurrency', 'max_concurrency')} (5 % were "
        f"aimed at); tokens/s {_errors(others, 'tokens_per_second')} in 16 bit and INT8, "
        f"{_errors(int4, 'tokens_per_second')} with INT4 (20 % were aimed at).",
        "Predicted against measured, ITL p99: "
        + _errors([row for row in ladder if row not in far], "itl_p99_s")
        + (f"; far off only {' and '.join(far_off)}." if far_off else "."),
    ]


def _records(table: pd.DataFrame) -> list[Any]:
    return table.to_dict("records")


def _name(row: Row) -> str:
    return f'"{row["rung"]}" ({row["lengths"]})'.replace(" ", _JOIN)


def _error(row: Row, figure: str, measured: str | None = None) -> float:
    return row[f"predicted_{figure}"] / row[measured or figure] - 1


def _errors(rows: Iterable[Row], figure: str, measured: str | None = None) -> str:
    errors = [100 * _error(row, figure, measured) for row in rows]
    return f"{min(errors):+.0f} to {max(errors):+.0f} %" if errors else "not measured"
