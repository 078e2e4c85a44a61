"""What a KV format costs in perplexity.

Each window of text is one prefill through the engine's attention plug-in and its paged cache. K, after RoPE, and V are
quantised and dequantised by the reference quantiser before they are written, so every token is read as it would be
stored, also within the window that wrote it. (An engine that keeps its newest tokens in 16 bit loses less. With scales
shared by the tokens of a block, a token is read with scales that later tokens of its block took part in.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from labkit.kv_math import KVCacheSpec
from labkit.quant import KVPolicy, LayerScales, Scales, hadamard, round_trip

from .calibration import calibrate, has_fixed_scales
from .kv_windows import cache_spec, window_logits

Row = dict[str, Any]


class QuantisedKV:
    """K and V as they are read back in ``policy``; q is rotated where K is.

    Scales that are fixed before a run (``tokens="layer"``) come from ``scales``; without, from the window itself.
    """

    def __init__(
        self, policy: KVPolicy, num_layers: int, block_size: int, scales: Mapping[int, LayerScales] | None
    ) -> None:
        self._formats = [policy.formats(layer, num_layers) for layer in range(num_layers)]
        self._scales = scales or dict.fromkeys(range(num_layers), LayerScales(None, None))  # on the CPU
        self._rotate, self._block_size = policy.rotate, block_size

    def __call__(
        self, layer: int | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if self._rotate:
            rotation = hadamard(k.shape[2]).to(k)
            q, k = q @ rotation, k @ rotation
        if layer is None:
            return q, k, v
        (key, value), fixed = self._formats[layer], self._scales[layer]
        k = round_trip(k, key, block_size=self._block_size, scales=_on(k.device, fixed.key))
        v = round_trip(v, value, block_size=self._block_size, scales=_on(v.device, fixed.value))
        return q, k, v


def _on(device: torch.device, scales: Scales | None) -> Scales | None:
    if scales is None:
        return None
    return Scales(scales.scales.to(device), None if scales.zero_points is None else scales.zero_points.to(device))


def window_nll(
    model: PreTrainedModel,
    token_ids: Sequence[int],
    policy: KVPolicy | None = None,
    *,
    ctx: int = 1024,
    block_size: int = 32,
    scales: Mapping[int, LayerScales] | None = None,
    progress: str | None = None,
) -> torch.Tensor:
    """Negative log-likelihood in nats of every predicted token, float64 [num_windows * (ctx - 1)].

    ``policy`` None is the unquantised cache. ``scales``, of :func:`calibrate`, are those that are fixed before a run;
    without them such scales are measured on each window, which an engine cannot do. Raises ValueError for a policy
    that does not fit the model; else windows and errors as in :func:`window_logits`.
    """
    hook = None
    if policy is not None:
        spec = policy.apply_to(cache_spec(model, block_size))
        hook = QuantisedKV(policy, spec.num_layers, block_size, scales)
    options: dict[str, Any] = {"ctx": ctx, "block_size": block_size, "progress": progress}
    nll = [
        cross_entropy(logits[:-1].float(), window[1:], reduction="none").double()
        for window, logits in window_logits(model, token_ids, hook, **options)
    ]
    return torch.cat(nll).cpu()


def kv_quality(
    model: PreTrainedModel,
    token_ids: Sequence[int],
    policies: Mapping[str, KVPolicy],
    *,
    text: str,
    calibration: Sequence[int] = (),
    ctx: int = 1024,
    block_size: int = 32,
    progress: bool = False,
) -> list[Row]:
    """One row for the unquantised cache and one for each policy, tidy; :func:`quality_table` sorts them.

    ``calibration`` are the tokens that scales fixed before a run are measured on; choose others than ``token_ids``.
    Raises ValueError if it is empty and a policy has such scales; else as :func:`window_nll`.
    """
    spec = cache_spec(model, block_size)
    options: dict[str, Any] = {"ctx": ctx, "block_size": block_size}
    shared = {"text": text, "tokens": len(token_ids) // ctx * ctx, **options, "device": str(model.device)}
    baseline = window_nll(model, token_ids, **options, progress="unquantised" if progress else None)
    rows = [shared | unquantised_row(spec, baseline)]
    for name, policy in policies.items():
        scales = fixed_scales(model, policy, calibration, spec.num_layers, ctx)
        nll = window_nll(model, token_ids, policy, **options, scales=scales, progress=name if progress else None)
        rows.append(shared | quality_row(name, policy, spec, nll, baseline, ctx=ctx))
    return rows


def fixed_scales(
    model: PreTrainedModel, policy: KVPolicy, calibration: Sequence[int], num_layers: int, ctx: int
) -> dict[int, LayerScales] | None:
    """The scales that ``policy`` needs before a run, measured on ``calibration``; None if it needs none."""
    if not has_fixed_scales(policy, num_layers):
        return None
    if not len(calibration):
        raise ValueError(f"calibration must hold tokens for a policy with scales fixed before a run: {policy}")
    return calibrate(model, calibration, policy, ctx=ctx)


def unquantised_row(spec: KVCacheSpec, nll: torch.Tensor) -> Row:
    """The row that the others are compared with."""
    own = spec.layers[0].key
    return quality_row("unquantised", KVPolicy(own, own), spec, nll, nll, ctx=1)


def quality_row(
    name: str, policy: KVPolicy, spec: KVCacheSpec, nll: torch.Tensor, baseline: torch.Tensor, *, ctx: int
) -> Row:
    """What a policy costs, from the NLL of the same tokens with and without it.

    ``dnll`` is the mean over tokens of the difference, ``dnll_se`` its standard error with tokens taken as
    independent: compare policies by these, perplexities of short texts differ by less than their noise.
    ``bits_per_value`` includes scales; ``bits_with_tails`` also the :func:`tail_bits` of a sequence of ``ctx`` tokens.
    """
    bits = policy.bits_per_value(spec)
    return {
        "policy": name,
        "k_format": str(policy.key),
        "v_format": str(policy.value),
        "rotate": policy.rotate,
        "other_layers": [number for number, _, _ in policy.exceptions],
        "bits_per_value": bits,
        "bits_with_tails": bits + tail_bits(policy, spec, ctx),
        **paired_loss(nll, baseline),
    }


def tail_bits(policy: KVPolicy, spec: KVCacheSpec, ctx: int) -> float:
    """Bits a value that 16-bit tails add to a sequence of ``ctx`` tokens.

    Where scales span the tokens of a block, those of the newest block wait in 16 bits until it is full: one block of
    K, or V, a layer and sequence. With K alone so, blocks of 32 and ctx 1024: 16 x 32 / 1024 / 2 = 0.25 bits.
    """
    values = ctx * sum(layer.num_kv_heads * (layer.head_dim + layer.head_dim_v) for layer in spec.layers)
    return 8 * policy.apply_to(spec).bytes_for_tails(1) / values


def paired_loss(nll: torch.Tensor, baseline: torch.Tensor) -> Row:
    """Perplexity, its change in percent, the mean paired difference of NLL in nats and its standard error."""
    difference = nll - baseline
    mean = float(difference.mean())
    return {
        "ppl": math.exp(float(nll.mean())),
        "delta_ppl_percent": 100 * math.expm1(mean),
        "dnll": mean,
        "dnll_se": float(difference.std()) / len(difference) ** 0.5,
    }


def quality_table(rows: Sequence[Row]) -> pd.DataFrame:
    """The columns that people compare, cheapest loss first."""
    columns = ["policy", "bits_per_value", "ppl", "delta_ppl_percent", "dnll", "dnll_se"]
    return pd.DataFrame(rows).loc[:, columns].sort_values("dnll", ignore_index=True)
