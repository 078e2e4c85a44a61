"""The same as tune.py for quantised pages: decode tiles and write tiles beside the shipped ones.

    python -m labkit.kernels.tune_quantised [--only quantised quantised-write] [--json tiles.json]

About a minute on an H200. Decode rows also say what share of the time of bf16 they take, write rows how many times
their bytes at the read ceiling.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import triton

from . import tune
from .attention import AttentionLaunch, decode_tile_for, device_limits, lanes_for
from .bench import GQA, MHA, Case, Heads
from .bench_quantised import QuantisedCase
from .bench_write import BATCHES, HEADS, bytes_moved, new_pages, write_batch
from .compile_report import KV_FORMATS, example_call, example_pages, example_write, resource_usage
from .measure import PagePool, Timer, batch_lengths, read_ceiling_gbps
from .pages import KVPages, QuantisedKVPages
from .result_file import provenance, write_results
from .rope import launch_options
from .tuning import QUANTISED_WRITE, DecodeTile, WriteTile
from .write_quantised import write_launch, write_quantised_kv_kernel

GROUPS = ("quantised", "quantised-write")
BATCH = "64x4096"
DECODE_CASES = [  # heads, KV format, block size
    (MHA, "fp8", 32), (MHA, "fp8", 16), (MHA, "int8", 32), (MHA, "int4", 32),
    (GQA, "fp8", 32), (GQA, "int8", 32), (GQA, "int4", 32),
]  # fmt: skip
# block_n, num_stages, max_registers, all of one warp. A smaller tile needs fewer registers, so that more programs share
# a multiprocessor and one's chain of loads, products and exponentials hides behind the others'; it spends a third more
# instructions on a key.
SHAPES = {
    "8 bit": [(16, 3, 144), (16, 3, 128), (16, 4, 168), (32, 2, 168), (32, 3, 224)],
    "int4": [(16, 3, 144), (16, 3, 168), (16, 2, 128), (32, 2, 168), (32, 2, 184), (32, 3, 184)],
}
# Bytes that a candidate may spill: values of a whole pair of sequence and head, outside the loop over its tiles.
SPILLED = 128
# Tiles that quantise tokens alone, and those that also quantise blocks.
TOKEN_TILES = [
    replace(QUANTISED_WRITE, token_numbers=numbers, num_warps=warps)
    for numbers, warps in ((1024, 1), (2048, 1), (2048, 2), (2048, 4), (4096, 2), (4096, 4), (4096, 8))
]
BLOCK_TILES = [
    WriteTile(numbers, QUANTISED_WRITE.num_warps, *block)
    for numbers, block in (
        (4096, (128, 2, 144)), (4096, (128, 4, 168)), (2048, (64, 2, 80)), (4096, (64, 2, 96)),  # one part
        *((2048, (64, 2, registers, 2)) for registers in (72, 80, 88)), (1024, (64, 2, 80, 2)), (4096, (64, 2, 96, 2)),
        *((2048, (64, 4, registers, 2)) for registers in (80, 88, 96)), (1024, (64, 4, 80, 2)),
        *((1024, (32, 2, registers, 4)) for registers in (56, 64, 72)), (2048, (32, 2, 64, 4)),
        *((1024, (32, 4, registers, 4)) for registers in (72, 80)),
    )
]  # fmt: skip
Job = tuple[Heads, str, int, DecodeTile | WriteTile]  # heads, KV format, block size, tile


def write_tiles(kv_format: str) -> list[WriteTile]:
    return list(dict.fromkeys([QUANTISED_WRITE, *(BLOCK_TILES if kv_format == "int4" else TOKEN_TILES)]))


def decode_shapes(kv_format: str, shipped: DecodeTile) -> list[DecodeTile]:
    """The shipped tile, then the others; programs_per_sm, which no kernel is compiled for, is 1."""
    others = [
        replace(shipped, block_n=block_n, num_warps=1, num_stages=stages, programs_per_sm=1, max_registers=registers)
        for block_n, stages, registers in SHAPES["int4" if kv_format == "int4" else "8 bit"]
    ]
    return [replace(shipped, programs_per_sm=1), *others]


def compile_job(job: Job) -> dict[str, int] | None:
    """Compile into Triton's cache; {registers, spill_bytes, shared_bytes}, None for a tile too large for this GPU."""
    (num_q_heads, num_kv_heads, head_dim), kv_format, block_size, tile = job
    device = torch.device("cuda", torch.cuda.current_device())
    if isinstance(tile, DecodeTile):
        shape = (num_q_heads, num_kv_heads, head_dim, head_dim)
        call = example_call("decode", device_limits(device)[0], shape, tile, block_size=block_size, kv_format=kv_format)
        lanes = {"SEQS": lanes_for(len(batch_lengths(BATCH)), False)}
        kernel, arguments, constants, options = call.kernel, call.arguments, call.constants | lanes, call.options()
    else:
        kernel, arguments, constants, options = example_write(kv_format, tile)
        options |= launch_options(device)
    try:
        compiled = kernel.warmup(*arguments, grid=(1,), **constants, **options)
    except triton.runtime.errors.OutOfResources:
        return None
    return resource_usage(compiled.asm["cubin"]) | {"shared_bytes": compiled.metadata.shared}


def shipped_tile(kv: KVPages | QuantisedKVPages, heads: Heads) -> DecodeTile:
    capability = device_limits(torch.device("cuda", torch.cuda.current_device()))[0]
    return decode_tile_for(kv, capability, heads[0] // heads[1], heads[2], 0, 2)


def launches(case: QuantisedCase) -> list[AttentionLaunch]:
    group, dim = case.q.shape[1] // case.kv.num_kv_heads, triton.next_power_of_2(case.q.shape[2])
    fixed = (case.lens, case.starts, case.out, case.scale, None, None, None, group, dim, dim, case.tail_rows)
    return [AttentionLaunch(case.q, case.kv, table, *fixed) for table in case.tables]


def tune_decode(usage: dict[Job, dict[str, int] | None], ceiling: float) -> Iterator[tune.Rows]:
    """The rows of one case after the other; each shape with as many programs as fit, and with fewer."""
    device = torch.device("cuda", torch.cuda.current_device())
    num_sms = device_limits(device)[1]
    shared_bytes = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
    lens = batch_lengths(BATCH)
    pool = PagePool.allocate(4.5)
    bf16 = {heads: Case(pool, heads, lens, [1] * len(lens)).time() for heads in (MHA, GQA)}
    del pool
    for heads, kv_format, block_size in DECODE_CASES:
        case = QuantisedCase(kv_format, heads, lens, block_size)
        shipped = shipped_tile(case.kv, heads)
        many = launches(case)
        tiles = [shipped]
        for tile in decode_shapes(kv_format, shipped):
            fit = tune.side_by_side(usage[heads, kv_format, block_size, tile], tile.num_warps, shared_bytes, SPILLED)
            tiles += [replace(tile, programs_per_sm=n) for n in dict.fromkeys((fit, fit - 1, fit * 3 // 4)) if n > 0]
        variants = [
            (tile, [one.decode(tile, case.workspace, 1, num_sms) for one in many]) for tile in dict.fromkeys(tiles)
        ]
        yield [
            {"op": "decode", "heads": list(heads), "batch": BATCH, "kv_format": kv_format, "block_size": block_size}
            | row | {"percent_of_ceiling": round(case.kv_bytes() / row["us"] / 10 / ceiling, 2)}
            | {"ratio_to_bf16": round(row["us"] / bf16[heads], 4)}
            for row in tune.compare(case, variants)
        ]  # fmt: skip


def tune_write(ceiling: float, copies: int = 8) -> Iterator[tune.Rows]:
    """The rows of one format and batch after the other. difference: share of stored bytes that differ."""
    early = launch_options(torch.device("cuda", torch.cuda.current_device()))
    for kv_format in KV_FORMATS:
        kv = new_pages(kv_format, copies * 8192)
        order = torch.randperm(kv.k.codes.shape[0], device="cuda").chunk(copies)
        for batch, (num_seqs, query_len) in list(BATCHES.items())[:2]:
            inputs = [write_batch(kv, blocks, num_seqs, query_len) for blocks in order]
            floor = bytes_moved(kv, num_seqs * query_len) / ceiling / 1e3
            rows: tune.Rows = []
            shipped, expected = None, None
            for tile in write_tiles(kv_format):
                calls = []
                for one in inputs:
                    grid, arguments, constants, options = write_launch(**one, tile=tile)
                    kernel = write_quantised_kv_kernel[grid]
                    calls.append(functools.partial(kernel, *arguments, **constants, **options, **early))
                for tensor in kv.tensors:
                    tensor.view(torch.uint8).fill_(255)
                calls[0]()
                got = torch.cat([tensor.view(torch.uint8).flatten() for tensor in kv.tensors])
                expected = got if expected is None else expected
                timer = Timer(calls, 2.0)
                shipped = shipped or timer
                us, ratio = tune.take_turns(shipped, timer)
                rows.append(
                    {"op": "write", "heads": list(HEADS[:3]), "batch": batch, "kv_format": kv_format,
                     "tile": asdict(tile), "programs": grid[0],
                     "us": round(us, 2), "ratio": round(ratio, 4),
                     "difference": float((got != expected).float().mean()), "ratio_to_floor": round(us / floor, 3)}
                )  # fmt: skip
            yield rows


def run(only: list[str] | None = None, out: Path | None = None, show: Callable[[str], object] = print) -> None:
    """Measure candidates for some of GROUPS on the current GPU; `out` is written after each case.

    Raises ValueError for another group, RuntimeError without a CUDA device.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("tuning needs a CUDA device")
    groups = only or list(GROUPS)
    if unknown := set(groups) - set(GROUPS):
        raise ValueError(f"unknown groups {sorted(unknown)}: choose from {', '.join(GROUPS)}")
    jobs: list[Job] = []
    if "quantised" in groups:
        for heads, kv_format, block_size in DECODE_CASES:
            pages = example_pages(kv_format, 1, (*heads, heads[2]), block_size, device="meta")
            shapes = decode_shapes(kv_format, shipped_tile(pages, heads))
            jobs += [(heads, kv_format, block_size, tile) for tile in shapes]
    if "quantised-write" in groups:
        jobs += [(MHA, name, 0, tile) for name in KV_FORMATS for tile in write_tiles(name)]
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as workers:
        usage = dict(zip(jobs, workers.map(compile_job, jobs), strict=True))
    show(f"compiled {len(jobs)} tiles")
    ceiling = read_ceiling_gbps(PagePool.allocate(2.0))
    command = "python -m labkit.kernels.tune_quantised --only " + " ".join(groups)
    result: dict[str, Any] = {"provenance": provenance() | {"command": command}, "ceiling_gbps": round(ceiling, 1)}
    result["rows"] = []
    for name in groups:
        for rows in tune_decode(usage, ceiling) if name == "quantised" else tune_write(ceiling):
            result["rows"] += rows
            show(tune.best(rows))
            if out is not None:
                write_results(out, result)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=GROUPS)
    parser.add_argument("--json", type=Path, help="write all rows here, after each case")
    options = parser.parse_args()
    run(options.only, options.json)
