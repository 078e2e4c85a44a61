"""`labkit bench kernels --tune`: time candidate tiles on this GPU beside the shipped ones of tuning.py.

    python -m labkit.kernels.tune [--only decode prefill] [--json tiles.json]

Candidates compile in parallel first (Triton keeps them on disk); those that spill or do not fit are left out. A
candidate and the shipped tile then take turns, so that a clock that drifts moves both: what counts is the median of
their ratios. Nothing is changed by itself: a person copies a winner into tuning.py.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import triton

from .attention import AttentionLaunch, KernelCall, device_limits, lanes_for
from .bench import GQA, MHA, MQA, SMOLLM2, Case, Heads
from .compile_report import example_call, resource_usage
from .measure import PagePool, Timer, batch_lengths, causal_flops, read_ceiling_gbps
from .result_file import provenance, write_results
from .tuning import DecodeTile, PrefillTile, decode_tile, prefill_tile

Tile = DecodeTile | PrefillTile
Job = tuple[str, int, Heads, int, Tile]  # kernel, compute capability, heads, lanes for the sequences, tile
Rows = list[dict[str, Any]]
DECODE_CASES = [
    *((GQA, batch) for batch in ("8x4096", "1x32768", "32x2048", "ragged128")),
    *((MHA, batch) for batch in ("ragged128", "1x32768", "32x2048", "64x4096")),
    (MQA, "64x4096"),
    (SMOLLM2, "64x4096"),
]
# block_m, block_n, num_warps, num_stages, max_registers; block_m 8: keys on the wide side (decode_quantised.py).
# Without a cap on registers ptxas sometimes spills to fit one more program.
SHAPES = {
    GQA: [
        (16, 128, 4, 4), (16, 128, 4, 5), (16, 64, 2, 3), (16, 64, 2, 4), (16, 64, 2, 5), (16, 64, 4, 5),
        (16, 64, 2, 7), (8, 64, 2, 5), (8, 128, 4, 5),
    ],
    MHA: [(16, 64, 2, 4), (16, 64, 2, 5), (16, 64, 2, 7), (16, 64, 4, 5), (16, 32, 2, 5), (8, 64, 2, 5)],
    MQA: [(32, 128, 4, 5), (32, 128, 4, 7), (32, 64, 4, 5), (32, 64, 4, 5, 224), (32, 64, 8, 5)],
    SMOLLM2: [(16, 32, 1, 5), (16, 64, 2, 5), (16, 64, 1, 5), (8, 32, 1, 5)],
}  # fmt: skip
ONE_A_PAIR = 32  # more programs than fit: one a pair (see tuning.decode_programs)
REGISTERS = 65_536  # of a multiprocessor, on every GPU of the table
SHARES = {  # what rows have beside microseconds, and in which words
    "percent_of_ceiling": "%",
    "tflops": "TFLOP/s",
    "ratio_to_bf16": "of bf16",
    "ratio_to_floor": "x floor",
}
PREFILL_TILES = [
    PrefillTile(128, block_n, 8, stages, registers)
    for block_n in (64, 128)
    for stages in (2, 3)
    for registers in (None, 128)
]


def shipped_decode(capability: int, num_sms: int, heads: Heads, batch: str) -> DecodeTile:
    pairs = len(batch_lengths(batch)) * heads[1]
    return decode_tile(capability, heads[0] // heads[1], heads[2], pairs / num_sms)


def decode_jobs(capability: int, num_sms: int, heads: Heads, batch: str) -> list[Job]:
    """The shipped tile and one of each shape; programs_per_sm, which no kernel is compiled for, is 1."""
    shipped = shipped_decode(capability, num_sms, heads, batch)
    tiles = [replace(shipped, programs_per_sm=1)]
    tiles += [DecodeTile(*shape[:4], 1, shipped.min_tokens, *shape[4:]) for shape in SHAPES[heads]]
    return [
        ("decode", capability, heads, lanes_for(len(batch_lengths(batch)), False), tile)
        for tile in dict.fromkeys(tiles)
    ]


def compile_job(job: Job) -> dict[str, int] | None:
    """Compile into Triton's cache; {registers, spill_bytes, shared_bytes}, None for a tile too large for this GPU."""
    kind, capability, (num_q_heads, num_kv_heads, head_dim), lanes, tile = job
    call = example_call(kind, capability, (num_q_heads, num_kv_heads, head_dim, head_dim), tile)
    try:
        constants = call.constants | {"SEQS": lanes}
        compiled = call.kernel.warmup(*call.arguments, grid=(1,), **constants, **call.options())
    except triton.runtime.errors.OutOfResources:
        return None
    return resource_usage(compiled.asm["cubin"]) | {"shared_bytes": compiled.metadata.shared}


def side_by_side(usage: dict[str, int] | None, num_warps: int, shared_bytes: int, may_spill: int = 0) -> int:
    """Programs that a multiprocessor with this much shared memory holds at once; 0 for those that spill more bytes."""
    if usage is None or usage["spill_bytes"] > may_spill:
        return 0
    of_a_thread = -(-usage["registers"] // 8) * 8
    by_registers = REGISTERS // (of_a_thread * 32 * num_warps)
    return min(by_registers, shared_bytes // (usage["shared_bytes"] + 1024))  # 1 KB of each is the driver's


def launches(case: Case) -> list[AttentionLaunch]:
    group, padded = case.heads[0] // case.heads[1], triton.next_power_of_2(case.heads[2])
    fixed = (case.lens, case.starts, case.out, case.scale, None, None, None, group, padded, padded)
    return [AttentionLaunch(case.q, case.kv, table, *fixed) for table in case.tables]


def take_turns(shipped: Timer, other: Timer, rounds: int = 5) -> tuple[float, float]:
    """(median microseconds of other, median of its ratio to shipped), one timed after the other in each round."""
    pairs = [(shipped.microseconds(), other.microseconds()) for _ in range(rounds)]
    return statistics.median(b for _, b in pairs), statistics.median(b / a for a, b in pairs)


def compare(case: Case, variants: list[tuple[Tile, list[KernelCall]]]) -> Rows:
    """A row a variant, {tile, programs, us, ratio, difference}; the first is the shipped one, which has ratio 1.

    difference: ||out - out of the shipped tile|| relative to it. Rounding explains 3e-3; more is a wrong kernel.
    """
    rows = []
    shipped, expected = None, None
    for tile, calls in variants:
        case.out.fill_(torch.nan)
        calls[0].run()
        got = case.out.double()
        expected = got if expected is None else expected
        timer = Timer([call.run for call in calls], 2.0)
        shipped = shipped or timer
        us, ratio = take_turns(shipped, timer)
        row = {"tile": asdict(tile), "programs": calls[0].grid[0], "us": round(us, 2), "ratio": round(ratio, 4)}
        rows.append(row | {"difference": round(float((got - expected).norm() / expected.norm()), 5)})
    return rows


def tune_decode(pool: PagePool, usage: dict[Job, dict[str, int] | None], ceiling: float) -> Iterator[Rows]:
    """The rows of one batch after the other; each shape with 1, 2, ... programs as fit, with more, and one a pair."""
    device = torch.device("cuda", torch.cuda.current_device())
    capability, num_sms = device_limits(device)
    shared_bytes = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
    for heads, batch in DECODE_CASES:
        lens = batch_lengths(batch)
        case = Case(pool, heads, lens, [1] * len(lens))
        many = launches(case)
        tiles = [shipped_decode(capability, num_sms, heads, batch)]
        for job in decode_jobs(capability, num_sms, heads, batch):
            fit = side_by_side(usage[job], job[4].num_warps, shared_bytes)
            counts = (*range(1, fit + 1), 2 * fit, 4 * fit, ONE_A_PAIR) if fit else ()
            tiles += [replace(job[4], programs_per_sm=count) for count in counts]
        variants = {}  # many choices of programs_per_sm come to the same number of programs
        for tile in tiles:
            calls = [one.decode(tile, case.workspace, 1, num_sms) for one in many]
            variants.setdefault((replace(tile, programs_per_sm=1), calls[0].grid), (tile, calls))
        yield [
            {"op": "decode", "heads": list(heads), "batch": batch} | row
            | {"percent_of_ceiling": round(case.kv_bytes() / row["us"] / 10 / ceiling, 2)}
            for row in compare(case, list(variants.values()))
        ]  # fmt: skip


def tune_prefill(pool: PagePool) -> Iterator[Rows]:
    """The rows of one 8192-token prompt, for grouped heads and for plain ones."""
    capability = device_limits(torch.device("cuda", torch.cuda.current_device()))[0]
    for heads in (GQA, MHA):
        case = Case(pool, heads, [8192], [8192])
        shipped = prefill_tile(capability, heads[0] // heads[1], heads[2])
        flops = causal_flops(heads[0], heads[2], heads[2], [8192], [8192])
        variants = [
            (tile, [one.prefill(tile, 16) for one in launches(case)])
            for tile in dict.fromkeys([shipped, *PREFILL_TILES])
        ]
        yield [
            {"op": "prefill", "heads": list(heads), "batch": "1x8192"} | row
            | {"tflops": round(flops / row["us"] / 1e6, 1)}
            for row in compare(case, variants)
        ]  # fmt: skip


def best(rows: Rows, count: int = 5) -> str:
    """The shipped tile and the fastest ones of a batch, as lines of text."""
    lines = [
        " ".join(str(rows[0][key]) for key in ("op", "heads", "batch", "kv_format", "block_size") if key in rows[0])
    ]
    for name, row in [("shipped", rows[0]), *(("", row) for row in sorted(rows, key=lambda r: r["ratio"])[:count])]:
        share = ", ".join(f"{row[key]:.4g} {unit}" for key, unit in SHARES.items() if key in row)
        wrong = "" if row["difference"] < 6e-3 else f"  WRONG by {row['difference']}"
        tile = " ".join(f"{key}={value}" for key, value in row["tile"].items())
        lines.append(
            f"  {name:8}{row['us']:8.2f} µs {share}  x {row['ratio']:.3f}  {row['programs']} programs  {tile}{wrong}"
        )
    return "\n".join(lines)


def run(only: list[str] | None = None, out: Path | None = None, show: Callable[[str], object] = print) -> None:
    """Measure candidates for "decode", "prefill" or both on the current GPU; `out` is written after each batch.

    "quantised" and "quantised-write" are tune_quantised.py's. Raises ValueError for another group, RuntimeError without
    a CUDA device.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("labkit bench kernels --tune needs a CUDA device")
    if only and any(group.startswith("quantised") for group in only):
        from . import tune_quantised

        tune_quantised.run(only, out, show)
        return
    groups = only or ["decode", "prefill"]
    if unknown := set(groups) - {"decode", "prefill"}:
        raise ValueError(f"unknown groups {sorted(unknown)}: choose from decode, prefill")
    capability, num_sms = device_limits(torch.device("cuda", torch.cuda.current_device()))
    jobs: list[Job] = []
    if "decode" in groups:
        jobs += [job for heads, batch in DECODE_CASES for job in decode_jobs(capability, num_sms, heads, batch)]
    if "prefill" in groups:
        lanes = lanes_for(1, True)
        jobs += [("prefill", capability, heads, lanes, tile) for heads in (GQA, MHA) for tile in PREFILL_TILES]
    jobs = list(dict.fromkeys(jobs))
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as workers:
        usage = dict(zip(jobs, workers.map(compile_job, jobs), strict=True))
    show(f"compiled {len(jobs)} tiles")
    pool = PagePool.allocate(4.5)
    ceiling = read_ceiling_gbps(pool)
    command = "python -m labkit.kernels.tune --only " + " ".join(groups)
    result: dict[str, Any] = {"provenance": provenance() | {"command": command}, "ceiling_gbps": round(ceiling, 1)}
    result["rows"] = []
    for name in groups:
        for rows in tune_decode(pool, usage, ceiling) if name == "decode" else tune_prefill(pool):
            result["rows"] += rows
            show(best(rows))
            if out is not None:
                write_results(out, result)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=["decode", "prefill"])
    parser.add_argument("--json", type=Path, help="write all rows here, after each batch")
    options = parser.parse_args()
    run(options.only, options.json)
