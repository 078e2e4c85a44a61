"""The functions of `elementwise` in plain torch: the yardstick of its tests, and what runs on a CPU.

Same names, same arguments. Arithmetic is float32, or float64 for float64 inputs.
"""

from __future__ import annotations

import torch

from .pages import KVPages
from .rope import check_rope_inputs, check_rows, check_slots


def widen(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last axis: [..., size], weight [size]."""
    return torch.nn.functional.rms_norm(widen(x), x.shape[-1:], widen(weight), eps).to(x.dtype)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up: [num_tokens, 2 * size] -> [num_tokens, size]."""
    check_rows("gate_up", gate_up)
    gate, up = widen(gate_up).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def rope_cos_sin(
    position_ids: torch.Tensor, inv_freq: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of the rotation angles, times scaling: two [num_tokens, D]."""
    angle = (position_ids.to(inv_freq.dtype)[:, None] * inv_freq).repeat(1, 2)
    return angle.cos() * scaling, angle.sin() * scaling


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each pair (x[i], x[i + D/2]) by its angle; x [num_tokens, num_heads, D], cos and sin [num_tokens, D]."""
    a, b = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat([-b, a], dim=-1) * sin[:, None]


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
    """Rotate q and k inside qkv, in place; views of q, k and v."""
    head_dim = check_rope_inputs(qkv, cos, sin, num_q_heads, num_kv_heads, q_norm, k_norm)
    heads = qkv.unflatten(1, (-1, head_dim))
    q, k, v = heads.split([num_q_heads, num_kv_heads, num_kv_heads], dim=1)
    for x, weight in ((q, q_norm), (k, k_norm)):
        wide = widen(x)
        if weight is not None:
            wide = rms_norm(wide, weight, eps)
        x.copy_(rotate(wide, cos.to(wide.dtype), sin.to(wide.dtype)))
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
    """Rotated q [num_tokens, num_q_heads, D]; k and v go to their slots, -1 to none. Leaves qkv as it is."""
    q, k, v = rope(qkv.clone(), cos, sin, num_q_heads, kv.num_kv_heads, q_norm=q_norm, k_norm=k_norm, eps=eps)
    check_slots(qkv, kv, slot_mapping, q.shape[2])
    written = slot_mapping >= 0
    block = slot_mapping[written] // kv.block_size
    offset = slot_mapping[written] % kv.block_size
    kv.k[block, :, offset] = k[written].to(kv.k.dtype)
    kv.v[block, :, offset] = v[written].to(kv.v.dtype)
    return q.contiguous()
