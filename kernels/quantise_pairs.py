"""The int4 quantiser of 16-bit K and V, two numbers at a time; with the codes and scales of labkit.quant, bit for bit.

One number at a time, writing int4 is bound by the number of its instructions, not by memory. So two channels side by
side stay one 32-bit word for as long as they can, and each step is the cheapest that is still exact:

    extremes     `min.bf16x2`: two numbers an instruction. float16 too: its finite numbers, their bits read as bfloat16,
                 are finite and in the same order.
    x / scale    x r + x r', where r + r' is 1 / scale to almost twice the precision: one instruction fewer than a
                 quotient and its correction (quantise.py).
    rounding     times 2^-149, the unit of the smallest float32s: what is left is an integer, and so are its bits.
    clamp, pack  `cvt.pack.sat.u4`: two integers to two nibbles, saturated, below those of an earlier one.

That is for codes of 0 to 15 with a zero point, and one scale a channel of a block or a row of a token; symmetric codes,
rows in several groups and float32 take quantise.py.

Why the quotient rounds to the same integer as that of a division: it is off by less than 2^-44 of itself. x / scale is
k + 1/2, or else at least half a unit of float32 and another 2^-35 of itself away from it. (A scale has 11 bits and
k + 1/2 has 5, so k + 1/2 scales are a float32; x is another one, a unit of x away.) So no rounding to float32 crosses
a half or lands on one, and a half itself is found exactly. tests/kernel/test_quantise_pairs.py tries the digits of
every scale.

PTX: https://docs.nvidia.com/cuda/parallel-thread-execution (min, rcp, cvt.pack)
"""

from __future__ import annotations

import triton
import triton.language as tl

from .quantise import LARGEST_FP16, QUOTIENT, CodeFormat, saturated
from .softmax import INTERPRETED

TWO_INFINITIES = tl.constexpr(0x7F807F80)
TWO_NEGATIVE_INFINITIES = tl.constexpr(0xFF80FF80 - 2**32)  # as int32

# r, r' = r (1 - r scale): rcp.approx is right to a unit in the last place, the sum to the square of it.
RECIPROCAL_AND_REST = tl.constexpr("""{ .reg .f32 r, e; rcp.approx.ftz.f32 r, $2; neg.f32 e, $2;
fma.rn.f32 e, e, r, 0f3F800000; mul.rn.f32 $1, e, r; mov.f32 $0, r; }""")
ROUNDED_QUOTIENT = tl.constexpr("""{ .reg .f32 q; mul.rn.f32 q, $1, $3; fma.rn.f32 q, $1, $2, q;
mul.rn.f32 q, q, 0f00000001; mov.b32 $0, q; }""")  # negative ones keep their sign bit: they are negative integers too
NIBBLES = tl.constexpr("""{ .reg .b32 upper; cvt.pack.sat.u4.s32.b32 upper, $4, $3, 0;
cvt.pack.sat.u4.s32.b32 $0, $2, $1, upper; }""")


@triton.jit
def both(words, dtype: tl.dtype):
    """The two numbers of each word as float32, the one in the low half first."""
    if dtype == tl.bfloat16:  # the upper half of a float32
        first = (words << 16).to(tl.float32, bitcast=True)
        second = (words & -0x10000).to(tl.float32, bitcast=True)
    else:
        first = words.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        second = (words >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    return first, second


@triton.jit
def least(a, b):
    return tl.inline_asm_elementwise("min.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def most(a, b):
    return tl.inline_asm_elementwise("max.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def extremes_of_pairs(words, more, inside, dtype: tl.dtype, AXIS: tl.constexpr):
    """Smallest first and second number along an axis, then the largest ones; of the words in `more`, too, or None."""
    if INTERPRETED:
        first, second = both(words, dtype)
        low_1 = tl.min(tl.where(inside, first, float("inf")), AXIS, keep_dims=True)
        low_2 = tl.min(tl.where(inside, second, float("inf")), AXIS, keep_dims=True)
        high_1 = tl.max(tl.where(inside, first, float("-inf")), AXIS, keep_dims=True)
        high_2 = tl.max(tl.where(inside, second, float("-inf")), AXIS, keep_dims=True)
        if more is not None:
            a, b, c, d = extremes_of_pairs(more, None, inside, dtype, AXIS)
            low_1, low_2 = tl.minimum(low_1, a), tl.minimum(low_2, b)
            high_1, high_2 = tl.maximum(high_1, c), tl.maximum(high_2, d)
    else:
        low, high = words, words
        if more is not None:
            low, high = least(words, more), most(words, more)
        low = tl.reduce(tl.where(inside, low, TWO_INFINITIES), AXIS, least, keep_dims=True)
        high = tl.reduce(tl.where(inside, high, TWO_NEGATIVE_INFINITIES), AXIS, most, keep_dims=True)
        low_1, low_2 = both(low, dtype)
        high_1, high_2 = both(high, dtype)
    return low_1, low_2, high_1, high_2


@triton.jit
def stored_scale(low, high, pages, at, ok, FORMAT: CodeFormat):
    """Scale and zero point of a group, as stored, in float32."""
    zero_point = saturated(low, pages.zero_points.dtype.element_ty)
    tl.store(pages.zero_points + at, zero_point, mask=ok)
    spread = tl.minimum(high - low, FORMAT.largest * LARGEST_FP16)  # the largest scale
    if INTERPRETED:
        scale = tl.div_rn(spread, FORMAT.largest)
    else:  # exact where float16 does not make 0 of it
        largest = tl.full(spread.shape, FORMAT.largest, tl.float32)
        r = tl.full(spread.shape, 1.0 / FORMAT.largest, tl.float32)
        scale = tl.inline_asm_elementwise(
            QUOTIENT, "=f,f,f,f", [spread, largest, r], dtype=tl.float32, is_pure=True, pack=1
        )
    scale = scale.to(pages.scales.dtype.element_ty)
    scale = tl.where(scale > 0.0, scale, 1.0).to(scale.dtype)  # a box of zeros has scale 1
    tl.store(pages.scales + at, scale, mask=ok)
    return scale.to(tl.float32), zero_point.to(tl.float32)


@triton.jit
def rounded(x, scale, zero_point):
    """(x - zero_point) / scale to the nearest integer, as int32; below 0 and above 15 only the side is right."""
    x = x - zero_point
    if INTERPRETED:
        codes = tl.clamp(tl.div_rn(x, scale), -1.0, 16.0)
        codes = (codes + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000  # 1.5 * 2^23
    else:
        r, rest = tl.inline_asm_elementwise(
            RECIPROCAL_AND_REST, "=f,=f,f", [scale], dtype=(tl.float32, tl.float32), is_pure=True, pack=1
        )
        codes = tl.inline_asm_elementwise(
            ROUNDED_QUOTIENT, "=r,f,f,f", [x, r, rest], dtype=tl.int32, is_pure=True, pack=1
        )
    return codes


@triton.jit
def nibbles(a, b, c, d):
    """Four integers, clamped to 0 ... 15, as the two bytes b a and d c of a word, the lowest nibble first."""
    if INTERPRETED:
        word = clamped(a) | clamped(b) << 4 | clamped(c) << 8 | clamped(d) << 12
    else:
        word = tl.inline_asm_elementwise(NIBBLES, "=r,r,r,r,r", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1)
    return word


@triton.jit
def clamped(code):
    return tl.minimum(tl.maximum(code, 0), 15)


@triton.jit
def pair_codes(words, words_high, inside, pages, scale_at, scale_ok, dtype: tl.dtype, FORMAT: CodeFormat):
    """Two bytes of codes, in an int32, of each word of the low and of the high nibbles' half; scales are stored."""
    if FORMAT.one_group:
        low_1, low_2, high_1, high_2 = extremes_of_pairs(words, words_high, inside, dtype, 2)
        scale_1, zero_1 = stored_scale(
            tl.minimum(low_1, low_2), tl.maximum(high_1, high_2), pages, scale_at, scale_ok, FORMAT
        )
        scale_2, scale_3, scale_4 = scale_1, scale_1, scale_1
        zero_2, zero_3, zero_4 = zero_1, zero_1, zero_1
    else:
        half: tl.constexpr = 2 * FORMAT.groups
        low_1, low_2, high_1, high_2 = extremes_of_pairs(words, None, inside, dtype, 0)
        scale_1, zero_1 = stored_scale(low_1, high_1, pages, scale_at, scale_ok, FORMAT)
        scale_2, zero_2 = stored_scale(low_2, high_2, pages, scale_at + 1, scale_ok, FORMAT)
        low_1, low_2, high_1, high_2 = extremes_of_pairs(words_high, None, inside, dtype, 0)
        scale_3, zero_3 = stored_scale(low_1, high_1, pages, scale_at + half, scale_ok, FORMAT)
        scale_4, zero_4 = stored_scale(low_2, high_2, pages, scale_at + half + 1, scale_ok, FORMAT)
    first, second = both(words, dtype)
    first_high, second_high = both(words_high, dtype)
    return nibbles(
        rounded(first, scale_1, zero_1),
        rounded(first_high, scale_3, zero_3),
        rounded(second, scale_2, zero_2),
        rounded(second_high, scale_4, zero_4),
    )
