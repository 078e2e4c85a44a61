"""Backend `triton`: the kernels of `labkit.kernels`, which read the pages in place."""

from __future__ import annotations

from typing import Any

import torch

from labkit import kernels
from labkit.kernels import KVPages, QuantisedKVPages, Workspace, elementwise
from labkit.models import FusedAttentionInfo

from .input_batch import InputBatch


class TritonBackend:
    """Makes each step's attention; keeps the kernels' scratch memory, one for each head size."""

    def __init__(self) -> None:
        self._workspaces: dict[int, Workspace] = {}

    def __call__(self, batch: InputBatch, block_size: int) -> TritonPagedAttention:
        return TritonPagedAttention(batch, self)

    def workspace(self, kv: KVPages | QuantisedKVPages) -> Workspace:
        """Scratch memory for attention of this head size, allocated once: a captured graph holds its address."""
        v, head_dim_v = (kv.v.codes, kv.head_dim_v) if isinstance(kv, QuantisedKVPages) else (kv.v, kv.v.shape[3])
        if head_dim_v not in self._workspaces:
            self._workspaces[head_dim_v] = Workspace.allocate(head_dim_v, v.device)
        return self._workspaces[head_dim_v]


class TritonPagedAttention:
    """Attention over the paged cache for one step's batch; used by every layer of the forward pass."""

    def __init__(self, batch: InputBatch, backend: TritonBackend) -> None:
        self._batch = batch
        self._backend = backend
        self._max_query_len = batch.max_query_len

    def write(self, k: torch.Tensor, v: torch.Tensor, kv: KVPages | QuantisedKVPages) -> None:
        """Put the step's K and V [num_tokens, num_kv_heads, D] into their slots, or tails."""
        if isinstance(kv, QuantisedKVPages):
            kernels.write_quantised_kv(
                _unit_stride(k),
                _unit_stride(v),
                kv,
                self._batch.slot_mapping,
                seq_lens=self._batch.seq_lens,
                query_start_loc=self._batch.query_start_loc,
                tail_rows=self._batch.tail_rows,
            )
            return
        kernels.write_kv(_unit_stride(k), _unit_stride(v), kv, self._batch.slot_mapping)

    def rotate(
        self, info: FusedAttentionInfo, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotate q and k of the merged projection in place; returns q, k and v."""
        return elementwise.rope(
            qkv,
            cos,
            sin,
            info.num_q_heads,
            info.num_kv_heads,
            q_norm=info.q_norm,
            k_norm=info.k_norm,
            eps=info.norm_eps,
        )

    def rotate_and_write(
        self, info: FusedAttentionInfo, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, kv: KVPages
    ) -> torch.Tensor:
        """Rotate q and k of the merged projection and put K and V into their slots, in one launch; returns q."""
        return elementwise.rope_and_write_kv(
            qkv,
            cos,
            sin,
            kv,
            self._batch.slot_mapping,
            info.num_q_heads,
            q_norm=info.q_norm,
            k_norm=info.k_norm,
            eps=info.norm_eps,
        )

    def attend(
        self,
        q: torch.Tensor,
        kv: KVPages | QuantisedKVPages,
        *,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Causal attention of q [num_tokens, num_q_heads, D_k] over the cache: [num_tokens, num_q_heads, D_v]."""
        options = {"scale": scale, "sliding_window": sliding_window, "softcap": softcap, "sinks": sinks}
        if isinstance(kv, QuantisedKVPages):
            options["tail_rows"] = self._batch.tail_rows
        return self._attend(q, kv, self._batch.block_table, **options)

    def _attend(
        self, q: torch.Tensor, kv: KVPages | QuantisedKVPages, block_table: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        return kernels.paged_attention(
            _unit_stride(q),
            kv,
            block_table,
            self._batch.seq_lens,
            self._batch.query_start_loc,
            max_query_len=self._max_query_len,
            workspace=self._backend.workspace(kv),
            **options,
        )


def _unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
