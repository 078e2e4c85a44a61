"""Rotary position, fused with the KV write.

    qkv row of one token   │ q 0 │ q 1 │ ... │ k 0 │ ... │ v 0 │ ... │     one row of the merged projection
                              └──rotate───┬─────┴─rotate──┬─────┴──copy──┐
                                          ▼               ▼              ▼
                                   q [tokens, Hq, D]   k pages        v pages      at slot_mapping[token]

Rotation follows transformers' `rotate_half`: number i of a head is paired with number i + D/2 (not with i + 1).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from .pages import KVPages, check_slot_mapping


@functools.cache
def launch_options(device: torch.device) -> dict[str, Any]:
    """EARLY: whether a kernel may be launched while the one before it still runs, and waits for it on the device.

    Programmatic dependent launch (CUDA programming guide, "programmatic dependent launch and synchronization"), compute
    capability 9.0 and newer. Every kernel that is launched so waits before its first load, as any input, a weight
    too, may come from the kernel before.
    """
    early = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}


@triton.jit
def rope_cos_sin_kernel(
    position_ids, inv_freq, cos, sin, scaling, HALF: tl.constexpr, WIDTH: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    if EARLY:
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, WIDTH)
    inside = i < HALF
    angle = tl.load(position_ids + token).to(tl.float32) * tl.load(inv_freq + i, mask=inside, other=0.0)
    c, s = tl.cos(angle) * scaling, tl.sin(angle) * scaling
    for half in tl.static_range(2):  # both halves of a head turn by the same angles
        tl.store(cos + token * (2 * HALF) + half * HALF + i, c, mask=inside)
        tl.store(sin + token * (2 * HALF) + half * HALF + i, s, mask=inside)


def rope_cos_sin(
    position_ids: torch.Tensor, inv_freq: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of every token's rotation angles, times `scaling` (1 except for YaRN and its kin).

    position_ids: integers [num_tokens]. inv_freq: float32 [D / 2]. Returns two float32 [num_tokens, D], the
    second half of each row repeating the first.
    """
    if position_ids.ndim != 1 or not position_ids.is_contiguous():
        raise ValueError(f"position_ids must be contiguous [num_tokens], got shape {tuple(position_ids.shape)}")
    if inv_freq.dtype != torch.float32:
        raise TypeError(f"inv_freq must be float32, got {inv_freq.dtype}")
    num_tokens, half = position_ids.shape[0], inv_freq.shape[0]
    cos = torch.empty(num_tokens, 2 * half, dtype=torch.float32, device=position_ids.device)
    sin = torch.empty_like(cos)
    if num_tokens:
        rope_cos_sin_kernel[(num_tokens,)](
            position_ids, inv_freq, cos, sin, scaling,
            HALF=half, WIDTH=triton.next_power_of_2(half), num_warps=1, **launch_options(cos.device),
        )  # fmt: skip
    return cos, sin


@triton.jit
def load_rotated(
    qkv, cos, sin, q_norm, k_norm, eps, qkv_token, cos_token, sin_token,
    NUM_Q_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEADS: tl.constexpr,
    HALF: tl.constexpr, WIDTH: tl.constexpr, NORM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """HEADS heads of one token as two float32 halves [HEADS, WIDTH]: q and k normed and rotated, v as it is.

    Returns (first half, second half, head [HEADS, 1], i [1, WIDTH], mask of i).
    """
    if EARLY:
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    i = tl.arange(0, WIDTH)[None, :]
    inside = (i < HALF) & (head < NUM_Q_HEADS + 2 * NUM_KV_HEADS)
    row = qkv + token * qkv_token + head * (2 * HALF)
    a = tl.load(row + i, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(row + HALF + i, mask=inside, other=0.0).to(tl.float32)
    is_v = head >= NUM_Q_HEADS + NUM_KV_HEADS
    if NORM:
        is_q = head < NUM_Q_HEADS
        scale = tl.rsqrt(tl.sum(a * a + b * b, axis=1) / (2 * HALF) + eps)[:, None]
        gain_a = tl.where(
            is_q, tl.load(q_norm + i, mask=i < HALF, other=0.0), tl.load(k_norm + i, mask=i < HALF, other=0.0)
        ).to(tl.float32)
        gain_b = tl.where(
            is_q,
            tl.load(q_norm + HALF + i, mask=i < HALF, other=0.0),
            tl.load(k_norm + HALF + i, mask=i < HALF, other=0.0),
        ).to(tl.float32)
        a = tl.where(is_v, a, a * scale * gain_a)
        b = tl.where(is_v, b, b * scale * gain_b)
    cos_a = tl.load(cos + token * cos_token + i, mask=i < HALF, other=0.0).to(tl.float32)
    cos_b = tl.load(cos + token * cos_token + HALF + i, mask=i < HALF, other=0.0).to(tl.float32)
    sin_a = tl.load(sin + token * sin_token + i, mask=i < HALF, other=0.0).to(tl.float32)
    sin_b = tl.load(sin + token * sin_token + HALF + i, mask=i < HALF, other=0.0).to(tl.float32)
    rotated_a = tl.where(is_v, a, a * cos_a - b * sin_a)
    rotated_b = tl.where(is_v, b, b * cos_b + a * sin_b)
    return rotated_a, rotated_b, head, i, inside


@triton.jit
def rope_kernel(
    qkv, cos, sin, q_norm, k_norm, eps, qkv_token, cos_token, sin_token,
    NUM_Q_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEADS: tl.constexpr,
    HALF: tl.constexpr, WIDTH: tl.constexpr, NORM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (token, group of heads) rotates in place."""
    a, b, head, i, inside = load_rotated(
        qkv, cos, sin, q_norm, k_norm, eps, qkv_token, cos_token, sin_token,
        NUM_Q_HEADS, NUM_KV_HEADS, HEADS, HALF, WIDTH, NORM, EARLY,
    )  # fmt: skip
    row = qkv + tl.program_id(0).to(tl.int64) * qkv_token + head * (2 * HALF)
    inside = inside & (head < NUM_Q_HEADS + NUM_KV_HEADS)
    tl.store(row + i, a.to(qkv.dtype.element_ty), mask=inside)
    tl.store(row + HALF + i, b.to(qkv.dtype.element_ty), mask=inside)


@triton.jit
def rope_and_write_kv_kernel(
    qkv, cos, sin, q_norm, k_norm, eps, qkv_token, cos_token, sin_token,
    q, k, v, slot_mapping, k_block, k_head, k_slot, v_block, v_head, v_slot,
    NUM_Q_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEADS: tl.constexpr,
    HALF: tl.constexpr, WIDTH: tl.constexpr, NORM: tl.constexpr, EARLY: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Program (token, group of heads): one tile, three masked stores; a head is in q, in k or in v."""
    a, b, head, i, inside = load_rotated(
        qkv, cos, sin, q_norm, k_norm, eps, qkv_token, cos_token, sin_token,
        NUM_Q_HEADS, NUM_KV_HEADS, HEADS, HALF, WIDTH, NORM, EARLY,
    )  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    is_q = inside & (head < NUM_Q_HEADS)
    q_row = q + (token * NUM_Q_HEADS + head) * (2 * HALF)
    tl.store(q_row + i, a.to(q.dtype.element_ty), mask=is_q)
    tl.store(q_row + HALF + i, b.to(q.dtype.element_ty), mask=is_q)

    slot = tl.load(slot_mapping + token)
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    kv_head = head - NUM_Q_HEADS
    is_k = inside & (slot >= 0) & (kv_head >= 0) & (kv_head < NUM_KV_HEADS)
    k_row = k + block * k_block + kv_head * k_head + offset * k_slot
    tl.store(k_row + i, a.to(k.dtype.element_ty), mask=is_k)
    tl.store(k_row + HALF + i, b.to(k.dtype.element_ty), mask=is_k)

    kv_head = kv_head - NUM_KV_HEADS
    is_v = inside & (slot >= 0) & (kv_head >= 0)
    v_row = v + block * v_block + kv_head * v_head + offset * v_slot
    tl.store(v_row + i, a.to(v.dtype.element_ty), mask=is_v)
    tl.store(v_row + HALF + i, b.to(v.dtype.element_ty), mask=is_v)


def rope(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    num_q_heads: int,
    num_kv_heads: int,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotate q and k inside qkv, in place, and return views of q, k and v.

    For caches that store something other than plain K and V (quantised); otherwise use `rope_and_write_kv`, which
    has the arguments explained. Returns [num_tokens, num_heads, D] views of qkv: rotated q, rotated k, v.
    """
    head_dim = check_rope_inputs(qkv, cos, sin, num_q_heads, num_kv_heads, q_norm, k_norm)
    if qkv.shape[0]:
        grid, arguments, constants = rope_launch(
            qkv, cos, sin, num_q_heads, num_kv_heads, head_dim, q_norm, k_norm, eps
        )
        rope_kernel[grid](*arguments, **constants)
    heads = qkv.unflatten(1, (-1, head_dim))
    q, k, v = heads.split([num_q_heads, num_kv_heads, num_kv_heads], dim=1)
    return q, k, v


def rope_and_write_kv(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv: KVPages,
    slot_mapping: torch.Tensor,
    num_q_heads: int,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Rotate q and k by position (Su et al. 2021) and write k and v into their slots, in one launch.

    qkv: [num_tokens, (num_q_heads + 2 * num_kv_heads) * D], D even: the merged projection, q then k then v.
    cos, sin: [num_tokens, D], any float dtype, as transformers' rotary embedding gives them.
    kv: pages [num_blocks, num_kv_heads, block_size, D], contiguous along D; written in their own dtype.
    slot_mapping: int64 [num_tokens], slot = block * block_size + offset; -1 writes nothing (a padded row).
    q_norm, k_norm: [D], RMSNorm weights applied to every head before rotating (Qwen3), with `eps`; both or neither.

    Returns rotated q, [num_tokens, num_q_heads, D], qkv's dtype. Raises TypeError or ValueError naming the argument.
    """
    head_dim = check_rope_inputs(qkv, cos, sin, num_q_heads, kv.num_kv_heads, q_norm, k_norm)
    check_slots(qkv, kv, slot_mapping, head_dim)
    q = qkv.new_empty(qkv.shape[0], num_q_heads, head_dim)
    if qkv.shape[0]:
        grid, arguments, constants = rope_launch(
            qkv, cos, sin, num_q_heads, kv.num_kv_heads, head_dim, q_norm, k_norm, eps
        )
        rope_and_write_kv_kernel[grid](
            *arguments, q, kv.k, kv.v, slot_mapping,
            kv.k.stride(0), kv.k.stride(1), kv.k.stride(2), kv.v.stride(0), kv.v.stride(1), kv.v.stride(2),
            **constants, BLOCK_SIZE=kv.block_size,
        )  # fmt: skip
    return q


def rope_launch(qkv, cos, sin, num_q_heads, num_kv_heads, head_dim, q_norm, k_norm, eps):
    """What both rope kernels share: (grid, arguments, constants)."""
    half = head_dim // 2
    width = triton.next_power_of_2(half)
    all_heads = num_q_heads + 2 * num_kv_heads
    heads = min(triton.next_power_of_2(all_heads), max(1, 1024 // width))
    no_norm = q_norm is None
    arguments = (
        qkv, cos, sin, qkv if no_norm else q_norm, qkv if no_norm else k_norm, eps,
        qkv.stride(0), cos.stride(0), sin.stride(0),
    )  # fmt: skip
    constants = {
        "NUM_Q_HEADS": num_q_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEADS": heads,
        "HALF": half,
        "WIDTH": width,
        "NORM": not no_norm,
    } | launch_options(qkv.device)
    return (qkv.shape[0], triton.cdiv(all_heads, heads)), arguments, constants


def check_rows(name: str, x: torch.Tensor) -> tuple[int, int]:
    if x.ndim != 2 or x.stride(1) != 1:
        raise ValueError(f"{name} must be 2-D and contiguous along its columns, got {tuple(x.shape)}, {x.stride()}")
    return x.shape[0], x.shape[1]


def check_rope_inputs(qkv, cos, sin, num_q_heads, num_kv_heads, q_norm, k_norm) -> int:
    """head_dim, or ValueError naming the argument that does not fit."""
    num_tokens, size = check_rows("qkv", qkv)
    head_dim, rest = divmod(size, num_q_heads + 2 * num_kv_heads)
    if rest or head_dim % 2:
        raise ValueError(
            f"qkv has {size} columns, which is not an even head_dim times {num_q_heads} + 2 * {num_kv_heads} heads"
        )
    for name, table in (("cos", cos), ("sin", sin)):
        if table.shape != (num_tokens, head_dim) or table.stride(1) != 1:
            raise ValueError(
                f"{name} must be [{num_tokens}, {head_dim}], contiguous along head_dim, got {tuple(table.shape)}"
            )
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm must be given both or not at all")
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None and weight.shape != (head_dim,):
            raise ValueError(f"{name} must be [{head_dim}], got {tuple(weight.shape)}")
    return head_dim


def check_slots(qkv: torch.Tensor, kv: KVPages, slot_mapping: torch.Tensor, head_dim: int) -> None:
    check_slot_mapping(slot_mapping, qkv.shape[0])
    if kv.k.shape[3] != head_dim or kv.v.shape != kv.k.shape:
        raise ValueError(f"kv pages {tuple(kv.k.shape)}, {tuple(kv.v.shape)} do not fit head_dim {head_dim}")
    if kv.k.stride(3) != 1 or kv.v.stride(3) != 1:
        raise ValueError("kv.k and kv.v must be contiguous along head_dim")
