"""Quantise and dequantise, the readable way.

    code = clamp(round_half_even((x - zero_point) / scale))        in float32, with IEEE subtraction and division
    x'   = code * scale + zero_point

Kernels must give the same codes and scales, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from labkit.kv_math import KVFormat

from .dtypes import FP8_DTYPES
from .int4 import pack_int4, unpack_int4
from .scales import Scales, box_shape, check_format, expand, finite_float32, largest_code, measure_scales

_SYMMETRIC_INT4_BIAS = 8  # nibbles are unsigned


@dataclass(frozen=True, slots=True)
class Quantised:
    """What is stored for x [num_tokens, num_heads, head_dim].

    Attributes:
        codes: int8, or uint8 if asymmetric; float8; the float of a wider format [num_tokens, num_heads, head_dim];
            int4: uint8 [num_tokens, num_heads, ceil(head_dim / 2)], laid out as :mod:`labkit.quant.int4` draws it.
        scales, zero_points: one number a box, see :class:`Scales`; None where the format has none.
        format, head_dim, block_size: what is needed to read them.
    """

    codes: torch.Tensor
    scales: torch.Tensor | None
    zero_points: torch.Tensor | None
    format: KVFormat
    head_dim: int
    block_size: int

    @property
    def num_bytes(self) -> int:
        """Bytes of codes, scales and zero points."""
        return sum(t.nbytes for t in (self.codes, self.scales, self.zero_points) if t is not None)


def quantise(x: torch.Tensor, format: KVFormat, *, block_size: int = 16, scales: Scales | None = None) -> Quantised:
    """Codes of x [num_tokens, num_heads, head_dim] in ``format``, token 0 being the first of a block.

    Args:
        block_size: tokens in a block, for layouts with ``tokens="block"``; a last block that is not full gets the
            scales of the tokens it has.
        scales: scales fixed before (:func:`measure_scales`, :func:`load_scales`); values beyond them saturate. None
            measures x itself.

    Rounds to nearest, ties to even, and clamps; fp8 saturates at +-448 and +-57344. A box of zeros comes back exactly,
    one of equal values up to the rounding of its scale or zero point. Raises TypeError for x that is not of floats;
    ValueError for NaN or infinity in x, a layout that does not fit x, and scales that do not fit the format.
    """
    check_format(format)
    values = finite_float32(x)
    stored = scales
    if format.scales is None:
        if scales is not None:
            raise ValueError(f"scales must be None for format {format}, which has none")
    else:
        stored = measure_scales(x, format, block_size=block_size) if scales is None else scales
        box = _checked_box(stored, format, x.shape, block_size)
        if stored.zero_points is not None:
            values = values - expand(stored.zero_points, box, x.shape)
        values = values / expand(stored.scales, box, x.shape)
    codes = _to_codes(values, format)
    if stored is None:
        return Quantised(codes, None, None, format, x.shape[2], block_size)
    return Quantised(codes, stored.scales, stored.zero_points, format, x.shape[2], block_size)


def dequantise(quantised: Quantised, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The values that the codes stand for [num_tokens, num_heads, head_dim], computed in float32, as ``dtype``."""
    format = quantised.format
    is_asymmetric = quantised.zero_points is not None
    if format.dtype == "int4":
        values = unpack_int4(quantised.codes, quantised.head_dim).float()
        values = values if is_asymmetric else values - _SYMMETRIC_INT4_BIAS
    else:
        values = quantised.codes.float()
    if format.scales is not None and quantised.scales is not None:
        box = box_shape(format.scales, values.shape, quantised.block_size)
        values = values * expand(quantised.scales, box, values.shape)
        if quantised.zero_points is not None:
            values = values + expand(quantised.zero_points, box, values.shape)
    return values.to(dtype)


def round_trip(
    x: torch.Tensor, format: KVFormat, *, block_size: int = 16, scales: Scales | None = None
) -> torch.Tensor:
    """x as it is read back after being stored in ``format``, in its own dtype."""
    return dequantise(quantise(x, format, block_size=block_size, scales=scales), x.dtype)


def _to_codes(values: torch.Tensor, format: KVFormat) -> torch.Tensor:
    """float32 values, in units of their scale -> what is stored."""
    if format.bits > 8:
        dtype = getattr(torch, format.dtype)
        return values.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
    largest = largest_code(format)
    if format.dtype in FP8_DTYPES:  # clamped first: torch makes NaN or infinity of what is too large
        return values.clamp(-largest, largest).to(FP8_DTYPES[format.dtype])
    is_asymmetric = format.scales is not None and format.scales.zero_point_bits > 0
    codes = values.round().clamp(0 if is_asymmetric else -largest, largest)  # torch rounds ties to even
    if format.dtype == "int4":
        return pack_int4((codes if is_asymmetric else codes + _SYMMETRIC_INT4_BIAS).to(torch.uint8))
    return codes.to(torch.uint8 if is_asymmetric else torch.int8)


def _checked_box(scales: Scales, format: KVFormat, shape: torch.Size, block_size: int) -> tuple[int, int, int]:
    """The box of the format, after a look at whether ``scales`` have one number for each box of x."""
    assert format.scales is not None
    box = box_shape(format.scales, shape, block_size)
    expected = tuple(-(-size // edge) for size, edge in zip(shape, box, strict=True))
    if tuple(scales.scales.shape) != expected:
        raise ValueError(f"scales must have the shape {list(expected)}, got {list(scales.scales.shape)}")
    if (scales.zero_points is not None) != (format.scales.zero_point_bits > 0):
        raise ValueError(f"scales must have zero points if and only if the format has, which is {format}")
    if scales.zero_points is not None and scales.zero_points.shape != scales.scales.shape:
        raise ValueError(f"zero_points must have the shape {list(expected)}, got {list(scales.zero_points.shape)}")
    if scales.scales.element_size() * 8 != format.scales.scale_bits:
        raise ValueError(f"scales must have {format.scales.scale_bits} bits, got {scales.scales.dtype}")
    return box
