"""Reading quantised pages inside a kernel: codes to 16-bit numbers in registers, and where their scales lie.

    value = (code - CENTRE) scale + offset        offset = zero_point + CENTRE scale, or 0 for symmetric codes

Tiles hold `code - CENTRE`, a small integer (or a float8 number) that float16 represents exactly; scale and offset stay
out of the tiles where the algebra allows it, and are applied to them where it does not:

    "fixed"     all tokens share it         K: q scale, once                        V: out scale, once
    "token"     each key has its own        K: score = (q . code) scale + sum(q) offset
                                            V: out = sum_n (p_n scale_n) code_n + sum_n p_n offset_n
    "channel"   the tokens of a block do    the tile: code scale + offset, one instruction for two numbers
    "group"     each key and group          the same, and a scale for each key

Turning integers to floats one by one is slow. Here a byte becomes the low bits of a float16 whose exponent makes their
unit 1:    0x64cc = 1024 + cc   so   float16(0x64cc) - (1024 + CENTRE) = cc - CENTRE,   two numbers an instruction.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .pages import QuantisedPages
from .softmax import INTERPRETED


class StoredPages(NamedTuple):
    """K or V pages as one kernel argument: pointers, and strides in elements (0 along an axis of shared scales).

    codes: [num_blocks, num_kv_heads, block_size, bytes or numbers]. scales, zero_points: [.., .., .., groups], both
    with the same strides, or None. tail: 16-bit numbers of blocks that are not full yet, or None.
    """

    codes: Any
    block: Any
    head: Any
    slot: Any
    scales: Any = None
    zero_points: Any = None
    scale_block: Any = None
    scale_head: Any = None
    scale_slot: Any = None
    tail: Any = None
    tail_row: Any = None
    tail_head: Any = None
    tail_slot: Any = None


def stored(pages: torch.Tensor | QuantisedPages, tail: torch.Tensor | None = None) -> StoredPages:
    """Pages, or plain 16-bit pages, as a kernel takes them."""
    if isinstance(pages, torch.Tensor):
        pages = QuantisedPages(pages)
    at: tuple[Any, ...] = (pages.codes, *pages.codes.stride()[:3], None, None, None, None, None)
    if pages.scales is not None:
        strides = (s if n > 1 else 0 for s, n in zip(pages.scales.stride()[:3], pages.scales.shape[:3], strict=True))
        at = (*at[:4], pages.scales, pages.zero_points, *strides)
    return StoredPages(*at) if tail is None else StoredPages(*at, tail, *tail.stride()[:3])


def scale_kind(pages: torch.Tensor | QuantisedPages) -> str:
    """What shares a scale: "none", "fixed", "token", "channel" or "group" (the table above).

    A kernel takes it as a constant and compiles the cheapest algebra for it.
    """
    if isinstance(pages, torch.Tensor) or pages.scales is None:
        return "none"
    blocks, _, slots, groups = pages.scales.shape
    if blocks == slots == 1:
        return "fixed"
    if groups == 1:
        return "token"
    return "channel" if slots == 1 else "group"


def is_int4(pages: torch.Tensor | QuantisedPages, head_dim: int) -> bool:
    """Two codes a byte: channel j in the low nibble of byte j, channel j + head_dim / 2 in the high one."""
    return not isinstance(pages, torch.Tensor) and pages.codes.shape[3] != head_dim


def channels_a_scale(pages: torch.Tensor | QuantisedPages, head_dim: int) -> int:
    """Channels in a row that share a scale: head_dim over the number of groups."""
    return head_dim if isinstance(pages, torch.Tensor) or pages.scales is None else head_dim // pages.scales.shape[3]


# Four bytes in one register -> two registers of two float16 each.
BYTE_TO_F16 = tl.constexpr("""{ .reg .b32 magic, centre, a, b;
mov.b32 magic, 0x64646464; mov.b32 centre, 0x64806480;
prmt.b32 a, $2, magic, 0x4140; prmt.b32 b, $2, magic, 0x4342;
sub.rn.f16x2 $0, a, centre; sub.rn.f16x2 $1, b, centre; }""")
SIGNED_BYTE_TO_F16 = tl.constexpr("""{ .reg .b32 magic, centre, a, b, x;
xor.b32 x, $2, 0x80808080; mov.b32 magic, 0x64646464; mov.b32 centre, 0x64806480;
prmt.b32 a, x, magic, 0x4140; prmt.b32 b, x, magic, 0x4342;
sub.rn.f16x2 $0, a, centre; sub.rn.f16x2 $1, b, centre; }""")
E4M3_TO_F16 = tl.constexpr("""{ .reg .b16 a, b;
mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }""")
E5M2_TO_F16 = tl.constexpr("""{ .reg .b32 zero; mov.b32 zero, 0;
prmt.b32 $0, $2, zero, 0x1404; prmt.b32 $1, $2, zero, 0x3424; }""")  # e5m2 is the upper byte of a float16
LOW_NIBBLE_TO_F16 = tl.constexpr("""{ .reg .b32 magic, centre, a, b, x;
and.b32 x, $2, 0x0f0f0f0f; mov.b32 magic, 0x64646464; mov.b32 centre, 0x64086408;
prmt.b32 a, x, magic, 0x4140; prmt.b32 b, x, magic, 0x4342;
sub.rn.f16x2 $0, a, centre; sub.rn.f16x2 $1, b, centre; }""")
# High nibbles stay where they are, as 16 times their value: (1024 + 16 n) / 16 - (64 + 8).
HIGH_NIBBLE_TO_F16 = tl.constexpr("""{ .reg .b32 magic, sixteenth, centre, a, b, x;
and.b32 x, $2, 0xf0f0f0f0; mov.b32 magic, 0x64646464; mov.b32 sixteenth, 0x2c002c00; mov.b32 centre, 0xd480d480;
prmt.b32 a, x, magic, 0x4140; prmt.b32 b, x, magic, 0x4342;
fma.rn.f16x2 $0, a, sixteenth, centre; fma.rn.f16x2 $1, b, sixteenth, centre; }""")


@triton.jit
def four_bytes(codes, ASM: tl.constexpr, MOVABLE: tl.constexpr):
    """Run one of the conversions above; not MOVABLE: where the bytes are, not where the compiler would take them."""
    return tl.inline_asm_elementwise(ASM, "=r,=r,r", [codes], dtype=tl.float16, is_pure=MOVABLE, pack=4)


@triton.jit
def unpack(codes, dtype: tl.constexpr, MOVABLE: tl.constexpr = True):
    """A tile of int8, uint8, float8 or wider numbers -> code - CENTRE as `dtype` (exact in float16 and wider).

    The tile of a product's first operand, K, wants MOVABLE: its bytes go to the lanes of the product as they are. V's
    does not: its columns are read across, which the hardware does for 16-bit numbers but not for bytes.
    """
    FAST: tl.constexpr = dtype == tl.float16 and not INTERPRETED
    if FAST and codes.dtype == tl.int8:
        tile = four_bytes(codes, SIGNED_BYTE_TO_F16, MOVABLE)
    elif FAST and codes.dtype == tl.uint8:
        tile = four_bytes(codes, BYTE_TO_F16, MOVABLE)
    elif FAST and codes.dtype == tl.float8e4nv:
        tile = four_bytes(codes.to(tl.uint8, bitcast=True), E4M3_TO_F16, MOVABLE)
    elif FAST and codes.dtype == tl.float8e5:
        tile = four_bytes(codes.to(tl.uint8, bitcast=True), E5M2_TO_F16, MOVABLE)
    elif codes.dtype == tl.uint8:
        tile = (codes.to(tl.float32) - 128.0).to(dtype)
    else:
        tile = codes.to(dtype)
    return tile


@triton.jit
def unpack_int4(codes, dtype: tl.constexpr, MOVABLE: tl.constexpr = True):
    """A tile of bytes -> two tiles of `dtype`, code - 8: the first and the second half of the channels."""
    if dtype == tl.float16 and not INTERPRETED:
        low = four_bytes(codes, LOW_NIBBLE_TO_F16, MOVABLE)
        high = four_bytes(codes, HIGH_NIBBLE_TO_F16, MOVABLE)
    else:
        low = ((codes & 15).to(tl.float32) - 8.0).to(dtype)
        high = ((codes >> 4).to(tl.float32) - 8.0).to(dtype)
    return low, high


@triton.jit
def load_scale(pages, at, mask, dtype: tl.constexpr):
    """Scales at offsets `at` into pages.scales, shaped like `at`; mask None: all of them exist.

    at: block * pages.scale_block + head * pages.scale_head + offset in block * pages.scale_slot + group of channels.
    """
    scale = tl.load(pages.scales + at) if mask is None else tl.load(pages.scales + at, mask=mask, other=0.0)
    return scale.to(dtype)


@triton.jit
def load_offset(pages, at, mask, scale, INT4: tl.constexpr):
    """What a code of CENTRE stands for, where the format has zero points (pages.zero_points is not None)."""
    CENTRE: tl.constexpr = 8.0 if INT4 else (128.0 if pages.codes.dtype.element_ty == tl.uint8 else 0.0)
    zeros = pages.zero_points + at
    zero_point = tl.load(zeros) if mask is None else tl.load(zeros, mask=mask, other=0.0)
    return zero_point.to(scale.dtype) + scale * CENTRE


@triton.jit
def apply_scales(tile, pages, at, channel, channel_ok, CHANNELS: tl.constexpr, INT4: tl.constexpr):
    """A tile [keys, channels] of codes -> its values, for scales that neither q nor p can take.

    at: offset of each key's scales [keys, 1], or of those of all keys (a number). CHANNELS: that share a scale.
    """
    at += (channel // CHANNELS)[None, :]
    scale = load_scale(pages, at, channel_ok[None, :], tile.dtype)
    tile = tile * scale
    if pages.zero_points is not None:
        tile += load_offset(pages, at, channel_ok[None, :], scale, INT4)
    return tile
