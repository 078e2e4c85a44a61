"""Exercises of lesson 06: quantised keys and values."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import strategies as st

from labkit.kv_math import PER_TOKEN_HEAD, KVFormat
from labkit.quant import pack_int4, quantise

from .exercise import Exercise, Failed
from .judging import close, on_all, same

_VALUES = st.floats(-100, 100, width=32)
_ROWS = st.lists(st.one_of(_VALUES, st.just(0.0)), min_size=1, max_size=8)


def quantise_int8(row: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The step is the largest magnitude / 127, and 1 for a row of zeros."""
    scale = float(row.abs().max() / 127) or 1.0
    return (row / scale).round().clamp(-127, 127).to(torch.int8), scale


def _judge_int8(attempt: Callable[..., tuple[torch.Tensor, float]]) -> None:
    def compare(values: list[float]) -> None:
        row = torch.tensor(values, dtype=torch.float32)
        expected = quantise(row[None, None], KVFormat("int8", PER_TOKEN_HEAD))
        assert expected.scales is not None
        result = attempt(row.clone())
        if not isinstance(result, tuple) or len(result) != 2:
            raise Failed(f"return (codes, scale), got {result!r}")
        codes, scale = result
        if not isinstance(codes, torch.Tensor) or codes.dtype != torch.int8:
            kind = codes.dtype if isinstance(codes, torch.Tensor) else type(codes).__name__
            raise Failed(f"codes must be a tensor of torch.int8, or no byte is saved; got {kind}")
        same(codes.tolist(), expected.codes.flatten().tolist(), f"the codes of {values}")
        if isinstance(scale, torch.Tensor) and scale.numel() == 1:
            scale = scale.item()
        close(scale, float(expected.scales), "the scale", rel_tol=1e-6)

    on_all(_ROWS, compare)


def pack(nibbles: torch.Tensor) -> torch.Tensor:
    """Byte j holds code j below and code j + D/2 above."""
    low, high = nibbles.chunk(2, dim=-1)
    return low | (high << 4)


def _judge_pack(attempt: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def compare(halves: list[int]) -> None:
        nibbles = torch.tensor(halves + halves[::-1], dtype=torch.uint8)
        got = attempt(nibbles.clone())
        if not isinstance(got, torch.Tensor) or got.dtype != torch.uint8:
            raise Failed(f"return a tensor of torch.uint8, got {got!r}")
        same(got.tolist(), pack_int4(nibbles).tolist(), f"the bytes of {nibbles.tolist()}")

    on_all(st.lists(st.integers(0, 15), min_size=1, max_size=6), compare)


def scores_from_codes(q: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, zero_points: torch.Tensor):
    """q . (code * scale + zero_point) = scale * (q . code) + zero_point * sum(q), one product with the codes."""
    return scales * (codes.float() @ q) + zero_points * q.sum()


def _judge_scores(attempt: Callable[..., torch.Tensor]) -> None:
    def compare(case: tuple[int, int, int]) -> None:
        tokens, channels, seed = case
        g = torch.Generator().manual_seed(seed)
        codes = torch.randint(0, 16, (tokens, channels), generator=g, dtype=torch.uint8)
        q, scales = torch.randn(channels, generator=g), torch.rand(tokens, generator=g) + 0.1
        zero_points = torch.randn(tokens, generator=g)
        expected = (codes.float() * scales[:, None] + zero_points[:, None]) @ q
        got = attempt(q, codes, scales, zero_points)
        if not isinstance(got, torch.Tensor) or got.shape != expected.shape:
            raise Failed(f"return one score a token, a tensor of shape {tuple(expected.shape)}")
        if not torch.allclose(got, expected, atol=1e-3, rtol=1e-4):
            raise Failed(f"scores should be {expected.tolist()}, got {got.tolist()}")

    on_all(st.tuples(st.integers(1, 4), st.integers(1, 8), st.integers(0, 99)), compare)


def bits_per_value(code_bits: int, scale_bits: int, zero_point_bits: int, values_per_scale: int) -> float:
    """Each value carries its code and its share of the scale and the zero point."""
    return code_bits + (scale_bits + zero_point_bits) / values_per_scale


def _judge_bits(attempt: Callable[..., float]) -> None:
    def compare(case: tuple[int, int, int, int]) -> None:
        code, scale, zero_point, values = case
        what = f"{code}-bit codes with {scale} + {zero_point} bits of scale and zero point for {values} values"
        close(attempt(*case), bits_per_value(*case), f"bits a value of {what}")

    bits = st.sampled_from([0, 16, 32])
    on_all(st.tuples(st.sampled_from([4, 8]), bits, bits, st.sampled_from([32, 64, 128])), compare)


EXERCISES = (
    Exercise(
        "06-quantise-int8",
        "Quantise a row to int8",
        "Write quantise_int8(row) -> (codes, scale) for a float32 row: codes torch.int8 from -127 to 127, scale the "
        "size of a step, such that code * scale is close to the value. Bit for bit what the lab stores. A row of "
        "zeros gets scale 1.",
        (
            "The article's version kept the input's dtype (no byte saved) and divided by zero for a row of zeros.",
            "scale = largest magnitude / 127; codes = round(row / scale). torch rounds ties to even, as the lab does.",
            ".to(torch.int8) at the end, and scale 1.0 when the largest magnitude is 0.",
        ),
        _judge_int8,
        quantise_int8,
    ),
    Exercise(
        "06-pack-int4",
        "Two codes in one byte",
        "Write pack(nibbles): uint8 codes 0 to 15 of an even number of channels D -> D / 2 bytes; byte j holds "
        "channel j in its low half and channel j + D / 2 in its high half, so that a kernel finds two ordinary tiles "
        "in one load.",
        (
            "Split the row in halves, not into even and odd channels.",
            "The high half of a byte is the code shifted by 4 bits.",
            "low | (high << 4), both uint8.",
        ),
        _judge_pack,
        pack,
    ),
    Exercise(
        "06-fold-scales",
        "Attention without dequantising",
        "Write scores_from_codes(q, codes, scales, zero_points): q [D], codes [tokens, D], one scale and zero point "
        "a token; the scores q . (code * scale + zero_point). Multiply q with the codes once; do not build the "
        "dequantised tile.",
        (
            "Expand the product: which factors do not depend on the channel?",
            "The scale leaves the sum over channels; the zero point meets the sum of q.",
            "scales * (codes.float() @ q) + zero_points * q.sum().",
        ),
        _judge_scores,
        scores_from_codes,
    ),
    Exercise(
        "06-bits",
        "What a value really takes",
        "Write bits_per_value(code_bits, scale_bits, zero_point_bits, values_per_scale): bits a value, its share of "
        "scale and zero point included.",
        (
            "A scale is shared by values_per_scale values.",
            "Divide the bits of scale and zero point by the values that share them.",
            "4 bits with 16 + 16 for 32 values are 5 bits.",
        ),
        _judge_bits,
        bits_per_value,
    ),
)
