"""Random numbers that depend on who asks, and on nothing else.

A generator with a state would tie a request's draws to what else runs and in which order. Here the noise for one
token of the vocabulary is a pure function of (request seed, sample index, position of the new token, token id): the
same on any device, in any batch, after a preemption, with any chunking.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .upload import upload

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def _signed(value: int) -> int:
    """The int64 with the bits of a 64-bit unsigned number: torch has no full set of unsigned operations."""
    return value - (1 << 64) if value >> 63 else value


def _mix(value: int) -> int:
    """The output function of SplitMix64 (Steele, Lea, Flood 2014, figure 16): every bit in moves every bit out."""
    value = ((value ^ (value >> 30)) * _MULTIPLIERS[0]) & _MASK64
    value = ((value ^ (value >> 27)) * _MULTIPLIERS[1]) & _MASK64
    return value ^ (value >> 31)


def draw_key(seed: int, sample_index: int, position: int) -> int:
    """A 64-bit key for one draw, as a signed integer."""
    key = 0
    for word in (seed, sample_index, position):
        key = _mix((key + _GOLDEN + (word & _MASK64)) & _MASK64)
    return _signed(key)


def exponential_noise(keys: Sequence[int], vocab_size: int, device: torch.device) -> torch.Tensor:
    """Independent Exponential(1) numbers, float32 [len(keys), vocab_size]: SplitMix64 with the token id as counter."""
    counter = torch.arange(vocab_size, dtype=torch.int64, device=device) * _signed(_GOLDEN)
    bits = upload(keys, torch.int64, device)[:, None] + counter  # wraps around, as it should
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        bits.bitwise_xor_(_shift_right(bits, shift)).mul_(_signed(multiplier))
    bits.bitwise_xor_(_shift_right(bits, 31))
    uniform = (_shift_right(bits, 32).float() + 0.5) * 2.0**-32
    return -torch.log1p(-uniform)


def _shift_right(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Logical shift: torch's own copies the sign bit."""
    return (bits >> count).bitwise_and_((1 << (64 - count)) - 1)
