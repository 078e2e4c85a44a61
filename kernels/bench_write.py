"""What quantising on the way into the pages costs: `write_quantised_kv` against the bytes that it has to move.

The floor of a write reads 16-bit K and V and writes codes, scales and zero points, all at the read ceiling of the run.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from .compile_report import KV_FORMATS, example_pages
from .measure import time_calls
from .pages import QuantisedKVPages
from .write_quantised import write_quantised_kv

HEADS = (32, 32, 128, 128)
BATCHES = {"4x2048 prefill": (4, 2048), "64 tokens of 64 sequences": (64, 1), "8 tokens of 8 sequences": (8, 1)}


def bench_quantised_write(ceiling_gbps: float, copies: int = 8) -> Iterator[dict[str, Any]]:
    """A row for each format and batch, over `copies` disjoint inputs and block tables (needs 2 GB)."""
    for kv_format in KV_FORMATS:
        kv = new_pages(kv_format, copies * 8192)
        for batch, (num_seqs, query_len) in BATCHES.items():
            order = torch.randperm(kv.k.codes.shape[0], device="cuda").chunk(copies)
            batches = [write_batch(kv, blocks, num_seqs, query_len) for blocks in order]
            us = time_calls([functools.partial(write_quantised_kv, **one) for one in batches])
            moved = bytes_moved(kv, num_seqs * query_len)
            floor = moved / ceiling_gbps / 1e3
            yield {
                "op": "write", "system": "labkit", "heads": [32, 32, 128], "batch": batch, "block_size": kv.block_size,
                "kv_format": kv_format, "us": round(us, 2), "gbps": round(moved / us / 1e3, 1),
                "ratio_to_floor": round(us / floor, 3),
            }  # fmt: skip


def new_pages(kv_format: str, num_tokens: int) -> QuantisedKVPages:
    """Pages for `num_tokens`, their fixed scales, which are read, filled."""
    block_size = 32 if kv_format == "int4" else 16
    kv = example_pages(kv_format, num_tokens // block_size, HEADS, block_size, device="cuda")
    assert isinstance(kv, QuantisedKVPages)
    for pages in (kv.k, kv.v):
        if pages.scales is not None:
            pages.scales.fill_(0.05)
    return kv


def write_batch(kv: QuantisedKVPages, blocks: torch.Tensor, num_seqs: int, query_len: int) -> dict[str, Any]:
    """Arguments that write `query_len` tokens a sequence: whole blocks of a prefill, or one token at any offset."""
    block_size, num_heads = kv.block_size, kv.num_kv_heads
    seq = torch.arange(num_seqs, device="cuda")
    last = torch.full_like(seq, query_len) if query_len > 1 else 1 + seq  # context lengths, at all offsets in a block
    positions = (last - query_len)[:, None] + torch.arange(query_len, device="cuda")
    table = blocks[: num_seqs * max(1, query_len // block_size)].view(num_seqs, -1)
    in_table = positions // block_size if query_len > 1 else torch.zeros_like(positions)
    slots = table.gather(1, in_table) * block_size + positions % block_size
    k_new, v_new = torch.randn(2, num_seqs * query_len, num_heads, 128, device="cuda", dtype=torch.bfloat16)
    return dict(
        k_new=k_new, v_new=v_new, kv=kv, slot_mapping=slots.flatten(), seq_lens=last.int(),
        query_start_loc=torch.arange(num_seqs + 1, device="cuda").int() * query_len,
        tail_rows=None if kv.k_tail is None else seq.int(),
    )  # fmt: skip


def bytes_moved(kv: QuantisedKVPages, num_tokens: int) -> int:
    """16-bit K and V read, codes and scales written; where tokens wait for their block, as if they did not."""
    num_slots = kv.k.codes.shape[0] * kv.block_size
    in_pages = sum(tensor.nbytes for tensor in kv.tensors)
    in_16_bit = 2 * kv.num_kv_heads * (kv.head_dim_k + kv.head_dim_v)
    return num_tokens * in_16_bit + in_pages * num_tokens // num_slots
