"""`labkit bench kernels --tune`: measure candidate tiles on this GPU and print rows for the tables of tuning.py.

    python -m labkit.kernels.tune [--only decode]

Candidates compile in parallel first (Triton keeps them on disk), then every one is timed on a few regimes. Nothing is
changed by itself: a person copies the winners into tuning.py, so that the table stays one that somebody has read.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import torch
import triton

from .attention import AttentionLaunch, KernelCall, Workspace, device_limits
from .bench import GQA, MHA, MQA, SMOLLM2, Case, Heads
from .compile_report import example_call
from .measure import PagePool, batch_lengths, causal_flops, time_calls
from .tuning import DecodeTile, PrefillTile, decode_programs

DECODE_SHAPES = [(block_n, warps, stages) for block_n in (32, 64, 128) for warps in (1, 2, 4) for stages in (3, 5)]
PROGRAMS_PER_SM = (1, 2, 3, 4, 6, 8, 32)
FEW, MANY = ("1x4096", "8x4096", "1x32768"), ("64x4096", "256x512", "ragged128")
PREFILL_TILES = [
    PrefillTile(block_m, block_n, warps, stages, registers)
    for block_m, warps in ((64, 4), (128, 4), (128, 8))
    for block_n in (64, 128)
    for stages in (2, 3)
    for registers in (None, 128)
]


def _compile(job: tuple[str, int, Heads, DecodeTile | PrefillTile]) -> None:
    kind, capability, (num_q_heads, num_kv_heads, head_dim), tile = job
    call = example_call(kind, capability, (num_q_heads, num_kv_heads, head_dim, head_dim), tile)
    for lanes in (32, 256):
        try:
            constants = call.constants | {"SEQS": lanes}
            call.kernel.warmup(*call.arguments, grid=(1,), **constants, **call.options())
        except triton.runtime.errors.OutOfResources:
            return  # a tile too large for this GPU; timing it will say so


def _launches(case: Case) -> list[AttentionLaunch]:
    group = case.heads[0] // case.heads[1]
    padded = triton.next_power_of_2(case.heads[2])
    return [
        AttentionLaunch(
            case.q,
            case.kv,
            table,
            case.lens,
            case.starts,
            case.out,
            case.scale,
            None,
            None,
            None,
            group,
            padded,
            padded,
        )
        for table in case.tables
    ]


def _time(calls: list[KernelCall]) -> float:
    try:
        return time_calls([call.run for call in calls], 1.0, 3)
    except triton.runtime.errors.OutOfResources:
        return math.inf


def tune_decode(pool: PagePool, heads: Heads, show: Callable[[str], object]) -> None:
    """Print the best tiles for few and for many (sequence, KV head) pairs, by geometric mean over the batches."""
    num_sms = device_limits(torch.device("cuda", torch.cuda.current_device()))[1]
    block_m = max(16, triton.next_power_of_2(heads[0] // heads[1]))
    workspace = Workspace.allocate(heads[2], "cuda")
    for name, batches in (("few pairs", FEW), ("many pairs", MANY)):
        lens = [batch_lengths(batch) for batch in batches]
        launches = [_launches(Case(pool, heads, n, [1] * len(n))) for n in lens]
        results = []
        for shape in DECODE_SHAPES:
            for programs_per_sm in PROGRAMS_PER_SM:
                tile = DecodeTile(block_m, *shape, programs_per_sm, 128 if name == "few pairs" else 256)
                us = [_time([one.decode(tile, workspace, 1, num_sms) for one in many]) for many in launches]
                results.append((math.exp(sum(map(math.log, us)) / len(us)), tile, us))
        results.sort(key=lambda result: result[0])
        for mean, tile, us in results[:3]:
            pairs = [len(n) * heads[1] for n in lens]
            programs = [decode_programs(p, tile.programs_per_sm, num_sms) for p in pairs]
            times = ", ".join(f"{b} {t:.1f} µs ({w} programs)" for b, t, w in zip(batches, us, programs, strict=True))
            show(f"{heads} {name}: {tile}  mean {mean:.1f}  {times}")


def tune_prefill(pool: PagePool, heads: Heads, show: Callable[[str], object]) -> None:
    """Print the best prefill tiles on one 8192-token prompt."""
    launches = _launches(Case(pool, heads, [8192], [8192]))
    flops = causal_flops(heads[0], heads[2], heads[2], [8192], [8192])
    results = [(_time([one.prefill(tile, 16) for one in launches]), tile) for tile in PREFILL_TILES]
    for us, tile in sorted(results, key=lambda result: result[0])[:3]:
        show(f"{heads} prefill 1x8192: {tile}  {us:.0f} µs, {flops / us / 1e6:.0f} TFLOP/s")


def run(only: str | None = None, show: Callable[[str], object] = print) -> None:
    """Measure decode and prefill candidates on the current GPU. Raises RuntimeError without a CUDA device."""
    if not torch.cuda.is_available():
        raise RuntimeError("labkit bench kernels --tune needs a CUDA device")
    capability = device_limits(torch.device("cuda", torch.cuda.current_device()))[0]
    jobs: list[tuple[str, int, Heads, DecodeTile | PrefillTile]] = []
    for heads in (MHA, GQA, MQA, SMOLLM2):
        block_m = max(16, triton.next_power_of_2(heads[0] // heads[1]))
        jobs += [("decode", capability, heads, DecodeTile(block_m, *shape, 4, 256)) for shape in DECODE_SHAPES]
        jobs += [("prefill", capability, heads, replace(tile)) for tile in PREFILL_TILES]
    jobs = [job for job in jobs if only in (None, job[0])]
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as workers:
        list(workers.map(_compile, jobs))
    pool = PagePool.allocate(4.5)
    for heads in (MHA, GQA, MQA, SMOLLM2):
        if only in (None, "decode"):
            tune_decode(pool, heads, show)
        if only in (None, "prefill"):
            tune_prefill(pool, heads, show)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=["decode", "prefill"])
    run(parser.parse_args().only)
