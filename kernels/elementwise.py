"""The small kernels between the matrix products of a Llama layer: norm, gated activation, rotary position.

Each reads its input once and writes its output once; in eager torch the same work is six to ten launches.
Arithmetic is float32 whatever the dtype, rounded once at the end. The rotary kernels are in rope.py;
`elementwise_reference` has the same functions in plain torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from .rope import check_rows, launch_options, rope, rope_and_write_kv, rope_cos_sin

__all__ = ["rms_norm", "rope", "rope_and_write_kv", "rope_cos_sin", "silu_mul"]


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    x, weight, out, num_rows, x_row, eps,
    SIZE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program owns ROWS whole rows, so nothing crosses programs."""
    if EARLY:
        gdc_wait()
    column = tl.arange(0, WIDTH)[None, :]
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    inside = (row < num_rows) & (column < SIZE)
    values = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
    gain = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=1) / SIZE + eps)
    result = values * scale[:, None] * gain
    tl.store(out + row * SIZE + column, result.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last axis (Zhang and Sennrich 2019, equation 4).

    x: [num_tokens, hidden_size], contiguous along hidden_size. weight: [hidden_size]. Returns x's shape and dtype.
    """
    num_tokens, size = check_rows("x", x)
    if weight.shape != (size,):
        raise ValueError(f"weight must be [{size}], got {tuple(weight.shape)}")
    out = x.new_empty(num_tokens, size)
    if num_tokens == 0:
        return out
    width = triton.next_power_of_2(size)
    rows = max(1, 2048 // width)
    rms_norm_kernel[(triton.cdiv(num_tokens, rows),)](
        x, weight, out, num_tokens, x.stride(0), eps,
        SIZE=size, ROWS=rows, WIDTH=width, num_warps=min(16, max(4, width // 512)), **launch_options(x.device),
    )  # fmt: skip
    return out


@triton.jit
def silu_mul_kernel(
    gate_up, out, row_stride, SIZE: tl.constexpr, WIDTH: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    if EARLY:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < SIZE
    gate = tl.load(gate_up + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + SIZE + column, mask=inside, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * SIZE + column, result.to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, the SwiGLU gate (Shazeer 2020), from one merged projection.

    gate_up: [num_tokens, 2 * intermediate_size], gate in the first half. Returns [num_tokens, intermediate_size].
    """
    num_tokens, size = check_rows("gate_up", gate_up)
    if size % 2:
        raise ValueError(f"gate_up must have an even number of columns, got {size}")
    out = gate_up.new_empty(num_tokens, size // 2)
    if num_tokens == 0:
        return out
    width = min(1024, triton.next_power_of_2(size // 2))
    silu_mul_kernel[(num_tokens, triton.cdiv(size // 2, width))](
        gate_up, out, gate_up.stride(0), SIZE=size // 2, WIDTH=width, **launch_options(gate_up.device)
    )
    return out
