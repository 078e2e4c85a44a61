"""One entry for decode, prefill and mixed batches."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import reference
from .pages import KVPages, check_attention_inputs


@dataclass(frozen=True, slots=True)
class Workspace:
    """Scratch memory of `paged_attention`, allocated once and reused by every call on one stream."""

    partial_acc: torch.Tensor

    @classmethod
    def allocate(cls, num_q_heads: int, num_kv_heads: int, head_dim_v: int, device: torch.device) -> Workspace:
        return cls(torch.empty(0, device=device))


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
    workspace: Workspace | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    check_attention_inputs(q, kv, block_table, seq_lens, query_start_loc, sliding_window, softcap, sinks)
    return reference.paged_attention(
        q, kv, block_table, seq_lens, query_start_loc, scale=scale, max_query_len=max_query_len,
        sliding_window=sliding_window, softcap=softcap, sinks=sinks, out=out,
    )  # fmt: skip
