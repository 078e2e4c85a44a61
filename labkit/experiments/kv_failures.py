"""Where a coarse K fails: channels that stick out, and a bias that shifts them.

A scale that is shared by the channels of a token must reach the largest of them, and the others are left with the few
steps below it. An outlier channel does that to every token. A bias of k_proj, which Qwen2 has, does it with a constant
that carries no information: per channel a zero point takes it away, per token nothing does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pandas as pd
import torch
from torch import nn
from transformers import PreTrainedModel

from labkit.kv_math import KVFormat
from labkit.quant import KVPolicy, hadamard, quant_error, round_trip

from .kv_quality import Row, kv_quality
from .kv_windows import window_logits
from .quality_policies import int4


def failure_policies() -> dict[str, KVPolicy]:
    """K in 4 bits along different axes, and int8; V stays in 16 bit, so that only K can fail."""
    per_token, per_channel = int4(1), int4("block", channels=1)
    symmetric = int4(1, zero_point_bits=0)
    policies = {
        "int8 per token-head": KVFormat.of("int8"),
        "int4 per token-head, symmetric": symmetric,
        "int4 per token-head, asymmetric": per_token,
        "int4 asymmetric, groups of 32": int4(1, 32),
        "int4 per channel, symmetric": int4("block", 1, 0),
        "int4 per channel, asymmetric": per_channel,
    }
    named = {name: KVPolicy.of(format, "bfloat16") for name, format in policies.items()}
    named["int4 per token-head, symmetric, rotated"] = KVPolicy.of(symmetric, "bfloat16", rotate=True)
    return named


def key_errors(q: torch.Tensor, k: torch.Tensor, policies: Mapping[str, KVPolicy] | None = None) -> pd.DataFrame:
    """What each policy does to keys and to scores; one row a policy. q and k [num_tokens, num_heads, head_dim].

    ``key_error`` is the relative error of K. ``score_error`` is what attention sees of it: the root mean square error
    of q·k / sqrt(head_dim) in nats, a part that is equal for all keys of a query left out, since softmax ignores it.
    """
    rows = []
    for name, policy in (failure_policies() if policies is None else policies).items():
        rotation = hadamard(k.shape[2]).to(k) if policy.rotate else torch.eye(k.shape[2]).to(k)
        restored = round_trip(k @ rotation, policy.key, block_size=32) @ rotation.T
        error = torch.einsum("qhd,khd->hqk", q, restored - k) / k.shape[2] ** 0.5
        error = error - error.mean(-1, keepdim=True)
        key_error = quant_error(k, restored).relative
        rows.append({"policy": name, "key_error": key_error, "score_error": float(error.square().mean().sqrt())})
    return pd.DataFrame(rows)


def synthetic_keys(seed: int = 0) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """q and k [256, 2, 64] by case: Gaussian keys; two channels 20 times as large; two channels shifted by 20."""
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 256, 2, 64, generator=generator)
    scale, shift = torch.ones(64), torch.zeros(64)
    scale[[5, 40]], shift[[5, 40]] = 20.0, 20.0
    return {"Gaussian": (q, k), "outlier channels": (q, k * scale), "constant offset": (q, k + shift)}


class _Keep:
    """q, k and v of every layer; of the query heads that share a KV head, the first."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def __call__(
        self, layer: int | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if layer is not None:
            self.layers[layer] = q[:, :: q.shape[1] // k.shape[1]].clone(), k.clone(), v.clone()
        return q, k, v


def layer_tensors(
    model: PreTrainedModel, token_ids: Sequence[int]
) -> dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """q, k and v [num_tokens, num_kv_heads, D] of every layer, k after RoPE, for one window of all ``token_ids``."""
    keep = _Keep()
    for _ in window_logits(model, token_ids, keep, ctx=len(token_ids)):
        pass
    return keep.layers


def outlier_ratio(k: torch.Tensor) -> float:
    """Largest magnitude of a head's widest channel over that of its median channel, of the worst head."""
    widths = k.abs().amax(0)
    return float((widths.amax(-1) / widths.median(-1).values).max())


def failure_table(model: PreTrainedModel, token_ids: Sequence[int]) -> pd.DataFrame:
    """:func:`key_errors` of the synthetic cases, and of the real keys of the layer with the widest channel."""
    real = layer_tensors(model, token_ids)
    worst = max(real, key=lambda layer: outlier_ratio(real[layer][1]))
    cases = synthetic_keys() | {f"layer {worst} of {model.config.name_or_path}": real[worst][:2]}
    tables = [key_errors(q, k).assign(case=case, outlier_ratio=outlier_ratio(k)) for case, (q, k) in cases.items()]
    columns = ["case", "outlier_ratio", "policy", "key_error", "score_error"]
    return pd.concat(tables, ignore_index=True).loc[:, columns]


@contextmanager
def key_bias(model: PreTrainedModel, size: float) -> Iterator[None]:
    """Within this block every k_proj of a Llama-like model adds ``size`` to the two slowest channels of each head.

    RoPE turns those channels so slowly that within a thousand tokens the bias is a constant, which softmax ignores: the
    model answers almost as before, with keys like those of models that have such a bias. Raises ValueError for a
    model without k_proj.
    """
    layers: list[Any] = [module for module in model.modules() if isinstance(getattr(module, "k_proj", None), nn.Linear)]
    if not layers:
        raise ValueError(f"model must have linear k_proj layers, {type(model).__name__} has none")
    before = [layer.k_proj.bias for layer in layers]
    try:
        for layer, own in zip(layers, before, strict=True):
            shift = layer.k_proj.weight.new_zeros(layer.k_proj.out_features // layer.head_dim, layer.head_dim)
            shift[:, [layer.head_dim // 2 - 1, layer.head_dim - 1]] = size
            layer.k_proj.bias = nn.Parameter(shift.flatten() + (0 if own is None else own), requires_grad=False)
        yield
    finally:
        for layer, own in zip(layers, before, strict=True):
            layer.k_proj.bias = own


def key_bias_quality(
    model: PreTrainedModel,
    token_ids: Sequence[int],
    sizes: Sequence[float],
    *,
    text: str,
    ctx: int = 1024,
    progress: bool = False,
) -> list[Row]:
    """:func:`kv_quality` of :func:`failure_policies` under a :func:`key_bias` of each size, compared within a size."""
    rows = []
    for size in sizes:
        with key_bias(model, size):
            found = kv_quality(model, token_ids, failure_policies(), text=text, ctx=ctx, progress=progress)
        rows += [{"key_bias": size} | row for row in found]
    return rows
