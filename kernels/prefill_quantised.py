"""Prefill over quantised pages: tiles of codes become tiles of values in q's dtype before they are multiplied.

Many queries share a tile here, so a multiplication a number is a small part of the work, and no algebra is needed to
save it (decode_quantised.py needs it). int4 codes come as two tiles, the first and the second half of the channels,
which are laid side by side:

    bytes [keys, D / 2] ─► low  [keys, D / 2]
                           high [keys, D / 2]  ─► [keys, D]      head sizes such as 80: each half padded to D / 2

No slot beyond what was written is ever read: positions are moved to the nearest one that is visible.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dequantise import apply_scales, load_offset, load_scale, unpack, unpack_int4


@triton.jit
def channels(DIM: tl.constexpr, D: tl.constexpr, HALVES: tl.constexpr):
    """(channel, whether it exists) of each of the D columns of a tile; HALVES: two halves, each padded to D / 2."""
    d = tl.arange(0, D)
    if HALVES and D != DIM:
        channel = d // (D // 2) * (DIM // 2) + d % (D // 2)
        exists = d % (D // 2) < DIM // 2
    else:
        channel = d
        exists = d < DIM
    return channel, exists


@triton.jit
def load_values(
    pages, head, block, slot, DIM: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr,
    INT4: tl.constexpr, SCALE: tl.constexpr, CHANNELS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Values [BLOCK_N, D] of one head at (block, slot) [BLOCK_N], as dtype."""
    row = pages.codes + head * pages.head + block * pages.block + slot * pages.slot
    if INT4:
        d = tl.arange(0, D // 2)
        low, high = unpack_int4(tl.load(row[:, None] + d[None, :], mask=(d < DIM // 2)[None, :], other=0), tl.float16)
        tile = tl.join(low, high).permute(0, 2, 1).reshape([BLOCK_N, D])
    else:
        d = tl.arange(0, D)
        tile = tl.load(row[:, None] + d[None, :], mask=(d < DIM)[None, :], other=0.0)
        if pages.codes.dtype.element_ty.primitive_bitwidth == 8:
            tile = unpack(tile, tl.float16)
    if SCALE != "none":
        tile = tile.to(tl.float32)
        if SCALE == "fixed":  # one row of scales for all keys: a tile of them would fill shared memory
            at = head * pages.scale_head
        else:
            at = (head * pages.scale_head + block * pages.scale_block + slot * pages.scale_slot)[:, None]
        if CHANNELS == DIM:
            scale = load_scale(pages, at, None, tl.float32)
            tile = tile * scale
            if pages.zero_points is not None:
                tile += load_offset(pages, at, None, scale, INT4)
        else:
            channel, exists = channels(DIM, D, INT4)
            tile = apply_scales(tile, pages, at, channel, exists, CHANNELS, INT4)
    return tile.to(dtype)


@triton.jit
def load_waiting(
    pages, head, tail_row, slot, DIM: tl.constexpr, D: tl.constexpr, HALVES: tl.constexpr, dtype: tl.constexpr
):
    """The same for tokens of a block that is not full yet, from the tail."""
    row = pages.tail + tail_row * pages.tail_row + head * pages.tail_head + slot * pages.tail_slot
    channel, exists = channels(DIM, D, HALVES)
    return tl.load(row[:, None] + channel[None, :], mask=exists[None, :], other=0.0).to(dtype)
