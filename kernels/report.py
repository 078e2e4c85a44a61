"""Write the tables of README.md from the recorded measurements: `python -m labkit.kernels.report`.

Each table stands between two HTML comments, `<!-- name -->` and `<!-- /name -->`; the rest is written by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

README = Path(__file__).parent / "README.md"
RESULTS = Path(__file__).parent.parent / "data" / "results" / "h200"
Rows = list[dict[str, Any]]


def _table(header: list[str], lines: list[list[object]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows)


def _heads(row: dict[str, Any]) -> str:
    return "/".join(str(n) for n in row["heads"])


def provenance(result: dict[str, Any]) -> str:
    p = result["provenance"]
    return (
        f"Recorded {p['date']} on one {p['gpu']}, driver {p['driver']}, torch {p['torch']}, Triton {p['triton']}, "
        f"commit {p['commit']}, `{p['command']}`. Read ceiling in the same run {result['ceiling_gbps']:.0f} GB/s"
        + (f", bf16 matmul {result['matmul_tflops']:.0f} TFLOP/s." if "matmul_tflops" in result else ".")
    )


def decode_table(rows: Rows) -> str:
    def find(system: str, like: dict[str, Any]) -> str:
        for row in rows:
            if (row["op"], row["system"], row["heads"], row["batch"]) == (
                "decode",
                system,
                like["heads"],
                like["batch"],
            ):
                return f"{row['us']:.1f} ({row['percent_of_ceiling']:.0f})"
        return "–"

    ours = [r for r in rows if r["op"] == "decode" and r["system"] == "labkit" and r["block_size"] == 16]
    header = ["heads q/kv/dim", "batch", "labkit µs (% of ceiling)", "SDPA cuDNN, contiguous", "SDPA flash", "error"]
    return _table(
        header,
        [
            [
                _heads(r),
                r["batch"],
                find("labkit", r),
                find("sdpa cudnn", r),
                find("sdpa flash", r),
                f"{r['error']:.1e}",
            ]
            for r in ours
        ],
    )


def block_size_table(rows: Rows) -> str:
    chosen = [r for r in rows if r["op"] == "decode" and r["system"] == "labkit" and r["batch"] == "32x2048"]
    sizes = sorted({r["block_size"] for r in chosen})
    lines = []
    for heads in ([32, 32, 128], [32, 8, 128]):
        by_size = {r["block_size"]: r["us"] for r in chosen if r["heads"] == heads}
        lines.append(["/".join(map(str, heads)), *(f"{by_size[n]:.1f}" for n in sizes)])
    return _table(["32x2048, µs", *(f"block {n}" for n in sizes)], lines)


def prefill_table(rows: Rows) -> str:
    chosen = [r for r in rows if r["op"] == "prefill"]
    lines = []
    for row in (r for r in chosen if r["system"] == "labkit"):
        same = {r["system"]: r["tflops"] for r in chosen if (r["heads"], r["batch"]) == (row["heads"], row["batch"])}
        peers = [f"{same[name]:.0f}" if name in same else "–" for name in ("sdpa cudnn", "sdpa flash")]
        lines.append([_heads(row), row["batch"], f"{row['tflops']:.0f}", *peers])
    return _table(["heads", "batch", "labkit TFLOP/s", "SDPA cuDNN, contiguous", "SDPA flash"], lines)


def other_table(rows: Rows) -> str:
    lines = []
    for row in rows:
        if row["op"] in ("mixed", "write", "swap"):
            more = (
                f"{row['ratio_to_sum_alone']:.2f} x the sum of both alone"
                if row["op"] == "mixed"
                else f"{row['gbps']:.0f} GB/s"
            )
            lines.append([row["op"], _heads(row), row["batch"], f"{row['us']:.1f}", more])
    return _table(["op", "heads", "batch", "µs", ""], lines)


def steps_table(rows: Rows) -> str:
    chosen = [r for r in rows if r["op"] == "step"]
    cases = list(dict.fromkeys((_heads(r), r["batch"]) for r in chosen))
    names = list(dict.fromkeys(r["system"] for r in chosen))
    us = {(_heads(r), r["batch"], r["system"]): r["us"] for r in chosen}
    lines = [[name, *(f"{us[(*case, name)]:.0f}" for case in cases)] for name in names]
    return _table(["step, µs", *(f"{heads} {batch}" for heads, batch in cases)], lines)


def quantised_table(rows: Rows) -> str:
    lines = [
        [
            _heads(row), row["batch"], row["kv_format"], row["block_size"], f"{row['us']:.1f}",
            f"{row['percent_of_ceiling']:.0f}", f"{row['ratio_to_bf16']:.2f}",
            f"{row['error']:.1e}" if "error" in row else "–",
        ]
        for row in rows
        if row["op"] == "decode"
    ]  # fmt: skip
    return _table(["heads", "batch", "KV format", "block size", "µs", "% of ceiling", "of bf16", "error"], lines)


def quantised_rest_table(rows: Rows) -> str:
    lines = []
    for row in rows:
        if row["op"] == "write":
            figure = f"{row['ratio_to_floor']:.2f} x its bytes at the ceiling"
        elif row["op"] == "prefill":
            figure = f"{row['tflops']:.0f} TFLOP/s, {row['ratio_to_bf16']:.2f} x the time of bf16"
        else:
            continue
        lines.append([row["op"], _heads(row), row["batch"], row["kv_format"], f"{row['us']:.1f}", figure])
    return _table(["op", "heads", "batch", "KV format", "µs", ""], lines)


def compile_table(rows: Rows) -> str:
    lines = []
    for row in rows:
        if "tile" not in row:  # the write kernel, whose program covers tokens and heads
            continue
        tile = row["tile"]
        shape = f"{tile['block_m']} x {tile['block_n']}, {tile['num_warps']} warps"
        line = [
            row["kernel"],
            _heads(row),
            row.get("kv_format", "bf16"),
            shape,
            row["registers"],
            row["spill_bytes"],
            row["shared_bytes"],
        ]
        if line not in lines:
            lines.append(line)
    return _table(["kernel", "heads", "KV", "tile", "registers", "spilled bytes", "shared bytes"], lines)


def fill(text: str, name: str, content: str) -> str:
    """Replace what stands between `<!-- name -->` and `<!-- /name -->`. Raises ValueError without these marks."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"README.md has no <!-- {name} --> ... <!-- /{name} -->")
    return pattern.sub(lambda found: found[1] + content + "\n" + found[2], text)


def render(text: str) -> str:
    """README.md with its tables made anew from data/results."""
    result = json.loads((RESULTS / "kernels.json").read_text())
    compiled = json.loads((RESULTS.parent / "kernels_compile.json").read_text())
    tables: dict[str, Callable[[Rows], str]] = {
        "decode": decode_table, "block sizes": block_size_table, "prefill": prefill_table,
        "other": other_table, "steps": steps_table,
    }  # fmt: skip
    text = fill(text, "provenance", provenance(result))
    for name, make in tables.items():
        text = fill(text, name, make(result["rows"]))
    quantised = json.loads((RESULTS / "quant.json").read_text())
    text = fill(text, "provenance of quantised", provenance(quantised))
    text = fill(text, "quantised", quantised_table(quantised["rows"]))
    text = fill(text, "quantised rest", quantised_rest_table(quantised["rows"]))
    return fill(text, "compile", compile_table([row for row in compiled["rows"] if row["sm"] == 90]))


if __name__ == "__main__":
    README.write_text(render(README.read_text()))
