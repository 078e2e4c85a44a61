"""The peers of the benchmark: torch SDPA over contiguous K and V always, flashinfer and flash-attn when importable.

Each yields (name, block size or None for contiguous, microseconds a call) for a `bench.Case`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from .measure import time_calls

if TYPE_CHECKING:
    from .bench import Case


def decode_peers(case: Case) -> Iterator[tuple[str, int | None, float]]:
    if len(set(case.seq_lens)) == 1:
        yield from _sdpa(case, causal=False)
    if importlib.util.find_spec("flashinfer"):
        yield "flashinfer", case.kv.block_size, _flashinfer_decode(case)
    if importlib.util.find_spec("flash_attn"):
        yield "flash-attn", 256, _flash_attn(case)


def prefill_peers(case: Case) -> Iterator[tuple[str, int | None, float]]:
    if case.seq_lens == case.query_lens:
        yield from _sdpa(case, causal=True)
    if importlib.util.find_spec("flash_attn"):
        yield "flash-attn", 256, _flash_attn(case)


def _sdpa(case: Case, causal: bool) -> Iterator[tuple[str, int | None, float]]:
    """torch SDPA with the cuDNN and the flash backend, over K and V that lie contiguous: it pays for no paging."""
    num_q_heads, num_kv_heads, head_dim = case.heads
    batch, length, query = len(case.seq_lens), case.seq_lens[0], case.query_lens[0]
    q = torch.randn(batch, num_q_heads, query, head_dim, device="cuda", dtype=case.q.dtype)
    per_set = batch * num_kv_heads * length * head_dim
    flat_k, flat_v = (pages.reshape(-1) for pages in case.kv)
    sets = max(1, min(16, flat_k.numel() // per_set))
    shape = (batch, num_kv_heads, length, head_dim)
    kv = [[flat[i * per_set : (i + 1) * per_set].view(shape) for flat in (flat_k, flat_v)] for i in range(sets)]

    def call(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, enable_gqa=num_q_heads != num_kv_heads
        )

    for name, backend in (("sdpa cudnn", SDPBackend.CUDNN_ATTENTION), ("sdpa flash", SDPBackend.FLASH_ATTENTION)):
        with sdpa_kernel(backend):
            try:
                us = time_calls([lambda k=k, v=v: call(k, v) for k, v in kv])
            except RuntimeError:  # torch: no kernel of this backend for these shapes
                continue
        yield name, None, us


def _flashinfer_decode(case: Case) -> float:
    """FlashInfer's paged decode over the same head-major pages; its plan, made on the host, is not in the time."""
    import flashinfer  # type: ignore[import-not-found]

    num_q_heads, num_kv_heads, head_dim = case.heads
    block_size = case.kv.block_size
    counts = [-(-n // block_size) for n in case.seq_lens]
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).to(torch.int32)
    last = torch.tensor(
        [n - (c - 1) * block_size for n, c in zip(case.seq_lens, counts, strict=True)], dtype=torch.int32
    )
    wrappers = []
    for table in case.tables[:4]:
        indices = torch.cat([line[:c] for line, c in zip(table, counts, strict=True)])
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            torch.empty(128 << 20, dtype=torch.uint8, device="cuda"),
            "HND",
            use_tensor_cores=num_q_heads >= 4 * num_kv_heads,
        )
        wrapper.plan(
            starts, indices, last, num_q_heads, num_kv_heads, head_dim, block_size,
            q_data_type=case.q.dtype, kv_data_type=case.q.dtype,
        )  # fmt: skip
        wrappers.append(wrapper)
    return time_calls([lambda w=w: w.run(case.q, tuple(case.kv)) for w in wrappers])


def _flash_attn(case: Case) -> float:
    """flash-attn's kernel with a KV cache; it takes slot-major pages of 256."""
    from flash_attn import flash_attn_with_kvcache  # type: ignore[import-not-found]

    from .measure import PagePool, random_tables

    num_q_heads, num_kv_heads, head_dim = case.heads
    pool = PagePool(case.kv.k.reshape(-1), case.kv.v.reshape(-1))
    pages = pool.pages(num_kv_heads, head_dim, 256, slot_major=True)
    tables = random_tables(pages, case.seq_lens)
    q = case.q.view(len(case.seq_lens), -1, num_q_heads, head_dim)
    k, v = (p.transpose(1, 2) for p in pages)
    return time_calls(
        [
            lambda t=t: flash_attn_with_kvcache(q, k, v, cache_seqlens=case.lens, block_table=t, causal=True)
            for t in tables
        ]
    )
