"""The paged KV cache as tensors.

One layer's cache is two tensors of equal-sized pages ("blocks"), K and V apart, *head-major* inside a block:

    k [num_blocks, num_kv_heads, block_size, head_dim_k]        v [num_blocks, num_kv_heads, block_size, head_dim_v]

    block 0 ┌ head 0 ┬ slot 0: head_dim_k numbers ┐
            │        ├ slot 1                     │  one (block, head) pair is one contiguous run:
            │        ├ ...                        │  16 slots x 128 numbers x 2 bytes = 4 KiB
            │        └ slot block_size - 1        ┘
            ├ head 1 ...
    block 1 ...

A sequence finds its tokens through its row of the block table; the token at position p lies in

    block = block_table[sequence, p // block_size]        offset = p % block_size
    slot  = block * block_size + offset                   (what `slot_mapping` holds; -1 means: write nowhere)

Kernels read strides, so any other order of the inner axes also works; README.md has the measurement behind this one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class KVPages(NamedTuple):
    """K and V pages of one layer.

    k: [num_blocks, num_kv_heads, block_size, head_dim_k], float16, bfloat16 or float32.
    v: [num_blocks, num_kv_heads, block_size, head_dim_v], same dtype and device.
    """

    k: torch.Tensor
    v: torch.Tensor

    @property
    def block_size(self) -> int:
        return self.k.shape[2]

    @property
    def num_kv_heads(self) -> int:
        return self.k.shape[1]


def check_attention_inputs(
    q: torch.Tensor,
    kv: KVPages,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    sliding_window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> None:
    """Raise ValueError or TypeError, naming the argument, for shapes and types that attention cannot serve.

    Looks at shapes, dtypes and strides only: never at values, which may still be on their way to the GPU.
    """
    if q.ndim != 3:
        raise ValueError(f"q must be [num_tokens, num_q_heads, head_dim], got shape {tuple(q.shape)}")
    if kv.k.ndim != 4 or kv.v.ndim != 4 or kv.k.shape[:3] != kv.v.shape[:3]:
        raise ValueError(
            "kv.k and kv.v must be [num_blocks, num_kv_heads, block_size, head_dim] and agree on the first three "
            f"sizes, got {tuple(kv.k.shape)} and {tuple(kv.v.shape)}"
        )
    if not q.dtype == kv.k.dtype == kv.v.dtype:
        raise TypeError(f"q, kv.k and kv.v must share a dtype, got {q.dtype}, {kv.k.dtype}, {kv.v.dtype}")
    if q.shape[2] != kv.k.shape[3]:
        raise ValueError(f"q has head_dim {q.shape[2]}, kv.k has {kv.k.shape[3]}")
    if q.shape[1] % kv.num_kv_heads:
        raise ValueError(f"{q.shape[1]} query heads do not divide into {kv.num_kv_heads} KV heads")
    if q.stride(2) != 1 or kv.k.stride(3) != 1 or kv.v.stride(3) != 1:
        raise ValueError("q, kv.k and kv.v must be contiguous along head_dim")
    num_seqs = seq_lens.shape[0]
    if block_table.ndim != 2 or block_table.shape[0] != num_seqs or query_start_loc.shape != (num_seqs + 1,):
        raise ValueError(
            f"for {num_seqs} sequences, block_table must be [{num_seqs}, max_blocks] and query_start_loc "
            f"[{num_seqs + 1}], got {tuple(block_table.shape)} and {tuple(query_start_loc.shape)}"
        )
    for name, index in (("block_table", block_table), ("seq_lens", seq_lens), ("query_start_loc", query_start_loc)):
        if index.dtype != torch.int32:
            raise TypeError(f"{name} must be int32, got {index.dtype}")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1, got {sliding_window}")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap must be positive, got {softcap}")
    if sinks is not None and sinks.shape != (q.shape[1],):
        raise ValueError(f"sinks must be [{q.shape[1]}] (one a query head), got {tuple(sinks.shape)}")
