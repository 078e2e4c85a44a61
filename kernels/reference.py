"""What each kernel computes, written the obvious way: plain torch, one sequence at a time, any float dtype.

These are the yardstick of the tests (run them in float64) and the first thing to read. Nothing here is fast.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .pages import KVPages


def gather_sequence(pages: torch.Tensor, block_table_row: torch.Tensor, seq_len: int) -> torch.Tensor:
    """Copy one sequence out of the cache: pages [num_blocks, heads, block_size, D] -> [heads, seq_len, D]."""
    num_kv_heads, block_size, head_dim = pages.shape[1:]
    blocks = pages[block_table_row[: -(-seq_len // block_size)].long()]  # [n, heads, block_size, D]
    return blocks.transpose(0, 1).reshape(num_kv_heads, -1, head_dim)[:, :seq_len]


def paged_attention(
    q: torch.Tensor,
    kv: KVPages,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    scale: float,
    max_query_len: int,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    workspace: object = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of new tokens over their paged context; same arguments as `labkit.kernels.paged_attention`.

    Query i of a sequence with query_len new tokens sits at position seq_len - query_len + i and sees position j
    iff 0 <= i - j < sliding_window (positions; no lower bound without a window).
    """
    if out is None:
        out = q.new_empty(q.shape[0], q.shape[1], kv.v.shape[3])
    out.zero_()
    group = q.shape[1] // kv.num_kv_heads
    for s in range(seq_lens.shape[0]):
        first, last = int(query_start_loc[s]), int(query_start_loc[s + 1])
        seq_len, query_len = int(seq_lens[s]), last - first
        if seq_len == 0 or query_len == 0:
            continue
        k = gather_sequence(kv.k, block_table[s], seq_len).to(q.dtype).repeat_interleave(group, 0)
        v = gather_sequence(kv.v, block_table[s], seq_len).to(q.dtype).repeat_interleave(group, 0)
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
