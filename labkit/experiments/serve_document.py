"""The page docs/serving.md, from recorded results; a test holds the page to them.

python -m labkit.experiments.serve_document     rewrites the page
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from labkit.paths import data_path

WHOLE = "lognormal, 256 at once"
FIRST = f"{WHOLE}, first run on a fresh machine"
PAGE = Path(__file__).parents[2] / "docs" / "serving.md"

# tokens/s of others on the same 256 requests, each on one H200, measured 2026-12-01: the faster of two runs.
# vLLM 0.23.0 offline: FA3, torch.compile, CUDA graphs, async scheduling, prefix caching off, engine in process.
# transformers 5.17 continuous batching: FA3, CUDA graphs, async.
OTHERS = {
    "llama-2-7b": {"vLLM 0.23.0": 6231, "transformers 5.17 continuous batching, FA3": 4108},
    "llama-3-8b": {"vLLM 0.23.0": 7646, "transformers 5.17 continuous batching, FA3": 4752},
    "smollm2-135m": {"vLLM 0.23.0": 23689, "transformers 5.17 continuous batching, FA3": 11957},
}


def page(serve: dict[str, Any], engine: dict[str, Any]) -> str:
    """The whole page as Markdown."""
    source = serve["provenance"]
    versions = ", ".join(f"{name} {source[name]}" for name in ("driver", "torch", "triton", "transformers", "commit"))
    lines = [
        "# Serving and engine figures, recorded on one H200",
        "",
        f"Recorded {source['date']} on an {source['gpu']} ({versions}); random bf16 weights.",
        "Rows that name a commit are of that one. Regenerate with",
        "`labkit bench serve --shape llama-2-7b --out data/results/h200/serve.json`.",
        "",
        "256 requests at once, lognormal lengths, 43,368 prompt tokens and 55,994 forced output tokens, greedy; the",
        "clock includes prefill and excludes loading, warm-up and graph capture. The rows marked quoted ran the same",
        "requests on another machine of the same kind.",
        "",
        "| model shape | system | tokens/s | labkit ÷ it | TTFT p50 | inter-token p50 / p99 |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in _served(serve, WHOLE):
        own = row["tokens_per_second"]
        latency = f"{1e3 * row['itl_p50_s']:.1f} / {1e3 * row['itl_p99_s']:.1f} ms"
        system = f"labkit, commit {row['commit']}" if "commit" in row else "labkit"
        lines.append(f"| {row['model']} | {system} | **{own:,.0f}** | | {1e3 * row['ttft_p50_s']:.0f} ms | {latency} |")
        for system, rate in OTHERS[row["model"]].items():
            lines.append(f"| | {system} (quoted) | {rate:,} | {own / rate:.2f} × | not measured | not measured |")
    first_runs = ", ".join(f"{row['model']} {row['tokens_per_second']:,.0f}" for row in _served(serve, FIRST))
    lines += [
        "",
        "These are second runs in a process. The first ones, on a fresh machine with no kernels compiled, served (in",
        f"tokens/s): {first_runs}.",
        "",
        "On the same machine, what transformers offers with sdpa, on fewer requests. (On that of the quoted rows",
        "its continuous batching reached about 645 tokens/s at the smallest shape, with all 256.) What has no row did",
        "not end within its time limit; vLLM is not installed there: not measured.",
        "",
        "| model shape | requests | system | tokens/s | labkit ÷ it |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in serve["rows"]:
        if row["system"] == "labkit" or row["tokens_per_second"] is None:
            continue
        own = next(r for r in _served(serve, row["workload"]) if (r["model"], r["system"]) == (row["model"], "labkit"))
        rates = own["tokens_per_second"], row["tokens_per_second"]
        lines.append(f"| {row['model']} | {row['workload']} | labkit | {rates[0]:,.0f} | |")
        lines.append(f"| | | {row['system']} | {rates[1]:,.0f} | {rates[0] / rates[1]:.0f} × |")
    lines += [
        "",
        "## Where a decode step goes",
        "",
        "Medians; schedule, submit, update and rest are host work that runs while the GPU computes, wait is what is",
        "left to wait for the GPU; rest includes an output for each request and step. Over floor: step time over",
        f"(weights + KV bytes) ÷ the read ceiling of that run, {engine['provenance']['ceiling_gbps']:,.0f} GB/s.",
        "",
        "| model | batch × context | step | schedule | submit | wait | update | rest | over floor |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in _of(engine, "decode step"):
        parts = " | ".join(f"{row[f'{name}_ms']:.2f}" for name in ("schedule", "submit", "wait", "update", "rest"))
        shape = f"{row['batch']} × {row['context']}"
        over = f"{row['step_over_floor']:.2f} ×"
        lines.append(f"| {row['model']} | {shape} | {row['step_ms']:.2f} ms | {parts} | {over} |")
    lines += [
        "",
        "The gap between graphs, by the GPU's own clock: from the end of one replay to the start of the next it",
        "samples, copies tokens out and the next inputs in, and waits for the host if that is late.",
        "",
        "| model | batch × context | step | gap | share |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in _of(engine, "gap between graphs"):
        shape, share = f"{row['batch']} × {row['context']}", f"{100 * row['gap_share']:.1f} %"
        lines.append(f"| {row['model']} | {shape} | {row['step_ms']:.2f} ms | {row['gap_ms']:.3f} ms | {share} |")
    before = next(row for row in _of(engine, "start") if row["kernels"] == "compiled before")
    off, on = _of(engine, "prefix sharing")
    without, with_caching = _of(engine, "prefix caching, nothing shared")
    lines += [
        "",
        "## What features buy and cost",
        "",
        f"- Prefix sharing, {off['model']}, a system prompt of {off['shared_tokens']:,} tokens before",
        f"  {off['num_requests']} requests: TTFT p50 {off['ttft_p50_s']:.2f} s without, {on['ttft_p50_s']:.3f} s with",
        f"  the prefix cache, {off['ttft_p50_s'] / on['ttft_p50_s']:.1f} × better.",
        f"- Prefix caching when nothing is shared, {without['model']}: {without['tokens_per_second']:,.0f} tokens/s",
        f"  without, {with_caching['tokens_per_second']:,.0f} with.",
        f"- From a loaded model to its first token, kernels to compile: {_starts(engine, 'to compile')}; kernels",
        f"  compiled before (commit {before['commit']}): {_starts(engine, 'compiled before')}.",
    ]
    for row in _of(engine, "memory of graphs"):
        planned, used = row["planned_bytes"] / 1e6, row["device_bytes"] / 1e6
        lines.append(f"- CUDA graphs, {row['model']}: {planned:,.0f} MB were set aside, {used:,.0f} MB taken.")
    lines += [
        "  Since then as much is set aside as they took, and a little more; that plan was not measured again.",
        "",
        "Preemption on a pool of half the blocks that 64 requests need at their peak, tokens/s by the way that",
        "preempted requests come back. llama-3-8b ran right after its first run, and in this order, so that its",
        "recompute row may hold compilation:",
        "",
        "| model | blocks | recompute | swap | the cheaper by measured cost | of which swaps |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    preemptions = _of(engine, "preemption")
    for recompute, swap, chosen in zip(preemptions[::3], preemptions[1::3], preemptions[2::3], strict=True):
        rates = " | ".join(f"{row['tokens_per_second']:,.0f}" for row in (recompute, swap, chosen))
        swaps = f"{chosen['num_swaps']} of {chosen['num_preemptions']}"
        lines.append(f"| {recompute['model']} | {recompute['num_blocks']} | {rates} | {swaps} |")
    lines.append("")
    return "\n".join(lines)


def recorded() -> str:
    """The page for the results that ship."""
    serve, engine = (json.loads(data_path(f"results/h200/{name}.json").read_text()) for name in ("serve", "engine"))
    return page(serve, engine)


def _starts(engine: dict[str, Any], kernels: str) -> str:
    rows = [row for row in _of(engine, "start") if row["kernels"] == kernels]
    return ", ".join(f"{row['model']} {row['first_token_s']:.1f} s" for row in rows)


def _served(serve: dict[str, Any], workload: str) -> list[dict[str, Any]]:
    return [row for row in serve["rows"] if row["workload"] == workload]


def _of(results: dict[str, Any], op: str) -> list[dict[str, Any]]:
    return [row for row in results["rows"] if row["op"] == op]


if __name__ == "__main__":
    PAGE.write_text(recorded())
