"""Backend `unfused`: dequantise, then attend. What a quantised cache costs without kernels that read it in place.

K and V are quantised on write as by `triton`. Attention first makes 16-bit pages of all blocks of the step, in plain
torch, then runs the unquantised kernel on them: a baseline to measure fused kernels against, in time and in memory.
The copies of one layer's K and V need room beside the pool: lower gpu_memory_utilization for it.
"""

from __future__ import annotations

from math import prod

import torch

from labkit.kernels import KVPages, QuantisedKVPages, QuantisedPages

from .input_batch import InputBatch
from .quantised_pages import read_blocks
from .triton_attention import TritonBackend, TritonPagedAttention

_VALUES_AT_ONCE = 1 << 26  # the float32 numbers in between take no more room than that


class UnfusedBackend(TritonBackend):
    """Makes each step's attention."""

    def __call__(self, batch: InputBatch, block_size: int) -> UnfusedPagedAttention:
        return UnfusedPagedAttention(batch, self)


class UnfusedPagedAttention(TritonPagedAttention):
    """Attention over 16-bit copies of quantised pages."""

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
        table = self._batch.block_table
        if isinstance(kv, QuantisedKVPages):
            k = self._dequantised(kv.k, kv.head_dim_k, kv.k_tail, q.dtype)
            v = self._dequantised(kv.v, kv.head_dim_v, kv.v_tail, q.dtype)
            kv, table = KVPages(k, v), torch.arange(len(k), dtype=torch.int32, device=k.device).view(table.shape)
        return self._attend(q, kv, table, scale=scale, sliding_window=sliding_window, softcap=softcap, sinks=sinks)

    def _dequantised(
        self, pages: QuantisedPages, head_dim: int, tail: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """All blocks of the step, in the order of its block table: [num_seqs * max_blocks, heads, block_size, D]."""
        batch, block_size = self._batch, pages.codes.shape[2]
        num_seqs, max_blocks = batch.block_table.shape
        blocks = batch.block_table.flatten().long()
        shape = (*pages.codes.shape[1:3], head_dim)
        values = torch.empty(len(blocks), *shape, dtype=dtype, device=blocks.device)
        count = max(1, _VALUES_AT_ONCE // prod(shape))
        for some, into in zip(blocks.split(count), values.split(count), strict=True):
            into.copy_(read_blocks(pages, head_dim, some, dtype))
        if tail is not None and batch.tail_rows is not None:  # unfinished blocks are in the tails
            seqs = torch.arange(num_seqs, device=values.device)
            at = seqs * max_blocks + (batch.seq_lens // block_size).clamp(max=max_blocks - 1)
            is_unfinished = (batch.seq_lens % block_size > 0)[:, None, None, None]
            values[at] = torch.where(is_unfinished, tail[batch.tail_rows.long()], values[at])
        return values
