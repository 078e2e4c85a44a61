"""Quantised pages as tensors: what a :class:`KVFormat` takes, and its values back.

The layout is that of :class:`labkit.kernels.pages.QuantisedPages`; codes and scales are those of :mod:`labkit.quant`.
"""

from __future__ import annotations

import torch

from labkit.kernels import QuantisedPages, reference
from labkit.kv_math import KVFormat, ScaleLayout
from labkit.kv_math.formats import dtype_name
from labkit.quant import Scales
from labkit.quant.dtypes import FP8_DTYPES, SCALE_DTYPES


def allocate_pages(
    format: KVFormat, num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, device: torch.device | str
) -> QuantisedPages:
    """Pages of K or V of one layer; scales that are fixed before the run are 1.0, all else is not initialised.

    Raises ValueError for formats that pages cannot hold: scales shared by heads (unless fixed before the run for all of
    them), by some tokens of a block, or by channels that do not divide the head size; int4 with an odd head size.
    """
    page = (num_blocks, num_kv_heads, block_size)
    width = _codes_per_row(format, head_dim)
    shape = _scale_shape(format.scales, page, head_dim)
    codes = torch.empty(*page, width, dtype=_code_dtype(format), device=device)
    if format.scales is None:
        return QuantisedPages(codes)
    scales = torch.empty(shape, dtype=SCALE_DTYPES[format.scales.scale_bits], device=device)
    zero_points = None
    if format.scales.zero_point_bits:
        zero_points = torch.empty(shape, dtype=SCALE_DTYPES[format.scales.zero_point_bits], device=device)
    if format.scales.tokens == "layer":
        scales.fill_(1.0)
    return QuantisedPages(codes, scales, zero_points)


def format_of(pages: QuantisedPages, head_dim: int, has_tail: bool) -> KVFormat:
    """The format that ``pages`` were allocated for; ``has_tail``: scales span the tokens of a block."""
    codes, scales = pages.codes, pages.scales
    unsigned = "int8" if codes.shape[3] == head_dim else "int4"
    name = unsigned if codes.dtype == torch.uint8 else dtype_name(codes.dtype)
    if scales is None:
        return KVFormat(name)
    num_blocks, num_kv_heads, block_size = codes.shape[:3]
    per_token = scales.shape[0] == num_blocks and scales.shape[2] == block_size
    return KVFormat(
        name,
        ScaleLayout(
            tokens="block" if has_tail else 1 if per_token else "layer",
            heads=1 if scales.shape[1] == num_kv_heads else "all",
            channels=head_dim // scales.shape[3],
            scale_bits=scales.element_size() * 8,
            zero_point_bits=0 if pages.zero_points is None else pages.zero_points.element_size() * 8,
        ),
    )


def set_fixed_scales(pages: QuantisedPages, format: KVFormat, scales: Scales | None) -> None:
    """Put scales that were measured before the run into ``pages``; fp8 keeps 1.0 if there are none.

    Raises ValueError where the format is of integers and there are none, and if they do not fit.
    """
    if format.scales is None or format.scales.tokens != "layer":
        return
    if scales is None:
        if format.dtype not in FP8_DTYPES:
            raise ValueError(f"{format} needs scales that were measured before the run: pass kv_scales")
        return
    own = fixed_scales(pages)
    if own.scales.shape != scales.scales.shape:
        raise ValueError(f"kv_scales must be {list(own.scales.shape)}, got {list(scales.scales.shape)}")
    own.scales.copy_(scales.scales)
    if own.zero_points is not None and scales.zero_points is not None:
        own.zero_points.copy_(scales.zero_points)


def fixed_scales(pages: QuantisedPages) -> Scales:
    """Scales of one whole layer, as the quantiser takes them."""
    assert pages.scales is not None
    return Scales(pages.scales[:, :, 0], None if pages.zero_points is None else pages.zero_points[:, :, 0])


def read_blocks(pages: QuantisedPages, head_dim: int, blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values of ``blocks`` int64 [n]: [n, num_kv_heads, block_size, head_dim], computed in float32, as ``dtype``.

    As :func:`labkit.quant.dequantise` gives them. Slots that were never written hold anything, also NaN.
    """
    codes = bytes_of(pages.codes)[blocks].view(pages.codes.dtype)
    own = (part if part is None or part.shape[0] == 1 else part[blocks] for part in pages[1:])
    return reference.dequantise(QuantisedPages(codes, *own), head_dim, torch.float32).to(dtype)


def bytes_of(codes: torch.Tensor) -> torch.Tensor:
    """float8 as uint8, which torch can index; other tensors as they are."""
    return codes.view(torch.uint8) if codes.dtype in FP8_DTYPES.values() else codes


def _code_dtype(format: KVFormat) -> torch.dtype:
    if format.dtype in FP8_DTYPES:
        return FP8_DTYPES[format.dtype]
    if format.bits > 8:
        return getattr(torch, format.dtype)
    is_symmetric = format.scales is not None and format.scales.zero_point_bits == 0
    return torch.int8 if format.dtype == "int8" and is_symmetric else torch.uint8


def _codes_per_row(format: KVFormat, head_dim: int) -> int:
    if format.dtype != "int4":
        return head_dim
    if head_dim % 2:
        raise ValueError(f"int4 needs an even head size to store two channels a byte, got {head_dim}")
    return head_dim // 2


def _scale_shape(layout: ScaleLayout | None, page: tuple[int, int, int], head_dim: int) -> tuple[int, ...]:
    if layout is None:
        return ()
    num_blocks, num_kv_heads, block_size = page
    heads = num_kv_heads if layout.heads == "all" else layout.heads
    if heads > 1 and (layout.tokens != "layer" or heads < num_kv_heads):
        raise ValueError(f"scales must be for one head, or fixed before the run for all of them, got {layout}")
    if layout.tokens not in (1, "block", "layer", block_size):
        raise ValueError(
            f"scales must be for 1 token, a block of {block_size} or the layer, got {layout.tokens} tokens a scale"
        )
    channels = head_dim if layout.channels == "all" else min(layout.channels, head_dim)
    if head_dim % channels:
        raise ValueError(f"scales must be for channels that divide the head size {head_dim}, got {channels}")
    return (
        1 if layout.tokens == "layer" else num_blocks,
        num_kv_heads // heads,
        block_size if layout.tokens == 1 else 1,
        head_dim // channels,
    )
