"""The torch dtypes that stand for the names and widths of :mod:`labkit.kv_math`."""

from __future__ import annotations

import torch

FP8_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""Of codes, by dtype name."""

SCALE_DTYPES = {16: torch.float16, 32: torch.float32}
"""Of scales and zero points, by their bits."""
