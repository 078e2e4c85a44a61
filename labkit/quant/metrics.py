"""How far is a quantised tensor from the original?"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class QuantError:
    """Attributes:
    relative: norm of the error over norm of the original; 0 is exact.
    sqnr_db: signal to quantisation noise, -20 log10(relative), in dB; each bit more is worth about 6.
    cosine: cosine of the angle between the two; 1 is the same direction.
    """

    relative: float
    sqnr_db: float
    cosine: float


def quant_error(original: torch.Tensor, restored: torch.Tensor) -> QuantError:
    """Compare two tensors of equal shape as flat vectors, in float64.

    Of two zero tensors the error is 0 and the cosine 1; against one zero tensor the cosine is 0. Raises ValueError if
    the shapes differ.
    """
    if original.shape != restored.shape:
        raise ValueError(f"restored must have the shape {list(original.shape)}, got {list(restored.shape)}")
    x, y = original.double().flatten(), restored.double().flatten()
    signal, noise = float(x.norm()), float((x - y).norm())
    if noise == 0:
        return QuantError(0.0, math.inf, 1.0)
    if signal == 0:
        return QuantError(math.inf, -math.inf, 0.0)
    relative, other = noise / signal, float(y.norm())
    return QuantError(relative, -20 * math.log10(relative), float(x @ y) / (signal * other) if other else 0.0)
