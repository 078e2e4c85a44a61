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


class QuantisedPages(NamedTuple):
    """K, or V, of one layer as codes and what is needed to read them: value = code * scale + zero_point.

    codes: [num_blocks, num_kv_heads, block_size, head_dim], float16 or bfloat16 (stored as they are: no scales), int8
        (symmetric), uint8 (asymmetric) or float8; int4: uint8 [num_blocks, num_kv_heads, block_size, head_dim / 2],
        byte j = channel j in the low nibble, channel j + head_dim / 2 in the high one, symmetric codes stored as + 8.
    scales, zero_points: float16 or float32 [num_blocks or 1, num_kv_heads or 1, block_size or 1, groups], where groups
        divides head_dim and each scale serves head_dim / groups channels in a row. An axis of size 1 is shared:

            [num_blocks, num_kv_heads, block_size, 1]     per token and head
            [num_blocks, num_kv_heads, block_size, 4]     per token, head and group of head_dim / 4 channels
            [num_blocks, num_kv_heads, 1, head_dim]       per channel, over the tokens of a block
            [1, num_kv_heads, 1, 1]  [1, 1, 1, 1]         per head, per layer: fixed before the run

        None: no scales (1.0), no zero points (0.0).
    """

    codes: torch.Tensor
    scales: torch.Tensor | None = None
    zero_points: torch.Tensor | None = None


class QuantisedKVPages(NamedTuple):
    """K and V pages of one layer, each in its own format; head_dim is that of the values, not of the codes.

    k_tail, v_tail: where scales span the tokens of a block, it can be quantised only once it is full. Until then its
    tokens wait in 16 bits: [num_tails, num_kv_heads, block_size, head_dim], one row a running sequence (`tail_rows`).
    None where a token is quantised on its own.
    """

    k: QuantisedPages
    v: QuantisedPages
    head_dim_k: int
    head_dim_v: int
    k_tail: torch.Tensor | None = None
    v_tail: torch.Tensor | None = None

    @property
    def block_size(self) -> int:
        return self.k.codes.shape[2]

    @property
    def num_kv_heads(self) -> int:
        return self.k.codes.shape[1]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Every tensor that has blocks: what is copied, swapped and evicted together. Fixed scales have none."""
        num_blocks = self.k.codes.shape[0]
        return [part for part in (*self.k, *self.v) if part is not None and part.shape[0] == num_blocks]


def check_attention_inputs(
    q: torch.Tensor,
    kv: KVPages | QuantisedKVPages,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    sliding_window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    tail_rows: torch.Tensor | None = None,
) -> None:
    """Raise ValueError or TypeError, naming the argument, for shapes and types that attention cannot serve.

    Looks at shapes, dtypes and strides only: never at values, which may still be on their way to the GPU.
    """
    if q.ndim != 3:
        raise ValueError(f"q must be [num_tokens, num_q_heads, head_dim], got shape {tuple(q.shape)}")
    if isinstance(kv, KVPages):
        _check_pages(q, kv)
    else:
        _check_quantised_pages(q, kv, seq_lens.shape[0], tail_rows)
    if q.shape[1] % kv.num_kv_heads:
        raise ValueError(f"{q.shape[1]} query heads do not divide into {kv.num_kv_heads} KV heads")
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


def check_slot_mapping(slot_mapping: torch.Tensor, num_tokens: int) -> None:
    """Raise TypeError or ValueError unless slot_mapping is int64 [num_tokens]."""
    if slot_mapping.dtype != torch.int64:
        raise TypeError(f"slot_mapping must be int64, got {slot_mapping.dtype}")
    if slot_mapping.shape != (num_tokens,):
        raise ValueError(f"slot_mapping must be [{num_tokens}], got {tuple(slot_mapping.shape)}")


def check_quantised_write_inputs(
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    kv: QuantisedKVPages,
    slot_mapping: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    tail_rows: torch.Tensor | None,
) -> None:
    """Raise ValueError or TypeError, naming the argument, for what `write_quantised_kv` cannot write."""
    for name, new, head_dim, tail in (
        ("k_new", k_new, kv.head_dim_k, kv.k_tail), ("v_new", v_new, kv.head_dim_v, kv.v_tail)
    ):  # fmt: skip
        if new.ndim != 3 or new.shape[1:] != (kv.num_kv_heads, head_dim) or new.shape[0] != k_new.shape[0]:
            raise ValueError(
                f"{name} must be [num_tokens, {kv.num_kv_heads}, {head_dim}], got {tuple(new.shape)} "
                f"beside k_new {tuple(k_new.shape)}"
            )
        if new.stride(2) != 1:
            raise ValueError(f"{name} must be contiguous along head_dim")
        if tail is not None and tail.dtype != new.dtype:
            raise TypeError(f"{name} must have the dtype of its tail, {tail.dtype}, got {new.dtype}")
    check_slot_mapping(slot_mapping, k_new.shape[0])
    num_seqs = seq_lens.shape[0]
    if query_start_loc.shape != (num_seqs + 1,):
        raise ValueError(f"query_start_loc must be [{num_seqs + 1}], got {tuple(query_start_loc.shape)}")
    has_tails = kv.k_tail is not None or kv.v_tail is not None
    if has_tails and (tail_rows is None or tail_rows.shape != (num_seqs,)):
        got = None if tail_rows is None else tuple(tail_rows.shape)
        raise ValueError(f"tail_rows must be [{num_seqs}] where blocks are quantised as a whole, got {got}")


def _check_pages(q: torch.Tensor, kv: KVPages) -> None:
    if kv.k.ndim != 4 or kv.v.ndim != 4 or kv.k.shape[:3] != kv.v.shape[:3]:
        raise ValueError(
            "kv.k and kv.v must be [num_blocks, num_kv_heads, block_size, head_dim] and agree on the first three "
            f"sizes, got {tuple(kv.k.shape)} and {tuple(kv.v.shape)}"
        )
    if not q.dtype == kv.k.dtype == kv.v.dtype:
        raise TypeError(f"q, kv.k and kv.v must share a dtype, got {q.dtype}, {kv.k.dtype}, {kv.v.dtype}")
    if q.shape[2] != kv.k.shape[3]:
        raise ValueError(f"q has head_dim {q.shape[2]}, kv.k has {kv.k.shape[3]}")
    if q.stride(2) != 1 or kv.k.stride(3) != 1 or kv.v.stride(3) != 1:
        raise ValueError("q, kv.k and kv.v must be contiguous along head_dim")


def _check_quantised_pages(
    q: torch.Tensor, kv: QuantisedKVPages, num_seqs: int, tail_rows: torch.Tensor | None
) -> None:
    if q.shape[2] != kv.head_dim_k:
        raise ValueError(f"q has head_dim {q.shape[2]}, kv has head_dim_k {kv.head_dim_k}")
    if kv.k.codes.shape[:3] != kv.v.codes.shape[:3]:
        raise ValueError(f"codes of K and V disagree: {tuple(kv.k.codes.shape)} and {tuple(kv.v.codes.shape)}")
    for name, pages, head_dim in (("k", kv.k, kv.head_dim_k), ("v", kv.v, kv.head_dim_v)):
        codes, scales, zero_points = pages
        if codes.dtype not in (torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2, q.dtype):
            raise TypeError(f"kv.{name}.codes must be int8, uint8, float8 or of q's {q.dtype}, got {codes.dtype}")
        packed = codes.dtype == torch.uint8 and codes.shape[3] * 2 == head_dim
        if codes.shape[3] != head_dim and not packed:
            raise ValueError(f"kv.{name}.codes must have {head_dim} numbers a row (int4: half), got {codes.shape[3]}")
        if q.stride(2) != 1 or codes.stride(3) != 1:
            raise ValueError(f"q and kv.{name}.codes must be contiguous along head_dim")
        if scales is None:
            if zero_points is not None or codes.dtype in (torch.int8, torch.uint8):
                raise ValueError(f"kv.{name}.scales must be given for {codes.dtype} codes and with zero points")
            continue
        allowed = [(1, size) for size in codes.shape[:3]]
        if any(size not in sizes for size, sizes in zip(scales.shape[:3], allowed, strict=True)):
            raise ValueError(f"kv.{name}.scales {tuple(scales.shape)} do not fit codes {tuple(codes.shape)}")
        if head_dim % scales.shape[3] or (scales.shape[3] > 1 and scales.stride(3) != 1):
            raise ValueError(f"groups of kv.{name}.scales must divide {head_dim} and lie side by side")
        if zero_points is not None and zero_points.stride() != scales.stride():
            raise ValueError(f"kv.{name}.zero_points must lie as the scales do: strides {scales.stride()}")
    if kv.v_tail is not None or (kv.v.scales is not None and _spans_tokens(kv.v.scales)):
        raise ValueError("kv.v must be quantised token by token: V scales over the tokens of a block are not supported")
    if kv.k.scales is not None and _spans_tokens(kv.k.scales) and kv.block_size % 16:
        raise ValueError(f"K scales over the tokens of a block need a block size of a multiple of 16: {kv.block_size}")
    if kv.k_tail is not None and (
        tail_rows is None or tail_rows.shape != (num_seqs,) or tail_rows.dtype != torch.int32
    ):
        raise ValueError(f"tail_rows must be int32 [{num_seqs}] where kv has a k_tail")


def _spans_tokens(scales: torch.Tensor) -> bool:
    return scales.shape[0] > 1 and scales.shape[2] == 1
