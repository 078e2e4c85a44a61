"""The page docs/combined.md, from recorded results; a test holds the page to them.

python -m labkit.experiments.combined_document     rewrites the page
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd

from .combined_outcome import outcome_lines
from .combined_report import effects, ladder_table
from .recorded import results

PAGE = Path(__file__).parents[2] / "docs" / "combined.md"
FILE = "h200/combined.json"

_INTRODUCTION = """\
# Paging, continuous batching, GQA and fewer bits, one on top of the other

Each rung fills the same memory with as many requests as fit and serves them in a steady state; it keeps what the rung
before it has (INT4 takes the place of INT8). `labkit experiment combined` runs the ladder on any machine, and
`labkit.experiments.combined_ladder.combined` is the function.

- **Shapes** of Llama-2 with random bf16 weights, enough for memory and speed and nothing else. Without GQA there is one
  KV head for each query head, with it there are 8: a model of that kind has to be trained, it is no switch.
- **Memory** is capped (`memory_limit`); the engine uses 0.9 of the cap for weights, activations, CUDA graphs and pool.
- **Lengths**: *full* are prompts of 3,584 tokens and outputs of 512, so that each request ends at 4,096;
  *azure_conv* are those of the Azure conversation trace 2023 (mean 1,366 tokens), prompt and output independent, longer
  ones cut to 4,096. The queue never runs dry.
- **Steady state**: the same scheduler and allocator first step with an executor that computes nothing, from requests
  met under way (long outputs more often, each somewhere in the middle) until as many have left. Then the model takes
  over in the middle. K and V are noise until then, which changes no time. After a second that does not count the window
  begins; static batches are counted whole, from the first. Tokens/s are generated tokens over wall time, prefill of
  newcomers included.
- **Windows** have their seconds in the file (`window_s`), and under `drift` how much faster or slower their second half
  is; where the halves of continuous batching differ by more than a quarter, the tokens/s have a *~* before them, and
  what is derived from them is as rough.
- **At once**: requests in memory, averaged over the window; of static batches, how large they begin. *Predicted* is
  `plan_capacity`'s pool divided by what a request holds on average while it runs
  (`labkit.experiments.combined_capacity`), and for tokens/s the simulator over as long a window, calibrated on earlier
  results. Static batches with blocks stay a request or two below that: whoever was preempted comes back with what it
  had generated, and needs more. The simulator preempts too: in the measured pool its batches have the measured size.
- **Quantised rungs**: at first the simulator counted bytes alone, and what it said before anything here ran was up to
  23 % above INT4 and 12 % above INT8. What is shown is with the slowdown of attention over codes that the kernels'
  benchmark had measured by then: INT8 1.17 to 1.20 times a byte and 1.56 to 1.60 times a FLOP, INT4 2.02 to 2.07 and
  2.04 to 2.10 (docs/simulation.md has what it measured last). No constant is fitted to runs of this page.
- **Claims** of the article are for Llama-2-13B on an A100-40GB.
- **Live** is the share of the slots held by requests that hold a computed token.
"""


_COLUMNS = ("rung", "at once", "predicted", "claim", "GiB a request", "saved", "claim", "live", "tokens/s", "predicted")
_COLUMNS += ("×", "claim", "ITL p99")
_MOST_DRIFT = 0.25
_PREDICTED = ("rung", "at once, predicted", "tokens/s, predicted")


def page(document: dict[str, Any]) -> str:
    """The whole page as Markdown."""
    rows = pd.DataFrame(document["rows"])
    source = document.get("provenance")
    lines = [_INTRODUCTION]
    if source is None:
        lines.append("Nothing has been measured yet: the figures below are predictions.\n")
    else:
        versions = ", ".join(f"{name} {source[name]}" for name in ("torch", "triton", "transformers", "commit"))
        lines.append(f"Recorded {source['date']} on an {source['gpu']} ({versions}): `data/results/{FILE}`.\n")
    for key, ladder in ladder_table(rows).groupby(["model", "memory_limit_gib", "lengths"], sort=False):
        model, limit, lengths = key  # type: ignore[misc]
        measured = any(_is_number(row["tokens_per_second"]) for row in _records(ladder))
        columns, line = (_COLUMNS, _ladder_line) if measured else (_PREDICTED, _predicted_line)
        lines += [
            f"## {model}, {limit:g} GiB, {lengths} lengths" + ("" if measured else ": predicted only"),
            "",
            f"| {' | '.join(columns)} |",
            "| --- " * len(columns) + "|",
            *(line(row) for row in _records(ladder)),
            "",
        ]
        lines += [f"{row['rung']}: not measured: {row['not_measured']}\n" for row in _records(ladder) if _why(row)]
    lines += outcome_lines(rows) + _effect_lines(effects(rows)) + _equal_batch_lines(document.get("equal_batch", []))
    return "\n".join(lines)


def _ladder_line(row: dict[str, Any]) -> str:
    size = row["bytes_per_request"] / 2**30 if _is_number(row["bytes_per_request"]) else math.nan
    latency = 1e3 * row["itl_p99_s"] if _is_number(row["itl_p99_s"]) else math.nan
    cells = [
        row["rung"],
        _shown(row["max_concurrency"], ".0f"),
        _shown(row["predicted_concurrency"], ".0f"),
        _shown(row["claimed_concurrency"], ".0f"),
        _shown(size, ".3f"),
        _shown(row["saving"], ".0%"),
        _shown(row["claimed_saving"], ".0%"),
        _shown(row["live_utilisation"], ".1%"),
        ("~ " if _is_unsteady(row) else "") + _shown(row["tokens_per_second"], ",.0f"),
        _shown(row["predicted_tokens_per_second"], ",.0f"),
        _shown(row["speedup"], ".1f"),
        _shown(row["claimed_speedup"], ".1f"),
        _shown(latency, ".0f") + (" ms" if _is_number(latency) else ""),
    ]
    return f"| {' | '.join(cells)} |"


def _is_unsteady(row: dict[str, Any]) -> bool:
    """Whether the halves of the window differ much; those of static batches do by nature, as requests end."""
    drift = row["drift"]
    return row["scheduler"] != "static" and _is_number(drift) and abs(drift) > _MOST_DRIFT


def _predicted_line(row: dict[str, Any]) -> str:
    at_once = _shown(row["predicted_concurrency"], ".0f")
    return f"| {row['rung']} | {at_once} | {_shown(row['predicted_tokens_per_second'], ',.0f')} |"


def _effect_lines(table: pd.DataFrame) -> list[str]:
    if table.empty:
        return []
    lines = [
        "## Which effects multiply",
        "",
        "By how much each effect multiplies, given what is there already. An effect that multiplies with the others",
        "has the same factor whatever it joins. For requests at once that is so, within 3 % for the 7B in 40 GiB, and",
        "within 14 % for the 13B, whose baseline of three requests is coarse. For tokens/s it is not: the more",
        "requests share a step, the less it is memory that limits them.",
        "",
        "| model, cap, lengths | effect | given | at once × | tokens/s × |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in _records(table):
        cap = f"{row['model']}, {row['memory_limit_gib']:g} GiB, {row['lengths']}"
        factors = f"{row['concurrency']:.2f} | {row['tokens_per_second']:.2f}"
        lines.append(f"| {cap} | {row['effect']} | {row['given']} | {factors} |")
    return [*lines, ""]


def _equal_batch_lines(rows: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return []
    lines = ["## Fewer bits at equal batch", "", "| model | KV heads | KV cache | batch × context | step |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for row in rows:
        step = f"{row['step_ms']:.2f} ms" if "step_ms" in row else f"not measured: {row['not_measured']}"
        name = "bf16" if row["kv_cache_dtype"] == "auto" else row["kv_cache_dtype"]
        lines.append(
            f"| {row['model']} | {row['num_kv_heads']} | {name} | {row['batch']} × {row['context']:,} | {step} |"
        )
    return [*lines, ""]


def _records(table: pd.DataFrame) -> list[Any]:
    return table.to_dict("records")


def _why(row: dict[str, Any]) -> bool:
    return isinstance(row["not_measured"], str)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not math.isnan(value)


def _shown(value: Any, form: str) -> str:
    return format(value, form) if _is_number(value) else ""


if __name__ == "__main__":
    PAGE.write_text(page(results(FILE)))
