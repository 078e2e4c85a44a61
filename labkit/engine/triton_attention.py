"""Backend `triton`: the kernels of `labkit.kernels`, which read the pages in place."""

from __future__ import annotations

import torch

from labkit import kernels
from labkit.kernels import KVPages

from .input_batch import InputBatch


class TritonPagedAttention:
    """Attention over the paged cache for one step's batch; used by every layer of the forward pass."""

    def __init__(self, batch: InputBatch, block_size: int) -> None:
        self._batch = batch
        self._max_query_len = batch.max_query_len

    def write(self, k: torch.Tensor, v: torch.Tensor, kv: KVPages) -> None:
        """Put the step's K and V [num_tokens, num_kv_heads, D] into their slots."""
        kernels.write_kv(_unit_stride(k), _unit_stride(v), kv, self._batch.slot_mapping)

    def attend(
        self,
        q: torch.Tensor,
        kv: KVPages,
        *,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Causal attention of q [num_tokens, num_q_heads, D_k] over the cache: [num_tokens, num_q_heads, D_v]."""
        batch = self._batch
        return kernels.paged_attention(
            _unit_stride(q),
            kv,
            batch.block_table,
            batch.seq_lens,
            batch.query_start_loc,
            scale=scale,
            max_query_len=self._max_query_len,
            sliding_window=sliding_window,
            softcap=softcap,
            sinks=sinks,
        )


def _unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
