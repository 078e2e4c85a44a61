"""The policies whose loss is recorded: what each width, granularity and the rotation buys, in blocks of 32 tokens."""

from __future__ import annotations

from typing import Any

from labkit.kv_math import PER_HEAD, PER_TENSOR, PER_TOKEN_HEAD, KVFormat
from labkit.quant import KVPolicy, ScaleLayout


def quality_policies() -> dict[str, KVPolicy]:
    """Policies by name. "Static" scales are fixed before the run by calibration; all others travel with their block."""
    return _sixteen_bit() | _fp8() | _int8() | _int4() | _mixed()


def _sixteen_bit() -> dict[str, KVPolicy]:
    return {"bf16": KVPolicy.of("bfloat16")}


def _fp8() -> dict[str, KVPolicy]:
    return {
        "fp8 e4m3, scale 1": KVPolicy.of(KVFormat("fp8_e4m3")),
        "fp8 e4m3 per tensor, static": KVPolicy.of(KVFormat("fp8_e4m3", PER_TENSOR)),
        "fp8 e4m3 per tensor, static, rotated": KVPolicy.of(KVFormat("fp8_e4m3", PER_TENSOR), rotate=True),
        "fp8 e4m3 per head, static": KVPolicy.of(KVFormat("fp8_e4m3", PER_HEAD)),
        "fp8 e4m3 per token-head": KVPolicy.of(KVFormat("fp8_e4m3", PER_TOKEN_HEAD)),
        "fp8 e5m2, scale 1": KVPolicy.of(KVFormat("fp8_e5m2")),
        "fp8 e5m2 per tensor, static": KVPolicy.of(KVFormat("fp8_e5m2", PER_TENSOR)),
    }


def _int8() -> dict[str, KVPolicy]:
    return {
        "int8 per tensor, static": KVPolicy.of(KVFormat("int8", PER_TENSOR)),
        "int8 per tensor, static, rotated": KVPolicy.of(KVFormat("int8", PER_TENSOR), rotate=True),
        "int8 per head, static": KVPolicy.of(KVFormat("int8", PER_HEAD)),
        "int8 per block and head": KVPolicy.of(KVFormat("int8", ScaleLayout(tokens="block", heads=1))),
        "int8 per token-head": KVPolicy.of("int8"),
        "int8 per token-head, 16-bit scales": KVPolicy.of(KVFormat("int8", ScaleLayout(1, 1, scale_bits=16))),
        "int8 K per channel, V per token": KVPolicy.of(
            KVFormat("int8", ScaleLayout("block", 1, 1, scale_bits=16)), KVFormat("int8", PER_TOKEN_HEAD)
        ),
    }


def _int4() -> dict[str, KVPolicy]:
    symmetric, asymmetric, per_channel = int4(1, zero_point_bits=0), int4(1), int4("block", channels=1)
    return {
        "int4 per token-head, symmetric": KVPolicy.of(symmetric),
        "int4 per token-head, symmetric, rotated": KVPolicy.of(symmetric, rotate=True),
        "int4 per token-head, asymmetric": KVPolicy.of(asymmetric),
        "int4 per token-head, asymmetric, rotated": KVPolicy.of(asymmetric, rotate=True),
        "int4 asymmetric, groups of 32": KVPolicy.of(int4(1, 32)),
        "int4 asymmetric, groups of 32, rotated": KVPolicy.of(int4(1, 32), rotate=True),
        "int4 K per channel, V per token": KVPolicy.of("int4"),
        "int4 K per channel symmetric, V per token": KVPolicy.of(int4("block", 1, 0), asymmetric),
        "int4 K per channel, V groups of 32": KVPolicy.of(per_channel, int4(1, 32)),
        "int4 K per channel, V per token, rotated": KVPolicy.of(per_channel, asymmetric, rotate=True),
    }


def _mixed() -> dict[str, KVPolicy]:
    symmetric = int4(1, zero_point_bits=0)
    first_and_last = [0, -1]
    return {
        "int4 K per token-head symmetric, V bf16": KVPolicy.of(symmetric, "bfloat16"),
        "K bf16, int4 V per token-head symmetric": KVPolicy.of("bfloat16", symmetric),
        "int8 K, int4 V per token-head asymmetric": KVPolicy.of("int8", int4(1)),
        "int4 K per channel, int8 V": KVPolicy.of(int4("block", channels=1), "int8"),
        "int4 per token-head symmetric, first and last layer bf16": KVPolicy.of(symmetric).with_layers(
            first_and_last, "bfloat16"
        ),
        "int4 K per channel, V per token, first and last layer bf16": KVPolicy.of("int4").with_layers(
            first_and_last, "bfloat16"
        ),
    }


def int4(tokens: Any, channels: Any = "all", zero_point_bits: int = 16) -> KVFormat:
    """4 bits with a 16-bit scale, and a 16-bit offset unless ``zero_point_bits`` is 0, per head."""
    return KVFormat("int4", ScaleLayout(tokens, 1, channels, scale_bits=16, zero_point_bits=zero_point_bits))
