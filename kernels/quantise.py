"""Quantising a tile inside a kernel, with the codes and scales of labkit.quant, bit for bit.

    code = clamp(round_half_even((x - zero_point) / scale))     float32, IEEE subtraction and division, scales as stored

Scales and zero points come from the extremes of their group: largest |x| / largest code, or (max - min) / largest code
and min.

Why each step is the instruction that it is, so that a GPU gives the bits of torch:

    x - zero_point       one FADD. Nothing here adds to a product, so the compiler has nothing to fuse into an FMA.
    spread / largest     `tl.div_rn`. Triton's `/` would be div.full.f32, 2 units in the last place off.
    ... / scale          the steps of div.rn.f32, with one reciprocal for the whole group (QUOTIENT, below).
    clamp                before the division, at largest code x scale: what lies beyond rounds to the largest code.
    round half to even   adding 1.5 x 2^23, where a float has no fraction left; the code is the sum's low byte.
    to fp8, to float16   cvt.rn: to nearest even, as torch; nothing that is out of range gets there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .dequantise import is_int4
from .pages import QuantisedPages
from .softmax import INTERPRETED

LARGEST_VALUE = tl.constexpr(2.0**126)  # what lies beyond saturates: no difference of two values overflows
LARGEST_FP16 = tl.constexpr(65504.0)
_SIGNED_CODES = {  # smallest, largest
    torch.int8: (-127.0, 127.0),
    torch.float8_e4m3fn: (-448.0, 448.0),
    torch.float8_e5m2: (-57344.0, 57344.0),
}


class CodeFormat(NamedTuple):
    """What a kernel knows of K's or V's format when it is compiled.

    A row of head_dim channels is loaded as one tile [groups, width], or for int4 as two: the low and the high nibbles.

    channels: of an element of a tile: 2 side by side (quantise_pairs.py), else 1; groups and width count elements.
    halves: 2 for int4, else 1. groups, width: of a half. one_group: both halves share a scale.
    parts: programs that share a row's groups, each with as many of either half.
    smallest, largest: code. measured: scales come from the values, not from before the run.
    """

    channels: int
    halves: int
    groups: int
    width: int
    parts: int
    one_group: bool
    smallest: float
    largest: float
    measured: bool


def code_format(new: torch.Tensor, pages: QuantisedPages, tail: torch.Tensor | None) -> CodeFormat:
    """The constants of a kernel that writes `new` [tokens, heads, head_dim] into these pages in one part.

    tail: where tokens wait for their block to fill, if they do. Raises ValueError for layouts it cannot write.
    """
    codes, scales, head_dim, has_tail = pages.codes, pages.scales, new.shape[2], tail is not None
    halves = 2 if is_int4(pages, head_dim) else 1
    blocks, heads, slots, groups = (1, 1, 1, 1) if scales is None else scales.shape
    measured = has_tail or blocks > 1 or slots > 1
    if measured and heads != codes.shape[1]:
        raise ValueError("kv: scales that several heads share must be fixed before the run")
    if measured and not has_tail and slots != codes.shape[2]:
        raise ValueError("kv: scales that span the tokens of a block need a tail")
    if halves == 2 and groups > 1 and groups % 2:
        raise ValueError(f"kv: int4 can be written with one scale a row or an even number, got {groups}")
    smallest, largest = _SIGNED_CODES.get(codes.dtype, (0.0, 0.0))
    if codes.dtype == torch.uint8:
        largest = 255.0 if halves == 1 else 15.0
        if halves == 2 and pages.zero_points is None:
            smallest, largest = -7.0, 7.0
    groups_of_half = max(1, groups // halves)
    width = head_dim // halves // groups_of_half
    pairs = measured and halves == 2 and _in_words(new, pages, tail) and (width == 1 if has_tail else groups == 1)
    if pairs:
        groups_of_half, width = (groups_of_half // 2, 1) if width == 1 else (1, width // 2)
    return CodeFormat(1 + pairs, halves, groups_of_half, width, 1, groups == 1, smallest, largest, measured)


def _in_words(new: torch.Tensor, pages: QuantisedPages, tail: torch.Tensor | None) -> bool:
    """Whether two channels of each half lie in an aligned word, and have scales and zero points of 16 bit."""
    scales, zero_points = pages.scales, pages.zero_points
    if scales is None or zero_points is None or not new.element_size() == scales.element_size() == 2:
        return False
    rows = [tensor for tensor in (new, tail, pages.codes) if tensor is not None]
    steps = [new.shape[2] // 2, *(stride for tensor in rows for stride in tensor.stride()[:-1])]
    begins = [tensor.data_ptr() // tensor.element_size() for tensor in rows]
    return zero_points.dtype == scales.dtype and not any(size % 2 for size in (*begins, *steps))


# Steps of a division that a compiler could otherwise fuse or reorder. ptxas expands div.rn.f32 into the same ones, a
# reciprocal and its refinement for each number, behind a test of exponents that is not needed for normalised scales.
RECIPROCAL = tl.constexpr("""{ .reg .f32 r, e; rcp.approx.ftz.f32 r, $1; neg.f32 e, $1; fma.rn.f32 e, e, r, 0f3F800000;
fma.rn.f32 $0, r, e, r; }""")
QUOTIENT = tl.constexpr("""{ .reg .f32 q, e; mul.rn.f32 q, $1, $3; neg.f32 e, $1; fma.rn.f32 e, q, $2, e;
neg.f32 e, e; fma.rn.f32 $0, e, $3, q; }""")  # q = x r; q - (q s - x) r, signed so that -0 stays -0


@triton.jit
def extremes(x, inside, zero_points, OVER_TOKENS: tl.constexpr):
    """Smallest and largest value of each group of x [rows, groups, width]; without zero points, of +-|x|."""
    if zero_points is None:
        high = tl.max(tl.abs(x), 2, keep_dims=True)  # what is not inside was loaded as 0
        if OVER_TOKENS:
            high = tl.max(high, 0, keep_dims=True)
        high = tl.minimum(high, LARGEST_VALUE)
        low = -high
    else:
        low = tl.min(tl.where(inside, x, float("inf")), 2, keep_dims=True)
        high = tl.max(tl.where(inside, x, float("-inf")), 2, keep_dims=True)
        if OVER_TOKENS:
            low = tl.min(low, 0, keep_dims=True)
            high = tl.max(high, 0, keep_dims=True)
        low = tl.clamp(low, -LARGEST_VALUE, LARGEST_VALUE)
        high = tl.clamp(high, -LARGEST_VALUE, LARGEST_VALUE)
    return low, high


@triton.jit
def saturated(x, dtype: tl.dtype):
    if dtype == tl.float16:
        x = tl.clamp(x, -LARGEST_FP16, LARGEST_FP16)
    return x.to(dtype)


@triton.jit
def on_fp8_grid(x, dtype: tl.dtype):
    """x rounded to a multiple of its unit in the last place as fp8: the interpreter's own cast loses carries."""
    smallest_normal = 2.0**-6 if dtype == tl.float8e4nv else 2.0**-14
    mantissa_shift = 2.0**20 if dtype == tl.float8e4nv else 2.0**21  # 23 bits of float32 less 3 or 2
    bits = x.to(tl.int32, bitcast=True)
    power = tl.maximum((bits & 0x7F800000).to(tl.float32, bitcast=True), smallest_normal)
    magic = power * (1.5 * mantissa_shift)
    rounded = tl.abs((tl.abs(x) + magic) - magic)
    return (rounded.to(tl.int32, bitcast=True) | (bits & -0x80000000)).to(tl.float32, bitcast=True)


@triton.jit
def in_units(x, scale, FORMAT: CodeFormat):
    """x / scale to the nearest float32, within the range of the codes.

    Scale and x are brought to where no step of the division can leave the range of float32: float32 scales to [1, 2) by
    the power of two that their exponent names (for those below 2^-126 it is the last one there is); float16 ones are.
    """
    s = scale.to(tl.float32)
    if INTERPRETED:
        y = tl.clamp(tl.div_rn(x, s), FORMAT.smallest, FORMAT.largest)
    else:
        if scale.dtype == tl.float32:
            exponent = s.to(tl.int32, bitcast=True) & 0x7F800000
            power = tl.maximum(0x7F000000 - exponent, 0x00800000).to(tl.float32, bitcast=True)
            x = x * power
            s = s * power
        limit = tl.broadcast_to(s * FORMAT.largest, x.shape)
        x = tl.clamp(x, 0.0 if FORMAT.smallest == 0.0 else -limit, limit)
        r = tl.inline_asm_elementwise(RECIPROCAL, "=f,f", [s], dtype=tl.float32, is_pure=True, pack=1)
        y = tl.inline_asm_elementwise(QUOTIENT, "=f,f,f,f", [x, s, r], dtype=tl.float32, is_pure=True, pack=1)
    return y


@triton.jit
def to_codes(x, scale, zero_point, dtype: tl.dtype, FORMAT: CodeFormat):
    """Codes of x, fp8 and 16 bit as they are stored, others in the low byte (int4: nibble) of int32."""
    if not FORMAT.measured:
        x = tl.clamp(x, -LARGEST_VALUE, LARGEST_VALUE)  # measured scales stand for what is clamped, and saturate
    if zero_point is not None:
        x = x - zero_point.to(tl.float32)
    if dtype.primitive_bitwidth > 8:
        codes = saturated(x, dtype)
    else:
        x = tl.clamp(x, FORMAT.smallest, FORMAT.largest) if scale is None else in_units(x, scale, FORMAT)
        if dtype.is_fp8():
            codes = (on_fp8_grid(x, dtype) if INTERPRETED else x).to(dtype)
        else:
            bias = 8.0 if FORMAT.halves == 2 and zero_point is None else 0.0  # nibbles are unsigned
            codes = (x + (12582912.0 + bias)).to(tl.int32, bitcast=True)  # 1.5 * 2^23
    return codes


@triton.jit
def half_codes(x, low, high, pages, scale_at, scale_ok, FORMAT: CodeFormat):
    """Codes of one half of the rows; its scales are stored, or read where they are fixed."""
    scale = None
    zero_point = None
    if pages.scales is not None:
        if FORMAT.measured:
            spread = high
            if pages.zero_points is not None:
                spread = high - low
                zero_point = saturated(low, pages.zero_points.dtype.element_ty)
                tl.store(pages.zero_points + scale_at, zero_point, mask=scale_ok)
            scale = saturated(tl.div_rn(spread, FORMAT.largest), pages.scales.dtype.element_ty)
            scale = tl.where(scale > 0.0, scale, 1.0).to(scale.dtype)  # a box of zeros has scale 1
            tl.store(pages.scales + scale_at, scale, mask=scale_ok)
        else:
            scale = tl.load(pages.scales + scale_at, mask=scale_ok, other=1.0)
            if pages.zero_points is not None:
                zero_point = tl.load(pages.zero_points + scale_at, mask=scale_ok, other=0.0)
    return to_codes(x, scale, zero_point, pages.codes.dtype.element_ty, FORMAT)


@triton.jit
def row_codes(x, x_high, inside, pages, scale_at, scale_ok, FORMAT: CodeFormat, OVER_TOKENS: tl.constexpr):
    """Codes of rows, given as their two halves; for int4 the halves are the nibbles of one byte, the lowest."""
    x = x.to(tl.float32)
    low, high = extremes(x, inside, pages.zero_points, OVER_TOKENS)
    if FORMAT.halves == 2:
        x_high = x_high.to(tl.float32)
        low_2, high_2 = extremes(x_high, inside, pages.zero_points, OVER_TOKENS)
        if FORMAT.one_group:
            low = tl.minimum(low, low_2)
            high = tl.maximum(high, high_2)
            codes_high = half_codes(x_high, low, high, pages, scale_at, scale_ok, FORMAT)
        else:
            codes_high = half_codes(x_high, low_2, high_2, pages, scale_at + FORMAT.groups, scale_ok, FORMAT)
        # A sum is one instruction; `|` would be two, as codes carry 2^23 (to_codes).
        codes = half_codes(x, low, high, pages, scale_at, scale_ok, FORMAT) + (codes_high << 4)
    else:
        codes = half_codes(x, low, high, pages, scale_at, scale_ok, FORMAT)
    return codes
