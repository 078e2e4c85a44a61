"""Writing new K and V into their slots, both in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .pages import KVPages, check_slot_mapping


@triton.jit(do_not_specialize=["num_tokens"])
def write_kv_kernel(
    k_new, v_new, k, v, slot_mapping, num_tokens,
    k_new_token, k_new_head, v_new_token, v_new_head,
    k_block, k_head, k_slot, v_block, v_head, v_slot,
    NUM_HEADS: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
    DIM_K: tl.constexpr, DIM_V: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Program (i, j) writes TOKENS tokens x HEADS heads, one row of head_dim numbers each.

    block, offset = divmod(slot_mapping[t], BLOCK_SIZE)

    k_new, token t   |head 0|head 1|head 2| ...
                         |      |      └────► block, head 2, offset
                         |      └───────────► block, head 1, offset
                         └──────────────────► block, head 0, offset
    """
    row = tl.arange(0, TOKENS * HEADS)
    token = (tl.program_id(0) * TOKENS + row // HEADS).to(tl.int64)
    head = tl.program_id(1) * HEADS + row % HEADS
    slot = tl.load(slot_mapping + token, mask=token < num_tokens, other=-1)
    row_ok = ((slot >= 0) & (head < NUM_HEADS))[:, None]
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    d = tl.arange(0, DIM)[None, :]
    k_from = k_new + token * k_new_token + head * k_new_head
    v_from = v_new + token * v_new_token + head * v_new_head
    k_to = k + block * k_block + head * k_head + offset * k_slot
    v_to = v + block * v_block + head * v_head + offset * v_slot
    k_row = tl.load(k_from[:, None] + d, mask=row_ok & (d < DIM_K))
    v_row = tl.load(v_from[:, None] + d, mask=row_ok & (d < DIM_V))
    tl.store(k_to[:, None] + d, k_row, mask=row_ok & (d < DIM_K))
    tl.store(v_to[:, None] + d, v_row, mask=row_ok & (d < DIM_V))


def write_kv(k_new: torch.Tensor, v_new: torch.Tensor, kv: KVPages, slot_mapping: torch.Tensor) -> None:
    """Put each new token's K and V into its slot.

    k_new, v_new: [num_tokens, num_kv_heads, head_dim], contiguous along head_dim; converted to the cache's dtype.
    slot_mapping: int64 [num_tokens], slot = block * block_size + offset; -1 writes nothing (a padded row).
    Raises TypeError or ValueError, naming the argument, on other shapes or types.
    """
    num_tokens, num_heads, dim_k = k_new.shape
    dim_v = v_new.shape[2]
    check_slot_mapping(slot_mapping, num_tokens)
    if v_new.shape[:2] != (num_tokens, num_heads):
        raise ValueError(f"k_new and v_new differ in tokens or heads: {tuple(k_new.shape)}, {tuple(v_new.shape)}")
    if (num_heads, dim_k, dim_v) != (kv.num_kv_heads, kv.k.shape[3], kv.v.shape[3]):
        raise ValueError(
            f"k_new {tuple(k_new.shape)} and v_new {tuple(v_new.shape)} do not fit a cache of {kv.num_kv_heads} heads "
            f"with head sizes {kv.k.shape[3]} and {kv.v.shape[3]}"
        )
    if k_new.stride(2) != 1 or v_new.stride(2) != 1:
        raise ValueError("k_new and v_new must be contiguous along head_dim")
    if num_tokens == 0:
        return
    dim = triton.next_power_of_2(max(dim_k, dim_v))
    tokens, heads = 1, min(triton.next_power_of_2(num_heads), max(1, 2048 // dim))
    write_kv_kernel[(triton.cdiv(num_tokens, tokens), triton.cdiv(num_heads, heads))](
        k_new, v_new, kv.k, kv.v, slot_mapping, num_tokens,
        k_new.stride(0), k_new.stride(1), v_new.stride(0), v_new.stride(1),
        kv.k.stride(0), kv.k.stride(1), kv.k.stride(2), kv.v.stride(0), kv.v.stride(1), kv.v.stride(2),
        NUM_HEADS=num_heads, TOKENS=tokens, HEADS=heads, DIM_K=dim_k, DIM_V=dim_v, DIM=dim, BLOCK_SIZE=kv.block_size,
    )  # fmt: skip
