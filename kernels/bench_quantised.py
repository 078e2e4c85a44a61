"""Batches over quantised pages, for `labkit bench kernels --only quantised`."""

from __future__ import annotations

import functools

import torch

from . import Workspace, paged_attention, reference
from .compile_report import example_pages
from .measure import random_tables, time_calls
from .pages import KVPages, QuantisedKVPages, QuantisedPages

Heads = tuple[int, int, int]
CASES = [  # KV format, block size, batch
    *((kv_format, size, "64x4096") for kv_format, size in (("fp8", 16), ("fp8", 32), ("int8", 16), ("int8", 32))),
    ("int4", 32, "64x4096"),
    *((kv_format, 32, batch) for batch in ("32x2048", "ragged128", "8x4096") for kv_format in ("fp8", "int8", "int4")),
]


def fill(pages: QuantisedPages) -> None:
    """Random codes over their whole range, scales and zero points of values of about unit size."""
    codes, scales, zero_points = pages
    if codes.dtype == torch.float8_e4m3fn:
        for part in codes.split(4096):
            part.copy_(torch.randn(part.shape, device=part.device))
    else:
        codes.view(torch.uint8).random_(0, 256)
        if codes.dtype == torch.int8:
            codes.clamp_(min=-127)
    if scales is not None:
        unit = {torch.float8_e4m3fn: 1.0, torch.int8: 1 / 74, torch.uint8: 1 / 4.6}[codes.dtype]
        scales.uniform_(0.7 * unit, 1.3 * unit)
        if zero_points is not None:  # int4: the middle of the 15 steps within half a unit of 0
            zero_points.uniform_(-0.5, 0.5).sub_(scales * 7.5)


class QuantisedCase:
    """One batch, with disjoint block tables to rotate through; one new token a sequence unless query_lens says more."""

    def __init__(
        self, kv_format: str, heads: Heads, seq_lens: list[int], block_size: int, query_lens: list[int] | None = None
    ):
        self.query_lens = query_lens or [1] * len(seq_lens)
        num_q_heads, num_kv_heads, head_dim = heads
        count = sum(-(-n // block_size) for n in seq_lens)
        tables = max(2, min(16, 2**20 // (count * block_size)))  # 2^20 tokens: gigabytes, far beyond L2
        shape = (num_q_heads, num_kv_heads, head_dim, head_dim)
        kv = example_pages(kv_format, tables * count, shape, block_size, device="cuda")
        assert isinstance(kv, QuantisedKVPages)
        for pages in (kv.k, kv.v):
            fill(pages)
        if kv.k_tail is not None:
            kv.k_tail.normal_()
        self.kv, self.seq_lens, self.scale = kv, seq_lens, head_dim**-0.5
        self.tables = random_tables(KVPages(kv.k.codes, kv.v.codes), seq_lens)
        self.q = torch.randn(sum(self.query_lens), num_q_heads, head_dim, device="cuda", dtype=torch.bfloat16)
        self.out = torch.empty_like(self.q)
        self.lens = torch.tensor(seq_lens, dtype=torch.int32, device="cuda")
        self.starts = torch.tensor([0, *self.query_lens]).cumsum(0).int().cuda()
        self.tail_rows = torch.arange(len(seq_lens), dtype=torch.int32, device="cuda")
        self.workspace = Workspace.allocate(head_dim, "cuda")

    def attend(self, table: torch.Tensor) -> torch.Tensor:
        return paged_attention(
            self.q, self.kv, table, self.lens, self.starts, scale=self.scale,
            max_query_len=max(self.query_lens), workspace=self.workspace, out=self.out, tail_rows=self.tail_rows,
        )  # fmt: skip

    def time(self) -> float:
        return time_calls([functools.partial(self.attend, table) for table in self.tables])

    def kv_bytes(self) -> int:
        """Bytes of the codes and scales of all tokens."""
        tokens = self.kv.k.codes.shape[0] * self.kv.block_size
        stored = sum(t.nbytes for pages in (self.kv.k, self.kv.v) for t in pages if t is not None and t.shape[0] > 1)
        return stored * sum(self.seq_lens) // tokens

    def error(self) -> float:
        """Relative error of the last sequence against float64 over the dequantised cache."""
        new = self.query_lens[-1]
        got = self.attend(self.tables[0])[-new:].double()
        blocks = self.tables[0][-1, : -(-self.seq_lens[-1] // self.kv.block_size)].long()

        def own(pages: QuantisedPages) -> QuantisedPages:
            return QuantisedPages(*(t[blocks] if t is not None and t.shape[0] > 1 else t for t in pages))

        kv = self.kv._replace(k=own(self.kv.k), v=own(self.kv.v))
        table = torch.arange(len(blocks), dtype=torch.int32, device="cuda")[None]
        starts = torch.tensor([0, new], dtype=torch.int32, device="cuda")
        want = reference.paged_attention(
            self.q[-new:].double(), kv, table, self.lens[-1:], starts,
            scale=self.scale, max_query_len=new, tail_rows=self.tail_rows[-1:],
        )  # fmt: skip
        return float((got - want).norm() / want.norm())
