"""From values to scales: the extremes of each box of a :class:`ScaleLayout`, and back to one scale a value.

x [num_tokens, num_heads, head_dim] is cut into boxes of tokens x heads x channels; the last box of an axis may be
smaller. Scales and zero points have one number a box: [token boxes, head boxes, channel boxes].

=============== ================================= =================
                scale                             zero point
=============== ================================= =================
symmetric       largest magnitude / largest code  none: 0 is code 0
asymmetric      (max - min) / largest code        min
=============== ================================= =================

The zero point is the *value* that code 0 stands for (KIVI's notation), not a code: a row with values of one sign then
costs no range. The largest code is 127 (int8), 7 (int4), 255 and 15 (the same, asymmetric), 448 (fp8_e4m3), 57344
(fp8_e5m2). Both are computed in float32 and rounded to the stored width, where float16 saturates at 65504; what is
stored is what divides.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from labkit.kv_math import KVFormat, ScaleLayout

from .dtypes import SCALE_DTYPES

LARGEST_VALUE = 2.0**126  # what lies beyond saturates, so that no difference or product of codes and scales overflows

_LARGEST_CODE = {"int8": 127, "int4": 7, "fp8_e4m3": 448, "fp8_e5m2": 57344}
_LARGEST_UNSIGNED = {"int8": 255, "int4": 15}


@dataclass(frozen=True, slots=True)
class Scales:
    """One scale a box, float16 or float32 [token boxes, head boxes, channel boxes], and zero points or None."""

    scales: torch.Tensor
    zero_points: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of both tensors."""
        return self.scales.nbytes + (0 if self.zero_points is None else self.zero_points.nbytes)


def check_format(format: KVFormat) -> None:
    """Raises ValueError for a format that kv_math can count but the quantiser does not store."""
    layout = format.scales
    if layout is None:
        return
    if layout.scale_bits not in SCALE_DTYPES or layout.zero_point_bits not in (0, *SCALE_DTYPES):
        raise ValueError(
            "format must have scales of 16 or 32 bits and zero points of 0, 16 or 32 bits, "
            f"got {layout.scale_bits} and {layout.zero_point_bits}"
        )
    if layout.zero_point_bits and format.dtype not in _LARGEST_UNSIGNED:
        raise ValueError(f"format must be an integer format to have zero points, got {format}")


def largest_code(format: KVFormat) -> int:
    """The code that the largest value of a box gets."""
    is_asymmetric = format.scales is not None and format.scales.zero_point_bits
    return (_LARGEST_UNSIGNED if is_asymmetric else _LARGEST_CODE)[format.dtype]


def box_shape(layout: ScaleLayout, shape: torch.Size, block_size: int) -> tuple[int, int, int]:
    """Tokens, heads and channels of one box of x with ``shape`` [num_tokens, num_heads, head_dim].

    Raises ValueError where kv_math would: heads left over, tokens that do not divide a block.
    """
    num_tokens, num_heads, head_dim = shape
    layout.num_scales(num_heads, head_dim, block_size)
    tokens = num_tokens if layout.tokens == "layer" else block_size if layout.tokens == "block" else layout.tokens
    heads = num_heads if layout.heads == "all" else layout.heads
    channels = head_dim if layout.channels == "all" else min(layout.channels, head_dim)
    return tokens, heads, channels


def measure_scales(x: torch.Tensor, format: KVFormat, *, block_size: int = 16) -> Scales:
    """The scales that x [num_tokens, num_heads, head_dim] asks for, one a box; a box of zeros gets scale 1.

    For ``tokens="layer"`` on a text that stands for later ones, this is calibration. Raises ValueError for a format
    without scales, layouts that do not fit x, NaN and infinity.
    """
    check_format(format)
    if format.scales is None:
        raise ValueError(f"format must have scales to measure, got {format}")
    x = finite_float32(x)
    box = box_shape(format.scales, x.shape, block_size)
    low = _in_boxes(x, box, float("inf")).amin(dim=(1, 3, 5))
    high = _in_boxes(x, box, float("-inf")).amax(dim=(1, 3, 5))
    # A tensor, not a number: by a number CUDA multiplies with the reciprocal, which rounds twice.
    steps = torch.full((), largest_code(format), dtype=torch.float32, device=x.device)
    if not format.scales.zero_point_bits:
        largest = torch.maximum(low.abs(), high.abs())
        return Scales(_stored(largest / steps, format.scales.scale_bits))
    zero_points = _clamped(low, SCALE_DTYPES[format.scales.zero_point_bits])
    return Scales(_stored((high - low) / steps, format.scales.scale_bits), zero_points)


def expand(per_box: torch.Tensor, box: tuple[int, int, int], shape: torch.Size) -> torch.Tensor:
    """One number a box -> float32 that broadcasts against x of ``shape``."""
    values = per_box.float()
    for dim, size in enumerate(box):
        values = values.repeat_interleave(size, dim)
    return values[: shape[0], : shape[1], : shape[2]]


def finite_float32(x: torch.Tensor) -> torch.Tensor:
    """x as float32 within +-:data:`LARGEST_VALUE`.

    Raises TypeError unless x is a float tensor; ValueError unless it is [num_tokens >= 1, num_heads, head_dim] and
    finite.
    """
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        raise TypeError(f"x must be a tensor of floats, got {getattr(x, 'dtype', type(x).__name__)}")
    if x.ndim != 3 or 0 in x.shape:
        raise ValueError(f"x must be [num_tokens, num_heads, head_dim] and not empty, got {list(x.shape)}")
    if not x.isfinite().all():
        raise ValueError("x must be finite, got NaN or infinity")
    return x.float().clamp(-LARGEST_VALUE, LARGEST_VALUE)


def _in_boxes(x: torch.Tensor, box: tuple[int, int, int], fill: float) -> torch.Tensor:
    """[token boxes, tokens, head boxes, heads, channel boxes, channels], small last boxes filled up with ``fill``."""
    missing = [-size % edge for size, edge in zip(x.shape, box, strict=True)]
    filled = pad(x, (0, missing[2], 0, missing[1], 0, missing[0]), value=fill)
    tokens, heads, channels = (size // edge for size, edge in zip(filled.shape, box, strict=True))
    return filled.reshape(tokens, box[0], heads, box[1], channels, box[2])


def _stored(scales: torch.Tensor, bits: int) -> torch.Tensor:
    """Rounded to ``bits``; 1 where the scale is 0 or too small for the width: all values of that box are code 0."""
    rounded = _clamped(scales, SCALE_DTYPES[bits])
    return torch.where(rounded > 0, rounded, torch.ones_like(rounded))


def _clamped(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return values.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
