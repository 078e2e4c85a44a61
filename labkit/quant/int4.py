"""Two 4-bit codes in one byte.

A row of D codes is cut into halves; byte j holds code j below and code j + D/2 above::

    channel   0   1   2   3   4   5   6   7        D = 8
    byte 0  = channel 4 | channel 0                high nibble | low nibble
    byte 3  = channel 7 | channel 3

So a kernel loads a tile of D/2 bytes a row, and ``b & 15`` and ``b >> 4`` are two ordinary tiles, the first and the
second half of the channels: q·k is one product with each, and no value changes its lane. (Neighbouring channels in one
byte would have to be interleaved first.) Nibbles are unsigned, which lets ``0x6400 | nibble`` be read as the fp16
number 1024 + nibble; symmetric codes -7..7 are stored as 1..15.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad


def pack_int4(nibbles: torch.Tensor) -> torch.Tensor:
    """Nibbles 0..15 uint8 [..., D] -> bytes uint8 [..., ceil(D / 2)]; an odd D leaves the last high nibble 0.

    Raises TypeError for another dtype.
    """
    if nibbles.dtype != torch.uint8:
        raise TypeError(f"nibbles must be uint8, got {nibbles.dtype}")
    low, high = pad(nibbles, (0, nibbles.shape[-1] % 2)).chunk(2, dim=-1)
    return low | high << 4


def unpack_int4(packed: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Bytes uint8 [..., ceil(head_dim / 2)] -> nibbles 0..15 uint8 [..., head_dim].

    Raises TypeError for another dtype, ValueError for another number of bytes.
    """
    if packed.dtype != torch.uint8:
        raise TypeError(f"packed must be uint8, got {packed.dtype}")
    if packed.shape[-1] != -(-head_dim // 2):
        raise ValueError(
            f"packed must hold {-(-head_dim // 2)} bytes a row for head_dim={head_dim}, got {packed.shape}"
        )
    return torch.cat([packed & 15, packed >> 4], dim=-1)[..., :head_dim]
