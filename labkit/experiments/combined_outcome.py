"""What a measured ladder came to, in sentences: beside what was aimed at, and beside what was predicted."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

import pandas as pd

from .combined_report import ladder_table

Row = dict[str, Any]

_MODEL, _LIMIT = "llama-2-13b", 40  # what these were aimed at for
_LEAST_REQUESTS, _LEAST_SPEEDUP = 14, 8
_LEAST_LIVE, _NEAR_CONCURRENCY, _NEAR_SPEED = 0.98, 0.05, 0.2  # aimed at everywhere
_ROUGH_BELOW = 10.0  # seconds of a window
_ADDS_LITTLE = 1.05
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


def _sentences(ladder: list[Row], climbed: dict[Any, Row]) -> Iterator[str]:
    first, full, chat = (
        climbed[key] for key in (("full", "baseline"), ("full", "+ INT8 KV"), ("azure_conv", "+ INT8 KV"))
    )
    aimed = (first["model"], first["memory_limit_gib"]) == (_MODEL, _LIMIT)
    static = [row for row in ladder if row["scheduler"] == "static"]
    continuous = [row for row in ladder if row["scheduler"] == "continuous"]
    yield f"{_windows(continuous)} Static batches, counted whole, took {_seconds(static)} s."
    yield (
        f"From the baseline to INT8 KV: {full['concurrency_ratio']:.1f} times the requests at full length "
        f"({first['max_concurrency']:.0f} to {full['max_concurrency']:.0f}"
        + (f"; {_LEAST_REQUESTS} times were aimed at" if aimed else "")
        + f") and {full['speedup']:.1f} times the tokens/s; on lengths of conversations {chat['speedup']:.1f} times "
        + ("the tokens/s" + (f" ({_LEAST_SPEEDUP} times were aimed at)." if aimed else "."))
    )
    gqa = climbed.get(("azure_conv", "+ GQA"))
    if gqa and chat["tokens_per_second"] < _ADDS_LITTLE * gqa["tokens_per_second"]:
        gain, expected = (
            100 * (chat[figure] / gqa[figure] - 1) for figure in ("tokens_per_second", "predicted_tokens_per_second")
        )
        yield (
            f"INT8 adds only {gain:.0f} % to GQA's tokens/s on lengths of conversations (the simulator: {expected:.0f} "
            f"%): {chat['max_concurrency'] / gqa['max_concurrency']:.1f} times the requests, but the median ITL grows "
            f"from {1e3 * gqa['itl_p50_s']:.0f} to {1e3 * chat['itl_p50_s']:.0f} ms."
        )
        if gain < 100 * max(abs(row["drift"]) for row in continuous):
            yield "That gain is smaller than what the halves of these windows differ by."
    live = [100 * row["live_utilisation"] for row in continuous]
    low = [
        f"{_name(row)} with {100 * row['live_utilisation']:.1f}"
        for row in continuous
        if row["live_utilisation"] < _LEAST_LIVE
    ]
    yield (
        f"With blocks and continuous batching {min(live):.1f} to {max(live):.1f} % of the held slots are live. "
        f"{100 * _LEAST_LIVE:.0f} % were aimed at"
        + (f", and missed by {' and '.join(low)}." if low else ".")
        + " What is held and not live are prompts that are not computed yet and the empty ends of last blocks."
    )
    int4 = [row for row in ladder if row["kv_cache_dtype"] == "int4"]
    others = [row for row in ladder if row["kv_cache_dtype"] != "int4"]
    yield (
        f"Predicted against measured: requests at once {_errors(ladder, 'concurrency', 'max_concurrency')} (5 % were "
        f"aimed at{_missed(ladder, _NEAR_CONCURRENCY, 'concurrency', 'max_concurrency')}); tokens/s "
        f"{_errors(others, 'tokens_per_second')} in 16 bit and INT8, {_errors(int4, 'tokens_per_second')} with INT4 "
        f"(20 % were aimed at{_missed(ladder, _NEAR_SPEED, 'tokens_per_second')})."
    )
    far = [row for row in ladder if abs(_error(row, "itl_p99_s")) > _FAR]
    far_off = [
        f"{_name(row)} {1e3 * row['itl_p99_s']:.0f} ms instead of {1e3 * row['predicted_itl_p99_s']:.0f}" for row in far
    ]
    yield (
        "Predicted against measured, ITL p99: "
        + _errors([row for row in ladder if row not in far], "itl_p99_s")
        + (f"; far off only {' and '.join(far_off)}." if far_off else ".")
    )


def _records(table: pd.DataFrame) -> list[Any]:
    return table.to_dict("records")


def _name(row: Row) -> str:
    return f'"{row["rung"]}" ({row["lengths"]})'.replace(" ", _JOIN)


def _error(row: Row, figure: str, measured: str | None = None) -> float:
    return row[f"predicted_{figure}"] / row[measured or figure] - 1


def _errors(rows: Iterable[Row], figure: str, measured: str | None = None) -> str:
    errors = [round(100 * _error(row, figure, measured)) for row in rows]
    if not errors:
        return "not measured"
    low, high = (f"{error:+d}" if error else "0" for error in (min(errors), max(errors)))
    return f"{low} %" if low == high else f"{low} to {high} %"


def _missed(rows: Iterable[Row], near: float, figure: str, measured: str | None = None) -> str:
    misses = [
        f"{_name(row)}: {row[f'predicted_{figure}']:,.0f} predicted, {row[measured or figure]:,.0f} measured"
        for row in rows
        if abs(_error(row, figure, measured)) > near
    ]
    return f", and missed by {' and '.join(misses)}" if misses else ""


def _windows(continuous: list[Row]) -> str:
    """How long the windows are, and how far their halves are apart; short ones by themselves."""
    short = [row for row in continuous if row["window_s"] < _ROUGH_BELOW]
    long = [row for row in continuous if row not in short]
    parts = [
        f"{len(rows)} {kind}{_seconds(rows)} s, whose halves differ by "
        f"{100 * max(abs(row['drift']) for row in rows):.0f} %"
        for rows, kind in ((long, "of "), (short, "rough ones of "))
        if rows
    ]
    return f"Windows with continuous batching: {'; '.join(parts)} at most."


def _seconds(rows: Iterable[Row]) -> str:
    seconds = [int(row["window_s"]) for row in rows]
    low, high = min(seconds), max(seconds)
    return f"{low}" if low == high else f"{low} to {high}"
