"""Random paged batches for the kernel tests; on a machine without a GPU, Triton's interpreter runs the kernels."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the kernels are first imported

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu") and DEVICE == "cpu":
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@dataclass
class PagedBatch:
    """Sequences in a cache whose other slots, and table entries, are poison: NaN, and a block far out of range."""

    heads: tuple[int, int, int, int]  # query heads, KV heads, head_dim_k, head_dim_v
    seq_lens: list[int]
    query_lens: list[int]
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    device: str = DEVICE
    padded_rows: int = 0
    options: dict[str, Any] = field(default_factory=dict)  # sliding_window, softcap, sinks
    seed: int = 0

    def __post_init__(self):
        from labkit.kernels import KVPages, reference

        num_q_heads, num_kv_heads, dim_k, dim_v = self.heads
        gen = torch.Generator().manual_seed(self.seed)
        counts = [-(-n // self.block_size) for n in self.seq_lens]
        num_blocks = sum(counts) + 3
        shape = (num_blocks, num_kv_heads, self.block_size)
        kv = KVPages(torch.full((*shape, dim_k), torch.nan), torch.full((*shape, dim_v), torch.nan))
        table = torch.full((len(counts), max([*counts, 1])), 2**30, dtype=torch.int32)
        free = torch.randperm(num_blocks, generator=gen).to(torch.int32)
        window = self.options.get("sliding_window")
        for s, (count, seq_len, query_len) in enumerate(zip(counts, self.seq_lens, self.query_lens, strict=True)):
            table[s, :count], free = free[:count], free[count:]
            # what no query of this step can see was never written, as after blocks left of the window are freed
            first = 0 if window is None else max(0, seq_len - query_len - window + 1)
            pos = torch.arange(first, seq_len)
            slots = table[s, pos // self.block_size].long() * self.block_size + pos % self.block_size
            k, v = (torch.randn(len(pos), num_kv_heads, d, generator=gen) for d in (dim_k, dim_v))
            reference.write_kv(k, v, kv, slots)
        starts = torch.tensor([0, *self.query_lens]).cumsum(0).to(torch.int32)
        q = torch.randn(int(starts[-1]) + self.padded_rows, num_q_heads, dim_k, generator=gen)
        self.q = q.to(self.device, self.dtype)
        self.kv = KVPages(*(t.to(self.device, self.dtype) for t in kv))
        self.metadata = (table, torch.tensor(self.seq_lens, dtype=torch.int32), starts)
        self.metadata = tuple(t.to(self.device) for t in self.metadata)
        self.arguments = dict(scale=dim_k**-0.5, max_query_len=max([*self.query_lens, 1]), **self.options)

    def kernel(self, **extra) -> torch.Tensor:
        from labkit.kernels import paged_attention

        out = self.q.new_full((self.q.shape[0], self.q.shape[1], self.kv.v.shape[3]), torch.nan)
        return paged_attention(self.q, self.kv, *self.metadata, **self.arguments, out=out, **extra)

    def expected(self) -> torch.Tensor:
        """The reference in float64, from the same (rounded) q, K and V."""
        from labkit.kernels import KVPages, reference

        kv = KVPages(self.kv.k.double(), self.kv.v.double())
        return reference.paged_attention(self.q.double(), kv, *self.metadata, **self.arguments)

    def error(self, **extra) -> float:
        """Relative error of the kernel, ||out - reference|| / ||reference||; NaN when anything leaked."""
        expected = self.expected()
        return float((self.kernel(**extra).double() - expected).norm() / expected.norm().clamp_min(1e-30))


TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
"""Relative error against float64: rounding of P and of the output to 16 bit; float32 runs without tf32."""


@pytest.fixture
def paged_batch():
    return PagedBatch


@pytest.fixture
def tolerance():
    return TOLERANCE
