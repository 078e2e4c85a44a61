"""The arithmetic of quantise_pairs.py's PTX, step by step in torch: it rounds as a division does."""

from __future__ import annotations

import pytest
import torch

SMALLEST = 2.0**-149


def fused(a, b, c):
    """a b + c in float64, where the product is exact, then float32. (Rounded twice: not near what these tests ask.)"""
    return (a.double() * b.double() + c.double()).float()


def neighbours(x, units):
    """x and what lies up to `units` float32s on either side, in a new last axis."""
    return (x.view(torch.int32)[..., None] + torch.arange(-units, units + 1, dtype=torch.int32)).view(torch.float32)


def ptx_codes(x, r, rest):
    """ROUNDED_QUOTIENT, and the clamp of NIBBLES."""
    quotient = fused(x, r, x * rest)
    return (quotient * SMALLEST).view(torch.int32).clamp(0, 15)


@pytest.mark.parametrize("error", [-2, -1, 0, 1, 2])
def test_codes_are_those_of_a_division_for_the_digits_of_every_scale(error):
    """Around every half, and far out; error: of rcp.approx, in units in the last place (NVIDIA says 1 at most)."""
    significands = torch.arange(1024, 2048).float()
    scale = torch.cat([significands * 2.0**-34, significands, torch.tensor([65504.0])])[:, None, None]
    r = (1.0 / scale).view(torch.int32).add(error).view(torch.float32)
    rest = fused(-scale, r, torch.ones(())) * r
    halves = (torch.arange(17) + 0.5)[:, None] * scale[:, 0].T
    x = neighbours(halves.T.contiguous(), 40)
    x = torch.cat([x, -x, torch.tensor([0.0, -0.0, 2.0**-133, 65504.0, -65504.0]).expand(*x.shape[:2], 5)], 2)
    assert torch.equal(ptx_codes(x, r, rest), (x / scale).round().clamp(0, 15).int())


def test_huge_values_saturate():
    x = torch.tensor([3.3e38, -3.3e38, 2.0**100])
    assert ptx_codes(x, torch.ones(()), torch.zeros(())).tolist() == [15, 0, 15]


def test_a_fifteenth_is_that_of_a_division():
    """QUOTIENT with the reciprocal of 15: every seventh significand of a spread."""
    spread = torch.arange(2**23, 2**24, 7).float()
    r, largest = torch.tensor(1.0 / 15.0), torch.tensor(15.0)
    quotient = spread * r
    rest = -fused(quotient, largest, -spread)
    assert torch.equal(fused(rest, r, quotient), spread / largest)


def test_finite_float16_bits_are_in_order_as_bfloat16():
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    finite = bits[bits.view(torch.float16).isfinite()]
    by_value = finite[finite.view(torch.float16).argsort(stable=True)].view(torch.bfloat16)
    assert by_value.isfinite().all() and (by_value[1:] >= by_value[:-1]).all()
