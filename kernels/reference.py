"""What each kernel computes, written the obvious way: plain torch, one sequence at a time, any float dtype.

These are the yardstick of the tests (run them in float64) and the first thing to read. Nothing here is fast.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .pages import KVPages, QuantisedKVPages, QuantisedPages


def dequantise(pages: QuantisedPages, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """What pages stand for, code * scale + zero_point: [num_blocks, num_kv_heads, block_size, head_dim]."""
    codes, scales, zero_points = pages
    if codes.shape[3] != head_dim:  # int4: two codes a byte, symmetric ones stored as + 8
        codes = torch.cat([codes & 15, codes >> 4], dim=3).to(dtype) - (8 if zero_points is None else 0)
    values = codes.to(dtype)
    if scales is not None:
        values = values.unflatten(3, (scales.shape[3], -1)) * scales[..., None].to(dtype)
        if zero_points is not None:
            values = values + zero_points[..., None].to(dtype)
        values = values.flatten(3)
    return values


def gather_sequence(
    pages: QuantisedPages, tails: torch.Tensor | None, tail_row: int, head_dim: int,
    block_table_row: torch.Tensor, seq_len: int, dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """Copy one sequence out of the cache, dequantised: [num_kv_heads, seq_len, head_dim]."""
    blocks = block_table_row[: -(-seq_len // pages.codes.shape[2])].long()
    # by bytes, since torch cannot index float8
    own = (p if p is None or p.shape[0] == 1 else p.view(torch.uint8)[blocks].view(p.dtype) for p in pages)
    values = dequantise(QuantisedPages(*own), head_dim, dtype)
    if tails is not None and seq_len % values.shape[2]:  # the last block is not full yet
        values[-1] = tails[tail_row].to(dtype)
    return values.transpose(0, 1).flatten(1, 2)[:, :seq_len]


def paged_attention(
    q: torch.Tensor,
    kv: KVPages | QuantisedKVPages,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    scale: float,
    max_query_len: int,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    tail_rows: torch.Tensor | None = None,
    workspace: object = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of new tokens over their paged context; same arguments as `labkit.kernels.paged_attention`.

    Query i of a sequence with query_len new tokens sits at position seq_len - query_len + i and sees position j
    iff 0 <= i - j < sliding_window (positions; no lower bound without a window).
    """
    if isinstance(kv, KVPages):
        kv = QuantisedKVPages(QuantisedPages(kv.k), QuantisedPages(kv.v), kv.k.shape[3], kv.v.shape[3])
    if out is None:
        out = q.new_empty(q.shape[0], q.shape[1], kv.head_dim_v)
    out.zero_()
    group = q.shape[1] // kv.num_kv_heads
    for s in range(seq_lens.shape[0]):
        first, last = int(query_start_loc[s]), int(query_start_loc[s + 1])
        seq_len, query_len = int(seq_lens[s]), last - first
        if seq_len == 0 or query_len == 0:
            continue
        row = 0 if tail_rows is None else int(tail_rows[s])
        k = gather_sequence(kv.k, kv.k_tail, row, kv.head_dim_k, block_table[s], seq_len, q.dtype)
        v = gather_sequence(kv.v, kv.v_tail, row, kv.head_dim_v, block_table[s], seq_len, q.dtype)
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        scores = torch.einsum("qhd,hkd->hqk", q[first:last], k) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        query_pos = torch.arange(seq_len - query_len, seq_len, device=q.device)[:, None]
        key_pos = torch.arange(seq_len, device=q.device)[None, :]
        visible = key_pos <= query_pos
        if sliding_window is not None:
            visible &= query_pos - key_pos < sliding_window
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:  # a sink is one more score in the denominator, with no value behind it
            sink = sinks.to(scores.dtype)[:, None, None].expand(-1, query_len, 1)
            scores = torch.cat([scores, sink], dim=2)
        probs = scores.softmax(-1)[:, :, :seq_len]
        # 0 x NaN is NaN: what no query of this step may see (a slot left of the window, say) must not be read
        v = torch.where(visible.any(0)[None, :, None], v, 0)
        out[first:last] = torch.einsum("hqk,hkd->qhd", torch.nan_to_num(probs), v)
    return out


def write_kv(k_new: torch.Tensor, v_new: torch.Tensor, kv: KVPages, slot_mapping: torch.Tensor) -> None:
    """Put each token's K and V [num_tokens, num_kv_heads, D] into its slot; slot -1 is skipped."""
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, kv.block_size)
            kv.k[block, :, offset] = k_new[token]
            kv.v[block, :, offset] = v_new[token]


def copy_blocks(tensors: Sequence[torch.Tensor], src_dst: torch.Tensor) -> None:
    """Copy whole blocks inside tensors [num_blocks, ...]; src_dst int64 [n, 2]."""
    swap_blocks(tensors, tensors, src_dst)


def swap_blocks(source: Sequence[torch.Tensor], destination: Sequence[torch.Tensor], src_dst: torch.Tensor) -> None:
    """Copy whole blocks between two caches, such as GPU and pinned host memory; src_dst int64 [n, 2]."""
    for of, to in zip(source, destination, strict=True):
        for src, dst in src_dst.tolist():
            to[dst] = of[src].to(to.device)
