"""`labkit bench kernels`: what the kernels reach on this GPU, beside its own ceilings and the peers that are installed.

    python -m labkit.kernels.bench --json kernels.json [--only decode prefill ...]

Times come from CUDA graphs over rotating block tables (measure.py), medians of five windows; the read ceiling is
measured in the same run. `percent_of_ceiling` counts the bytes of K and V once.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from . import KVPages, Workspace, paged_attention, reference, steps, swap_blocks, write_kv
from .bench_quantised import CASES as QUANTISED_CASES
from .bench_quantised import QuantisedCase
from .bench_write import bench_quantised_write
from .measure import (
    PagePool,
    batch_lengths,
    causal_flops,
    matmul_tflops,
    random_tables,
    read_ceiling_gbps,
    time_calls,
)
from .peers import decode_peers, prefill_peers
from .result_file import provenance, write_results

Heads = tuple[int, int, int]
MHA, GQA, MQA, SMOLLM2 = (32, 32, 128), (32, 8, 128), (32, 1, 128), (9, 3, 64)
EVERY_BATCH = ("1x4096", "8x4096", "32x2048", "64x4096", "128x1024", "256x512", "1x32768", "ragged128")
DECODE = {MHA: EVERY_BATCH, GQA: EVERY_BATCH, MQA: ("64x4096", "ragged128"), SMOLLM2: ("64x4096", "ragged128")}
PREFILL = {  # context lengths with the new tokens, new tokens
    "1x8192": ([8192], [8192]),
    "4x2048": ([2048] * 4, [2048] * 4),
    "4x512 over 8192": ([8704] * 4, [512] * 4),
}


class Case:
    """One batch over the pool, with several disjoint block tables to rotate through."""

    def __init__(self, pool: PagePool, heads: Heads, seq_lens: list[int], query_lens: list[int], block_size: int = 16):
        self.heads, self.seq_lens, self.query_lens = heads, seq_lens, query_lens
        num_q_heads, num_kv_heads, head_dim = heads
        self.kv = pool.pages(num_kv_heads, head_dim, block_size)
        self.tables = random_tables(self.kv, seq_lens)
        num_tokens = sum(query_lens)
        self.q = torch.randn(num_tokens, num_q_heads, head_dim, device="cuda", dtype=self.kv.k.dtype)
        self.out = torch.empty_like(self.q)
        self.lens = torch.tensor(seq_lens, dtype=torch.int32, device="cuda")
        self.starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32).cuda()
        self.scale = head_dim**-0.5
        self.workspace = Workspace.allocate(head_dim, "cuda")

    def attend(self, table: torch.Tensor) -> torch.Tensor:
        return paged_attention(
            self.q, self.kv, table, self.lens, self.starts, scale=self.scale,
            max_query_len=max(self.query_lens), workspace=self.workspace, out=self.out,
        )  # fmt: skip

    def time(self, step: Callable[[torch.Tensor], object] | None = None) -> float:
        """Microseconds a call of `step` (paged_attention) over the rotating tables."""
        return time_calls([functools.partial(step or self.attend, table) for table in self.tables])

    def kv_bytes(self) -> int:
        return 2 * sum(self.seq_lens) * self.heads[1] * self.heads[2] * self.kv.k.element_size()

    def error(self) -> float:
        """Relative error of the last sequence against float64."""
        got = self.attend(self.tables[0])[-self.query_lens[-1] :]
        count = -(-self.seq_lens[-1] // self.kv.block_size)
        blocks = self.tables[0][-1, :count].long()
        kv = KVPages(self.kv.k[blocks].double(), self.kv.v[blocks].double())
        table = torch.arange(count, dtype=torch.int32, device="cuda")[None]
        starts = torch.tensor([0, self.query_lens[-1]], dtype=torch.int32)
        q = self.q[-self.query_lens[-1] :].double()
        want = reference.paged_attention(
            q, kv, table, self.lens[-1:], starts, scale=self.scale, max_query_len=self.query_lens[-1]
        )
        return float((got.double() - want).norm() / want.norm())


def row(
    op: str, system: str, heads: Heads, batch: str, block_size: int | None, us: float, kv_format: str = "bf16",
    **more: Any,
) -> dict[str, Any]:  # fmt: skip
    base = {"op": op, "system": system, "heads": list(heads), "batch": batch, "block_size": block_size}
    return base | {"kv_format": kv_format, "us": round(us, 2)} | {k: round(v, 5) for k, v in more.items()}


def bench_decode(pool: PagePool, ceiling: float, peers: bool = True) -> Iterator[dict[str, Any]]:
    for heads, batches in DECODE.items():
        for batch in batches:
            lens = batch_lengths(batch)
            case = Case(pool, heads, lens, [1] * len(lens))

            def percent(us: float, case: Case = case) -> float:
                return 100 * case.kv_bytes() / us / 1e3 / ceiling

            us = case.time()
            yield row("decode", "labkit", heads, batch, 16, us, percent_of_ceiling=percent(us), error=case.error())
            for name, block_size, us in decode_peers(case) if peers else ():
                yield row("decode", name, heads, batch, block_size, us, percent_of_ceiling=percent(us))
    for block_size in (32, 64, 128, 256):
        for heads in (MHA, GQA):
            case = Case(pool, heads, [2048] * 32, [1] * 32, block_size)
            us = case.time()
            share = 100 * case.kv_bytes() / us / 1e3 / ceiling
            yield row("decode", "labkit", heads, "32x2048", block_size, us, percent_of_ceiling=share)


def bench_prefill(pool: PagePool, peers: bool = True) -> Iterator[dict[str, Any]]:
    for heads in (GQA, MHA):
        for batch, (lens, query_lens) in PREFILL.items():
            case = Case(pool, heads, lens, query_lens)
            flops = causal_flops(heads[0], heads[2], heads[2], lens, query_lens)
            us = case.time()
            yield row("prefill", "labkit", heads, batch, 16, us, tflops=flops / us / 1e6)
            for name, block_size, us in prefill_peers(case) if peers else ():
                yield row("prefill", name, heads, batch, block_size, us, tflops=flops / us / 1e6)


def bench_mixed(pool: PagePool) -> Iterator[dict[str, Any]]:
    decodes, prefill = ([4096] * 64, [1] * 64), ([2048], [2048])
    alone = sum(Case(pool, GQA, *part).time() for part in (decodes, prefill))
    us = Case(pool, GQA, decodes[0] + prefill[0], decodes[1] + prefill[1]).time()
    yield row("mixed", "labkit", GQA, "64x4096 + 2048 prefill", 16, us, ratio_to_sum_alone=us / alone)


def bench_write(pool: PagePool) -> Iterator[dict[str, Any]]:
    kv = pool.pages(32, 128, 16)
    for num_tokens, order in ((8192, "random blocks"), (8192, "blocks in order"), (64, "random blocks")):
        calls = []
        for i in range(8):
            k_new, v_new = (torch.randn(num_tokens, 32, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            if num_tokens == 64:  # decode: each token in a block of its own
                slots = torch.randperm(kv.k.shape[0], device="cuda")[:64] * 16
            else:
                blocks = torch.arange(num_tokens // 16, device="cuda") + i * num_tokens // 16
                if order == "random blocks":
                    blocks = torch.randperm(kv.k.shape[0], device="cuda")[: num_tokens // 16]
                slots = (blocks[:, None] * 16 + torch.arange(16, device="cuda")).flatten()
            calls.append(functools.partial(write_kv, k_new, v_new, kv, slots))
        us = time_calls(calls)
        moved = 2 * 2 * num_tokens * 32 * 128 * 2  # K and V, read and written, two bytes each
        batch = f"{num_tokens} tokens, {order}"
        yield row("write", "labkit", MHA, batch, 16, us, gbps=moved / us / 1e3)


def bench_swap(pool: PagePool) -> Iterator[dict[str, Any]]:
    gpu = pool.pages(8, 128, 16)
    num_blocks = 1024
    host = KVPages(*(torch.empty(num_blocks, *p.shape[1:], dtype=p.dtype, pin_memory=True) for p in gpu))
    out = torch.stack([torch.randperm(gpu.k.shape[0])[:num_blocks], torch.randperm(num_blocks)], 1).cuda()
    back = out.flip(1).contiguous()
    moved = 2 * num_blocks * 8 * 16 * 128 * 2
    for name, call in (
        ("1024 blocks to host", functools.partial(swap_blocks, gpu, host, out)),
        ("1024 blocks from host", functools.partial(swap_blocks, host, gpu, back)),
    ):
        us = time_calls([call])
        yield row("swap", "labkit", GQA, name, 16, us, gbps=moved / us / 1e3)


def bench_steps(pool: PagePool, ceiling: float) -> Iterator[dict[str, Any]]:
    """Each step of steps.py on the same batches."""
    for heads, batch in ((GQA, "8x4096"), (GQA, "64x4096"), (MHA, "8x4096"), (GQA, "ragged128")):
        lens = batch_lengths(batch)
        case = Case(pool, heads, lens, [1] * len(lens))
        case.tables = case.tables[:4]
        for step in steps.STEPS[:-1]:
            us = case.time(lambda table, step=step, case=case: step(case.q, case.kv, table, case.lens, case.scale))
            share = 100 * case.kv_bytes() / us / 1e3 / ceiling
            yield row("step", step.__name__, heads, batch, 16, us, percent_of_ceiling=share)
        us = case.time()
        share = 100 * case.kv_bytes() / us / 1e3 / ceiling
        yield row("step", "shipped", heads, batch, 16, us, percent_of_ceiling=share)


def bench_quantised(pool: PagePool, ceiling: float) -> Iterator[dict[str, Any]]:
    """Decode over quantised pages, as a ratio to the same batch in bf16, measured just before."""
    for heads in (MHA, GQA):
        bf16_us = {}
        for batch in dict.fromkeys(batch for _, _, batch in QUANTISED_CASES):
            lens = batch_lengths(batch)
            case = Case(pool, heads, lens, [1] * len(lens))
            us = bf16_us[batch] = case.time()
            share = 100 * case.kv_bytes() / us / 1e3 / ceiling
            yield row("decode", "labkit", heads, batch, 16, us, percent_of_ceiling=share, ratio_to_bf16=1.0)
        for kv_format, block_size, batch in QUANTISED_CASES:
            case = QuantisedCase(kv_format, heads, batch_lengths(batch), block_size)
            us = case.time()
            yield row(
                "decode", "labkit", heads, batch, block_size, us, kv_format, ratio_to_bf16=us / bf16_us[batch],
                percent_of_ceiling=100 * case.kv_bytes() / us / 1e3 / ceiling, error=case.error(),
            )  # fmt: skip


def bench_quantised_prefill(pool: PagePool) -> Iterator[dict[str, Any]]:
    """Prefill over quantised pages, as a ratio to the same batch in bf16, measured just before."""
    for heads in (GQA, MHA):
        for batch, (lens, query_lens) in PREFILL.items():
            flops = causal_flops(heads[0], heads[2], heads[2], lens, query_lens)
            bf16_us = Case(pool, heads, lens, query_lens).time()
            for kv_format in ("fp8", "int8", "int4"):
                case = QuantisedCase(kv_format, heads, lens, 32, query_lens)
                us = case.time()
                error = {} if query_lens[-1] > 2048 else {"error": case.error()}  # float64 scores take their room
                yield row(
                    "prefill", "labkit", heads, batch, 32, us, kv_format, tflops=flops / us / 1e6,
                    ratio_to_bf16=us / bf16_us, **error,
                )  # fmt: skip


def run(
    only: list[str] | None = None, peers: bool = True, show: Callable[[str], object] = print, out: Path | None = None
) -> dict[str, Any]:
    """Measure everything on the current GPU, or the named groups of ops, and return the table with its provenance.

    Quantised pages have a table of their own (quant.json): their groups run only when they are named. The JSON file
    ``out`` has after each row all that were measured, beside what others keep there under other names.

    Raises RuntimeError without a CUDA device: there is nothing to measure in an interpreter.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("labkit bench kernels needs a CUDA device; tests run the kernels in Triton's interpreter")
    beside = json.loads(out.read_text()) if out is not None and out.exists() else {}
    pool = PagePool.allocate(4.5)
    ceiling = read_ceiling_gbps(pool)
    groups = {
        "decode": lambda: bench_decode(pool, ceiling, peers),
        "prefill": lambda: bench_prefill(pool, peers),
        "mixed": lambda: bench_mixed(pool),
        "write": lambda: bench_write(pool),
        "swap": lambda: bench_swap(pool),
        "steps": lambda: bench_steps(pool, ceiling),
        "quantised": lambda: bench_quantised(pool, ceiling),
        "quantised-prefill": lambda: bench_quantised_prefill(pool),
        "quantised-write": lambda: bench_quantised_write(ceiling),
    }
    unknown = set(only or ()) - set(groups)
    if unknown:
        raise ValueError(f"unknown groups {sorted(unknown)}: choose from {list(groups)}")
    result = {"provenance": provenance(), "ceiling_gbps": round(ceiling, 1), "matmul_tflops": round(matmul_tflops(), 1)}
    show(json.dumps(result))
    rows: list[dict[str, Any]] = []
    for name in only or [name for name in groups if not name.startswith("quantised")]:
        for one in groups[name]():
            rows.append(one)
            show(" ".join(f"{value}" for value in one.values()))
            if out is not None:
                write_results(out, beside | result | {"rows": rows})
    return result | {"rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--only", nargs="+", help="groups of ops; an unknown name lists all")
    parser.add_argument("--no-peers", action="store_true", help="leave out torch SDPA, flashinfer and flash-attn")
    options = parser.parse_args()
    run(options.only, not options.no_peers, out=options.json)


if __name__ == "__main__":
    main()
