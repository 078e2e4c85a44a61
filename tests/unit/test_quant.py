"""The quantiser: codes, scales and what comes back, for every format and granularity."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from labkit.kv_math import PER_CHANNEL, PER_HEAD, PER_TENSOR, PER_TOKEN_HEAD
from labkit.quant import (
    KVFormat,
    Quantised,
    ScaleLayout,
    Scales,
    dequantise,
    measure_scales,
    pack_int4,
    quant_error,
    quantise,
    round_trip,
    unpack_int4,
)

BLOCK_SIZE = 4


def with_zero_points(layout: ScaleLayout, bits: int) -> ScaleLayout:
    return ScaleLayout(layout.tokens, layout.heads, layout.channels, bits, bits)


LAYOUTS = [
    PER_TENSOR,
    PER_HEAD,
    PER_TOKEN_HEAD,
    PER_CHANNEL,
    ScaleLayout(tokens=1, heads=1, channels=6),  # does not divide the head size
    ScaleLayout(tokens=2, heads="all", channels=4, scale_bits=16),
    ScaleLayout(tokens="block", heads=1, scale_bits=16),
]
SYMMETRIC = [KVFormat(name, lay) for name in ("int8", "int4", "fp8_e4m3", "fp8_e5m2") for lay in LAYOUTS]
ASYMMETRIC = [
    KVFormat(name, with_zero_points(lay, bits)) for name in ("int8", "int4") for lay in LAYOUTS for bits in (16, 32)
]
UNSCALED = [KVFormat(name) for name in ("fp8_e4m3", "fp8_e5m2", "bfloat16", "float16", "float32")]
INTEGERS = [f for f in SYMMETRIC + ASYMMETRIC if f.dtype.startswith("int")]
formats = pytest.mark.parametrize("format", SYMMETRIC + ASYMMETRIC + UNSCALED, ids=str)


def by_box(x: torch.Tensor, layout: ScaleLayout):
    """The boxes of x one by one, with their place in the tensor of scales: the definition, spelled out with loops."""
    num_tokens, num_heads, head_dim = x.shape
    tokens = {"layer": num_tokens, "block": BLOCK_SIZE}.get(layout.tokens, layout.tokens)
    heads = num_heads if layout.heads == "all" else layout.heads
    channels = head_dim if layout.channels == "all" else layout.channels
    for t in range(0, num_tokens, tokens):
        for h in range(0, num_heads, heads):
            for c in range(0, head_dim, channels):
                box = slice(t, t + tokens), slice(h, h + heads), slice(c, c + channels)
                yield (t // tokens, h // heads, c // channels), box


@pytest.mark.parametrize("format", INTEGERS, ids=str)
def test_integers_are_within_half_a_step_of_their_box(format):
    torch.manual_seed(0)
    x = torch.randn(10, 2, 16) + 0.5  # 10 tokens: the last block is not full
    stored = quantise(x, format, block_size=BLOCK_SIZE)
    restored = dequantise(stored)
    layout = format.scales
    assert layout is not None and stored.scales is not None
    largest = 2**format.bits - 1 if layout.zero_point_bits else 2 ** (format.bits - 1) - 1
    seen = 0
    for place, box in by_box(x, layout):
        low, high = float(x[box].min()), float(x[box].max())
        step = (high - low) / largest if layout.zero_point_bits else max(-low, high) / largest
        assert float(stored.scales[place]) == pytest.approx(step, rel=2**-10)
        rounding = 2**-10 * max(abs(low), abs(high)) if layout.scale_bits == 16 else 1e-6  # of scale and zero point
        assert (restored[box] - x[box]).abs().max() <= step / 2 + rounding * 1.5
        seen += 1
    assert seen == stored.scales.numel()


@formats
def test_bytes_are_those_of_the_formula(format):
    x = torch.randn(8, 2, 16)
    stored = quantise(x, format, block_size=BLOCK_SIZE)
    expected = 2 * format.bytes_per_block(2, 16, BLOCK_SIZE) + format.bytes_per_layer(2, 16)
    assert stored.num_bytes == expected


@formats
def test_zeros_come_back_exactly_and_equal_values_up_to_the_rounding_of_a_scale(format):
    zeros = torch.zeros(6, 2, 16)
    assert torch.equal(round_trip(zeros, format, block_size=BLOCK_SIZE), zeros)
    tolerance = {"fp8_e4m3": 2**-4, "fp8_e5m2": 2**-3, "bfloat16": 2**-8}.get(format.dtype, 2**-10)
    for value in (0.37, -5.0, 300.0):
        same = torch.full((6, 2, 16), value)
        assert torch.allclose(round_trip(same, format, block_size=BLOCK_SIZE), same, rtol=tolerance, atol=0)


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(st.lists(FLOATS, min_size=12, max_size=12), st.sampled_from(SYMMETRIC + ASYMMETRIC + UNSCALED))
@example([3.4e38, -3.4e38] * 6, ASYMMETRIC[1])
@example([1e-45, 0.0] * 6, SYMMETRIC[0])
@example([1e-45, 0.0] * 6, ASYMMETRIC[0])
@example([3.4e38] * 12, UNSCALED[2])
@settings(max_examples=150, deadline=None)
def test_what_is_finite_stays_finite(values, format):
    x = torch.tensor(values).view(3, 2, 2)
    restored = round_trip(x, format, block_size=BLOCK_SIZE)
    assert restored.isfinite().all()


@given(st.integers(0, 10_000), st.integers(-20, 20), st.sampled_from(INTEGERS))
@settings(max_examples=60, deadline=None)
def test_a_second_trip_with_the_same_scales_changes_nothing(seed, exponent, format):
    x = torch.randn(5, 2, 6, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    scales = measure_scales(x, format, block_size=BLOCK_SIZE)
    once = round_trip(x, format, block_size=BLOCK_SIZE, scales=scales)
    twice = round_trip(once, format, block_size=BLOCK_SIZE, scales=scales)
    assert torch.allclose(once, twice, rtol=1e-6, atol=1e-6 * float(x.abs().max()))


def test_rounds_to_nearest_and_ties_to_even():
    x = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 2.51, -2.51]).view(1, 1, 8)  # scale 1
    codes = quantise(x, KVFormat("int8", PER_TOKEN_HEAD)).codes
    assert codes.flatten().tolist() == [127, 0, 2, 2, 0, -2, 3, -3]


@pytest.mark.parametrize(("name", "largest"), [("fp8_e4m3", 448.0), ("fp8_e5m2", 57344.0)])
def test_fp8_saturates(name, largest):
    x = torch.tensor([1e6, -1e6, largest * 1.04, 1.0]).view(1, 1, 4)
    assert round_trip(x, KVFormat(name)).flatten().tolist() == [largest, -largest, largest, 1.0]
    scaled = quantise(x, KVFormat(name, PER_TOKEN_HEAD))
    assert scaled.codes.float().abs().max() == largest
    assert dequantise(scaled).flatten()[:2].tolist() == pytest.approx([1e6, -1e6])


@pytest.mark.parametrize("offset", [100.0, -100.0])
def test_values_of_one_sign_use_all_asymmetric_codes(offset):
    x = (torch.linspace(0, 1, 16) + offset).view(1, 1, 16)
    format = KVFormat("int4", ScaleLayout(tokens=1, scale_bits=32, zero_point_bits=32))
    stored = quantise(x, format)
    assert unpack_int4(stored.codes, 16).flatten().tolist() == list(range(16))
    assert torch.allclose(dequantise(stored), x, atol=1e-4)


def test_outlier_channels_harm_the_others_unless_scales_go_by_channel():
    torch.manual_seed(0)
    x = torch.randn(64, 2, 64)
    x[..., [7, 40]] *= 30
    ordinary = torch.arange(64) % 33 != 7

    def error(layout: ScaleLayout) -> float:
        restored = round_trip(x, KVFormat("int4", layout), block_size=32)
        return quant_error(x[..., ordinary], restored[..., ordinary]).relative

    assert error(PER_TOKEN_HEAD) > 0.7  # most ordinary values become 0
    assert error(PER_CHANNEL) < 0.15


# ---------------------------------------------------------------- the layout of int4


def test_int4_halves_share_a_byte():
    nibbles = torch.tensor([0, 1, 2, 3, 12, 13, 14, 15], dtype=torch.uint8)
    assert pack_int4(nibbles).tolist() == [0xC0, 0xD1, 0xE2, 0xF3]
    assert pack_int4(nibbles[:3]).tolist() == [0x20, 0x01]  # odd: the last high nibble stays empty


@given(st.lists(st.integers(0, 15), min_size=1, max_size=40))
def test_int4_unpacks_what_was_packed(codes):
    nibbles = torch.tensor([codes, codes[::-1]], dtype=torch.uint8)
    packed = pack_int4(nibbles)
    assert packed.shape == (2, math.ceil(len(codes) / 2))
    assert torch.equal(unpack_int4(packed, len(codes)), nibbles)


def test_symmetric_int4_codes_are_stored_with_a_bias_of_8():
    x = torch.tensor([-7.0, 0.0, 1.0, 7.0]).view(1, 1, 4)
    stored = quantise(x, KVFormat("int4", PER_TOKEN_HEAD))
    assert unpack_int4(stored.codes, 4).flatten().tolist() == [1, 8, 9, 15]


def test_int4_packing_refuses_what_it_would_garble():
    with pytest.raises(TypeError, match="nibbles must be uint8, got torch.int8"):
        pack_int4(torch.zeros(4, dtype=torch.int8))
    with pytest.raises(ValueError, match="3 bytes a row for head_dim=6"):
        unpack_int4(torch.zeros(2, dtype=torch.uint8), 6)


# ---------------------------------------------------------------- scales fixed before, and bad input


def test_fixed_scales_hold_for_later_values_and_those_beyond_saturate():
    format = KVFormat("int8", PER_HEAD)
    scales = measure_scales(torch.tensor([1.27, -12.7]).view(1, 2, 1), format)
    later = torch.tensor([[5.0, 5.0], [0.5, -50.0]]).view(2, 2, 1)
    stored = quantise(later, format, scales=scales)
    assert stored.scales is scales.scales
    assert stored.codes.flatten().tolist() == [127, 50, 50, -127]


def test_half_precision_input_is_quantised_as_its_float32_value():
    x = torch.randn(3, 2, 16).to(torch.bfloat16)
    format = KVFormat.of("int4")
    assert torch.equal(quantise(x, format).codes, quantise(x.float(), format).codes)
    assert round_trip(x, format).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda f: quantise(torch.zeros(2, 2), f), ValueError, r"\[num_tokens, num_heads, head_dim\]"),
        (lambda f: quantise(torch.zeros(0, 2, 4), f), ValueError, "not empty"),
        (lambda f: quantise(torch.zeros(2, 2, 4, dtype=torch.int8), f), TypeError, "floats, got torch.int8"),
        (lambda f: quantise(torch.full((1, 1, 4), math.nan), f), ValueError, "finite"),
        (lambda f: quantise(torch.full((1, 1, 4), math.inf), f), ValueError, "finite"),
        (lambda f: quantise(torch.zeros(2, 2, 4), f, scales=Scales(torch.ones(1, 1, 1))), ValueError, r"\[2, 2, 1\]"),
        (lambda f: measure_scales(torch.zeros(1, 1, 4), KVFormat("fp8_e4m3")), ValueError, "must have scales"),
    ],
)
def test_bad_input_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call(KVFormat("int8", PER_TOKEN_HEAD))


@pytest.mark.parametrize(
    ("format", "message"),
    [
        (KVFormat("int8", ScaleLayout(tokens=3)), "must divide the block size"),
        (KVFormat("int8", ScaleLayout(tokens=1, heads=3)), "must divide the number of KV heads"),
        (KVFormat("int8", ScaleLayout(tokens=1, scale_bits=8)), "scales of 16 or 32 bits"),
        (KVFormat("int4", ScaleLayout(tokens=1, zero_point_bits=4)), "zero points of 0, 16 or 32 bits"),
        (KVFormat("fp8_e4m3", ScaleLayout(tokens=1, zero_point_bits=16)), "integer format"),
    ],
)
def test_layouts_that_cannot_be_stored_are_refused(format, message):
    with pytest.raises(ValueError, match=message):
        quantise(torch.zeros(4, 2, 8), format)


def test_errors_of_known_vectors():
    x, y = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 3.5])
    error = quant_error(x, y)
    assert error.relative == pytest.approx(0.1)
    assert error.sqnr_db == pytest.approx(20)
    assert error.cosine == pytest.approx(23 / (5 * math.hypot(3, 3.5)))
    assert quant_error(x, x).relative == 0 and quant_error(x, x).cosine == 1
    assert quant_error(torch.zeros(2), y).relative == math.inf
    with pytest.raises(ValueError, match=r"shape \[2\], got \[1\]"):
        quant_error(x, y[:1])


def test_a_quantised_tensor_says_what_is_needed_to_read_it():
    stored = quantise(torch.randn(2, 1, 5), KVFormat.of("int4"), block_size=16)
    assert isinstance(stored, Quantised)
    assert (stored.head_dim, stored.block_size, stored.codes.shape) == (5, 16, (2, 1, 3))
    assert dequantise(stored, torch.float16).dtype == torch.float16
