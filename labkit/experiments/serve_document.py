"""The page docs/serving.md, from recorded results; a test holds the page to them.

python -m labkit.experiments.serve_document     rewrites the page
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from labkit.paths import data_path

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
        f"The read ceiling in that run was {source['ceiling_gbps']:,.0f} GB/s. Regenerate with",
        "`labkit bench serve --shape llama-2-7b --out data/results/h200/serve.json`.",
        "",
        "256 requests at once, lognormal lengths, 43,368 prompt tokens and 55,994 forced output tokens, greedy; the",
        "clock includes prefill and excludes loading, warm-up and graph capture. Other systems ran the same requests",
        "on another machine of the same kind and were not run again beside labkit: their rows are quoted.",
        "",
        "| model shape | system | tokens/s | labkit ÷ it | TTFT p50 | inter-token p50 / p99 |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in serve["rows"]:
        own = row["tokens_per_second"]
        latency = f"{1e3 * row['itl_p50_s']:.1f} / {1e3 * row['itl_p99_s']:.1f} ms"
        lines.append(f"| {row['model']} | labkit | **{own:,.0f}** | | {1e3 * row['ttft_p50_s']:.0f} ms | {latency} |")
        for system, rate in OTHERS[row["model"]].items():
            lines.append(f"| | {system} (quoted) | {rate:,} | {own / rate:.2f} × | not measured | not measured |")
    lines += [
        "",
        "## Where a decode step goes",
        "",
        "Medians; schedule, submit, update and rest are host work that runs while the GPU computes, wait is what is",
        "left to wait for the GPU. Over floor: step time over (weights + KV bytes) ÷ read ceiling.",
        "",
        "| model | batch × context | step | schedule | submit | wait | update | rest | over floor |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in _of(engine, "decode step"):
        parts = " | ".join(f"{row[f'{name}_ms']:.2f}" for name in ("schedule", "submit", "wait", "update", "rest"))
        shape = f"{row['batch']} × {row['context']}"
        over = f"{row['step_over_floor']:.2f} ×"
        lines.append(f"| {row['model']} | {shape} | {row['step_ms']:.2f} ms | {parts} | {over} |")
    off, on = _of(engine, "prefix sharing")
    without, with_caching = _of(engine, "prefix caching, nothing shared")
    recompute, swap = _of(engine, "preemption")
    starts = ", ".join(f"{row['model']} {row['first_token_s']:.1f} s" for row in _of(engine, "start"))
    lines += [
        "",
        "## What features buy and cost",
        "",
        f"- Prefix sharing, {off['model']}, a system prompt of {off['shared_tokens']:,} tokens before",
        f"  {off['num_requests']} requests: TTFT p50 {off['ttft_p50_s']:.2f} s without, {on['ttft_p50_s']:.3f} s with",
        f"  the prefix cache, {off['ttft_p50_s'] / on['ttft_p50_s']:.1f} × better.",
        f"- Prefix caching when nothing is shared, {without['model']}: {without['tokens_per_second']:,.0f} tokens/s",
        f"  without, {with_caching['tokens_per_second']:,.0f} with.",
        f"- Preemption on a pool of half the need ({recompute['num_blocks']} blocks), {recompute['model']}: recompute",
        f"  {recompute['tokens_per_second']:,.0f} tokens/s, swap where the measured cost model finds it cheaper",
        f"  {swap['tokens_per_second']:,.0f}.",
        f"- From a loaded model to its first token, kernels compiled before: {starts}.",
        "",
    ]
    return "\n".join(lines)


def recorded() -> str:
    """The page for the results that ship."""
    serve, engine = (json.loads(data_path(f"results/h200/{name}.json").read_text()) for name in ("serve", "engine"))
    return page(serve, engine)


def _of(results: dict[str, Any], op: str) -> list[dict[str, Any]]:
    return [row for row in results["rows"] if row["op"] == op]


if __name__ == "__main__":
    PAGE.write_text(recorded())
