"""How the benchmarks measure: batches over a large pool of pages, CUDA graphs, medians, the ceilings of the GPU."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .pages import KVPages


def ragged_lengths(num_seqs: int = 128, mean: int = 1024, longest: int = 8192, seed: int = 7) -> list[int]:
    """Lognormal lengths (sigma 1) with the given mean, clipped to [1, longest]."""
    import numpy as np

    drawn = np.random.default_rng(seed).lognormal(math.log(mean) - 0.5, 1.0, num_seqs)
    return [int(min(longest, max(1, round(x)))) for x in drawn]


def batch_lengths(name: str) -> list[int]:
    """Context lengths of "64x4096" (64 sequences of 4096) or "ragged128"."""
    if name.startswith("ragged"):
        return ragged_lengths(int(name.removeprefix("ragged")))
    num_seqs, length = name.split("x")
    return [int(length)] * int(num_seqs)


class Timer:
    """`calls` (same work, different buffers) in one CUDA graph, to be timed by its replays."""

    def __init__(self, calls: Sequence[Callable[[], object]], window_ms: float):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls[:2]:
                call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for call in calls:
                call()
        self.calls = len(calls)
        self.begin, self.end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._replay_ms(1)
        self.replays = max(1, int(window_ms / max(self._replay_ms(1), 1e-3)))

    def _replay_ms(self, times: int) -> float:
        self.begin.record()
        for _ in range(times):
            self.graph.replay()
        self.end.record()
        torch.cuda.synchronize()
        return self.begin.elapsed_time(self.end)

    def microseconds(self) -> float:
        """Time of one call, from one window of replays."""
        return 1e3 * self._replay_ms(self.replays) / self.replays / self.calls


def time_calls(calls: Sequence[Callable[[], object]], window_ms: float = 5.0, windows: int = 5) -> float:
    """Microseconds a call: median over timed windows."""
    timer = Timer(calls, window_ms)
    return statistics.median(timer.microseconds() for _ in range(windows))


@dataclass(frozen=True)
class PagePool:
    """One large allocation of random 16-bit numbers for K and one for V, seen as pages of any shape."""

    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def allocate(cls, gib_each: float = 4.0, dtype: torch.dtype = torch.bfloat16) -> PagePool:
        count = int(gib_each * 2**10) * 2**20 // dtype.itemsize
        return cls(*(torch.randn(count, device="cuda", dtype=dtype) for _ in range(2)))

    def pages(self, num_kv_heads: int, head_dim: int, block_size: int, slot_major: bool = False) -> KVPages:
        """[num_blocks, num_kv_heads, block_size, head_dim] over the whole pool; slot_major: heads inside slots."""
        per_block = num_kv_heads * block_size * head_dim
        inner = (block_size, num_kv_heads, head_dim) if slot_major else (num_kv_heads, block_size, head_dim)

        def view(flat: torch.Tensor) -> torch.Tensor:
            pages = flat[: flat.numel() // per_block * per_block].view(-1, *inner)
            return pages.transpose(1, 2) if slot_major else pages

        return KVPages(view(self.k), view(self.v))


def random_tables(kv: KVPages, seq_lens: list[int], most: int = 16) -> list[torch.Tensor]:
    """Up to `most` block tables [num_seqs, max_blocks] without a common block: no call finds the last one's in L2."""
    counts = [-(-n // kv.block_size) for n in seq_lens]
    num_blocks = kv.k.shape[0]
    num_tables = max(1, min(most, num_blocks // sum(counts)))
    order = torch.randperm(num_blocks, device="cuda")[: num_tables * sum(counts)].to(torch.int32)
    tables = []
    for part in order.view(num_tables, -1):
        table = torch.zeros(len(counts), max(counts), dtype=torch.int32, device="cuda")
        for row, blocks in zip(table, part.split(counts), strict=True):
            row[: len(blocks)] = blocks
        tables.append(table)
    return tables


@triton.jit
def read_kernel(x, out, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    base = tl.program_id(0).to(tl.int64) * BLOCK * STEPS
    acc = tl.zeros([BLOCK], dtype=tl.int32)
    for i in range(STEPS):
        acc += tl.load(x + base + i * BLOCK + tl.arange(0, BLOCK))
    tl.store(out + tl.program_id(0), tl.sum(acc))


def read_ceiling_gbps(pool: PagePool) -> float:
    """GB/s of a kernel that only reads K's half of the pool, the best of a few shapes: the ceiling of every decode."""
    words = pool.k.view(torch.int32)
    out = torch.empty(words.numel() // 8192, dtype=torch.int32, device="cuda")
    best = 0.0
    for block, steps, num_warps in ((1024, 16, 4), (2048, 8, 4), (4096, 8, 8), (8192, 4, 8)):
        grid = (words.numel() // (block * steps),)

        def call(grid=grid, block=block, steps=steps, num_warps=num_warps):
            read_kernel[grid](words, out, BLOCK=block, STEPS=steps, num_warps=num_warps)

        best = max(best, pool.k.numel() * pool.k.element_size() / time_calls([call], 10.0) / 1e3)
    return best


def matmul_tflops(size: int = 8192) -> float:
    """TFLOP/s of a square bf16 matrix product through torch: the ceiling of every prefill."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / time_calls([lambda: a @ b], 20.0) / 1e6


def causal_flops(num_q_heads: int, dim_k: int, dim_v: int, seq_lens: list[int], query_lens: list[int]) -> int:
    """Multiplications and additions of causal attention: 2 (dim_k + dim_v) for each visible (query, key) pair."""
    pairs = sum(q * n - q * (q - 1) // 2 for n, q in zip(seq_lens, query_lens, strict=True))
    return 2 * num_q_heads * (dim_k + dim_v) * pairs
