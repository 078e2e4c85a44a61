"""Reading quantised pages inside a kernel: codes to 16-bit numbers in registers, and where their scales lie.

    value = (code - CENTRE) scale + offset        offset = zero_point + CENTRE scale, or 0 for symmetric codes

Tiles hold `code - CENTRE`, a small integer (or a float8 number) that float16 represents exactly; scale and offset stay
out of the tiles wherever the algebra allows it (Hooper et al., KVQuant, arXiv 2401.18079; Liu et al., KIVI):

    scale a key (token)     K: score = (q . code) scale + sum(q) offset         V: out = sum_n (p_n scale_n) code_n
    scale a channel         K: score = (q scale) . code + q . offset            (q scale: once a block)

Turning integers to floats one by one is slow. Here a byte becomes the low bits of a float16 whose exponent makes their
unit 1:    0x64cc = 1024 + cc   so   float16(0x64cc) - (1024 + CENTRE) = cc - CENTRE,   two numbers an instruction.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .pages import QuantisedPages

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # the interpreter knows no PTX


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
    """What shares a scale: "none", "head" (all tokens), "token", "channel" (over a block's tokens), "group" (neither).

    A kernel takes it as a constant and compiles the cheapest algebra for it.
    """
    if isinstance(pages, torch.Tensor) or pages.scales is None:
        return "none"
    blocks, _, slots, groups = pages.scales.shape
    if groups > 1:
        return "channel" if slots == 1 else "group"
    return "head" if blocks == slots == 1 else "token"


def is_int4(pages: torch.Tensor | QuantisedPages, head_dim: int) -> bool:
    """Two codes a byte: channel j in the low nibble of byte j, channel j + head_dim / 2 in the high one."""
    return not isinstance(pages, torch.Tensor) and pages.codes.shape[3] != head_dim


# Four bytes in one register -> two registers of two float16 each.
BYTE_TO_F16 = tl.constexpr("""{ .reg .b32 magic, centre, a, b;
mov.b32 magic, 0x64646464; mov.b32 centre, 0x64806480;
prmt.b32 a, $2, magic, 0x4140; prmt.b32 b, $2, magic, 0x4342;
sub.rn.f16x2 $0, a, centre; sub.rn.f16x2 $1, b, centre; }""")
SIGNED_BYTE_TO_F16 = tl.constexpr("""{ .reg .b32 magic, centre, a, b, x;
xor.b32 x, $2, 0x80808080; mov.b32 magic, 0x64646464; mov.b32 centre, 0x64806480;
prmt.b32 a, x, magic, 0x4140; prmt.b32 b, x, magic, 0x4342;
sub.rn.f16x2 $0, a, centre; sub.rn.f16x2 $1, b, centre; }""")
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
def centre_of(codes, INT4: tl.constexpr):
    """The code that becomes 0 in a tile (a constant): 8 for int4, 128 for uint8, 0 for what has a sign."""
    return 8.0 if INT4 else (128.0 if codes.dtype.element_ty == tl.uint8 else 0.0)


@triton.jit
def unpack(codes, dtype: tl.constexpr):
    """A tile of int8, uint8, float8 or wider numbers -> code - CENTRE as `dtype` (exact in float16 and wider)."""
    if codes.dtype == tl.int8 and dtype == tl.float16 and not INTERPRETED:
        return tl.inline_asm_elementwise(SIGNED_BYTE_TO_F16, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)
    if codes.dtype == tl.uint8 and dtype == tl.float16 and not INTERPRETED:
        return tl.inline_asm_elementwise(BYTE_TO_F16, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)
    if codes.dtype == tl.uint8:
        return (codes.to(tl.float32) - 128.0).to(dtype)
    return codes.to(dtype)


@triton.jit
def unpack_int4(codes, dtype: tl.constexpr):
    """A tile of bytes -> two tiles of `dtype`, code - 8: the first and the second half of the channels."""
    if dtype == tl.float16 and not INTERPRETED:
        low = tl.inline_asm_elementwise(LOW_NIBBLE_TO_F16, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)
        high = tl.inline_asm_elementwise(HIGH_NIBBLE_TO_F16, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)
        return low, high
    return ((codes & 15).to(tl.float32) - 8.0).to(dtype), ((codes >> 4).to(tl.float32) - 8.0).to(dtype)


@triton.jit
def scale_and_offset(pages, at, mask, INT4: tl.constexpr):
    """(scale, offset) at offsets `at` into pages.scales, float32 and shaped like them; offset None for symmetric codes.

    at: block * pages.scale_block + head * pages.scale_head + offset in block * pages.scale_slot + group of channels.
    """
    scale = tl.load(pages.scales + at, mask=mask, other=1.0).to(tl.float32)
    offset = None
    if pages.zero_points is not None:
        zero_point = tl.load(pages.zero_points + at, mask=mask, other=0.0).to(tl.float32)
        offset = zero_point + centre_of(pages.codes, INT4) * scale
    return scale, offset
