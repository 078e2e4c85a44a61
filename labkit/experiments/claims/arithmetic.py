"""The arithmetic that claims share: sizes of three models, rooms of two GPUs, lengths of real requests."""

from __future__ import annotations

from functools import cache

import numpy as np

from labkit.kv_math import GB, GIB, ModelShape, kv_bytes_per_token, model_shape
from labkit.simulation import LengthTable
from labkit.simulation.length_tables import PERCENTS

A100_BANDWIDTH = {40: 1555e9, 80: 2039e9}  # bytes/s of the SXM cards with 40 and 80 GiB (NVIDIA A100 datasheet)


def kv(name: str, tokens: int = 1) -> int:
    """Bytes of K and V in 16 bit, for ``tokens`` tokens of a model."""
    shape = model_shape(name)
    return tokens * kv_bytes_per_token(shape.num_layers, shape.num_kv_heads, shape.head_dim)


def weights(name: str) -> int:
    """Bytes of a model's weights in 16 bit."""
    return model_shape(name).weights_bytes("float16")


def with_kv_heads(name: str, num_kv_heads: int) -> ModelShape:
    """The same model with fewer KV heads."""
    from dataclasses import replace

    return replace(model_shape(name), num_kv_heads=num_kv_heads)


def room(name: str | ModelShape, gpu_gib: float, share: float = 0.9) -> float:
    """Bytes that weights in 16 bit leave of ``share`` of a GPU; activations are not counted."""
    shape = model_shape(name) if isinstance(name, str) else name
    return gpu_gib * GIB * share - shape.weights_bytes("float16")


def full_rate(name: str, gpu_gib: int, context: int, bandwidth: float | None = None) -> float:
    """Tokens/s at most when ``context``-token requests fill 90 % of an A100: batch / (bytes read / bandwidth)."""
    batch = room(name, gpu_gib) / kv(name, context)
    return batch * (bandwidth or A100_BANDWIDTH[gpu_gib]) / (gpu_gib * GIB * 0.9)


@cache
def lengths(table: str) -> np.ndarray:
    """Total lengths of a trace's requests at 100,001 even steps of its distribution."""
    return np.interp(np.linspace(0, 100, 100_001), PERCENTS, LengthTable.load(table).total_tokens)


def reserved_share(table: str, max_len: int) -> float:
    """Percent of a reservation of ``max_len`` slots that requests have filled when they end (those that fit)."""
    fitting = lengths(table)[lengths(table) <= max_len]
    return 100 * float(fitting.mean()) / max_len


def power_of_two_share(table: str) -> float:
    """The same for a reservation of the next power of two."""
    return 100 * float(lengths(table).sum() / (2 ** np.ceil(np.log2(lengths(table)))).sum())


def block_waste(table: str, block_size: int) -> float:
    """Percent of the slots in a request's blocks that are empty when it ends, over all requests."""
    tokens = np.ceil(lengths(table))
    return 100 * (1 - float(tokens.sum() / (np.ceil(tokens / block_size) * block_size).sum()))


def gb(num_bytes: float) -> float:
    """10^9 bytes."""
    return num_bytes / GB


def gib(num_bytes: float) -> float:
    """2^30 bytes."""
    return num_bytes / GIB
