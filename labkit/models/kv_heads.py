"""Another number of KV heads for a trained model: what costs nothing, and what must be paid for by training.

more heads    MHA <- GQA <- MQA    copies: every logit stays, the KV cache grows
fewer heads   MHA -> GQA -> MQA    heads that differ become one: the cache shrinks and the model breaks until it is
                                   uptrained (labkit.experiments.uptrain)
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn
from transformers import PreTrainedModel

from labkit.kv_math import attention_kind, kv_bytes_per_token

from . import kv_heads_merge as merge
from .kv_heads_structure import attention_layers, why_no_svd

Method = Literal["repeat", "mean", "first", "svd"]
_EXACT = 1e-6  # relative error of the projections: what rounding of float32 weights leaves


@dataclass(frozen=True, slots=True)
class HeadConversion:
    """What :func:`convert_kv_heads` did.

    key_error, value_error: relative Frobenius error of the K and V projections, mean over layers, after what q_proj and
    o_proj absorb. exact: both are zero up to rounding, so the new model computes what the old one did.
    kv_bytes_before, kv_bytes_after: of one token in the 16-bit cache, all layers.
    """

    method: Method
    num_heads: int
    num_kv_heads_before: int
    num_kv_heads: int
    key_error: float
    value_error: float
    kv_bytes_before: int
    kv_bytes_after: int

    @property
    def exact(self) -> bool:
        return max(self.key_error, self.value_error) < _EXACT

    def __str__(self) -> str:
        before, after = (attention_kind(self.num_heads, n) for n in (self.num_kv_heads_before, self.num_kv_heads))
        verdict = (
            "exact: no logit changes"
            if self.exact
            else f"NOT exact (K {self.key_error:.0%}, V {self.value_error:.0%} off): uptrain before use"
        )
        return (
            f"{before} {self.num_kv_heads_before} -> {after} {self.num_kv_heads} KV heads by {self.method!r}, "
            f"{self.kv_bytes_before:,} -> {self.kv_bytes_after:,} B a token; {verdict}"
        )


def convert_kv_heads(
    model: PreTrainedModel, num_kv_heads: int, method: Method = "mean"
) -> tuple[PreTrainedModel, HeadConversion]:
    """A copy of ``model`` with ``num_kv_heads`` KV heads, and what that did to it. ``model`` is left as it is.

    For Llama-like decoders: q_proj, k_proj, v_proj, o_proj in every layer, with or without biases and per-head q_norm
    and k_norm. Heads are grouped as grouped-query attention does: neighbours share.

    Args:
        num_kv_heads: a multiple of the model's for "repeat", a divisor of it for the others; divides the query heads.
        method: "repeat" copies heads, which changes no logit. The others shrink:
            "mean" averages each group's K and V projections (Ainslie et al., 2023, found this the best start);
            "first" keeps the first head of each group;
            "svd" takes the shared head that is closest to its group in the least-squares sense, after what the query
            side can absorb: any mixing of V channels (into o_proj), but of K only one complex factor for each head and
            rotated channel pair (into q_proj), since nothing else commutes with RoPE. Where K is normalised
            (q_norm, k_norm) it can absorb nothing, and K is averaged. For SmolLM2 the best start of uptraining, though
            not the best model before it (docs/heads.md).

    Heads of a trained model differ, so all but "repeat" destroy it until it is uptrained (5 % of pre-training in
    Ainslie et al., "GQA", 2023, section 2.1): with SmolLM2's 3 heads averaged to 1, perplexity goes from 39 to
    thousands. The report's ``exact`` tells. Heads that were copies are the exception: "mean" undoes "repeat".

    Raises ValueError for a number that does not fit and, by name, for an architecture that is not known to convert;
    TypeError for a ``num_kv_heads`` that is no int.
    """
    layers = attention_layers(model)
    config = model.config.get_text_config(decoder=True)
    num_heads, before = config.num_attention_heads, config.num_key_value_heads
    _check(num_heads, before, num_kv_heads, method)
    if method == "svd" and (reason := why_no_svd(model)):
        raise ValueError(f"method='svd' cannot convert {type(model).__name__}: {reason}; use 'mean'")

    converted = copy.deepcopy(model)
    errors = [_convert_layer(attn, num_heads, before, num_kv_heads, method) for attn in attention_layers(converted)]
    converted.config.get_text_config(decoder=True).num_key_value_heads = num_kv_heads
    key_error, value_error = (sum(column) / len(errors) for column in zip(*errors, strict=True))
    sizes = [kv_bytes_per_token(len(layers), n, layers[0].head_dim) for n in (before, num_kv_heads)]
    return converted, HeadConversion(method, num_heads, before, num_kv_heads, key_error, value_error, *sizes)


def _check(num_heads: int, before: int, after: int, method: str) -> None:
    if method not in get_args(Method):
        raise ValueError(f"method must be one of {', '.join(map(repr, get_args(Method)))}, got {method!r}")
    if not isinstance(after, int) or isinstance(after, bool):
        raise TypeError(f"num_kv_heads must be an int, got {after!r}")
    if method == "repeat":
        allowed = [n for n in range(before, num_heads + 1) if n % before == 0 and num_heads % n == 0]
        rule = f"a multiple of the model's {before} that divides its {num_heads} query heads"
    else:
        allowed = [n for n in range(1, before + 1) if before % n == 0]
        rule = f"a divisor of the model's {before}"
    if after not in allowed:
        raise ValueError(
            f"num_kv_heads must be {rule} for method={method!r}: one of {', '.join(map(str, allowed))}; got {after}"
        )


@torch.no_grad()
def _convert_layer(attn: Any, num_heads: int, before: int, after: int, method: Method) -> tuple[float, float]:
    """Replace k_proj and v_proj (svd: rewrite q_proj and o_proj too); the relative errors of K and V."""
    keys, values = _heads(attn.k_proj, before), _heads(attn.v_proj, before)
    if method == "svd":
        new_values, mix = merge.shared_value_head(values, after)
        stands_for_values = mix @ merge.repeat_heads(new_values, before)
        output = attn.o_proj.weight.double().unflatten(1, (num_heads, -1))
        attn.o_proj.weight.copy_(merge.mix_outputs(output, mix).flatten(1))
        if getattr(attn, "k_norm", None) is None:
            new_keys, factors = merge.shared_key_head(keys, after)
            stands_for_keys = merge.keys_of_shared(new_keys, factors)
            _store(attn.q_proj, merge.turn_queries(_heads(attn.q_proj, num_heads), factors))
        else:
            new_keys = merge.mean_head(keys, after)
            stands_for_keys = merge.repeat_heads(new_keys, before)
    else:
        convert = {"repeat": merge.repeat_heads, "mean": merge.mean_head, "first": merge.first_head}[method]
        new_keys, new_values = convert(keys, after), convert(values, after)
        stands_for_keys, stands_for_values = (_as_many(new, before) for new in (new_keys, new_values))
    attn.k_proj, attn.v_proj = _linear_of(attn.k_proj, new_keys), _linear_of(attn.v_proj, new_values)
    attn.num_key_value_groups = num_heads // after
    if hasattr(attn, "num_key_value_heads"):
        attn.num_key_value_heads = after
    return merge.relative_error(keys, stands_for_keys), merge.relative_error(values, stands_for_values)


def _as_many(heads: torch.Tensor, number: int) -> torch.Tensor:
    """``number`` heads for comparison: copies of fewer, or of more the first of each set of copies."""
    return merge.repeat_heads(heads, number) if len(heads) <= number else merge.first_head(heads, number)


def _heads(linear: nn.Linear, num_heads: int) -> torch.Tensor:
    """float64 [num_heads, head_dim, in_features (+ 1 for the bias)]."""
    weight = linear.weight.double()
    if linear.bias is not None:
        weight = torch.cat([weight, linear.bias.double()[:, None]], dim=1)
    return weight.unflatten(0, (num_heads, -1))


def _store(linear: nn.Linear, heads: torch.Tensor) -> None:
    rows = heads.flatten(0, 1)
    linear.weight.copy_(rows[:, : linear.in_features])
    if linear.bias is not None:
        linear.bias.copy_(rows[:, -1])


def _linear_of(like: nn.Linear, heads: torch.Tensor) -> nn.Linear:
    """A projection with these rows, else like ``like``: its bias, dtype, device and trainability."""
    weight = like.weight
    linear = nn.Linear(
        like.in_features,
        heads.shape[0] * heads.shape[1],
        bias=like.bias is not None,
        dtype=weight.dtype,
        device=weight.device,
    )
    _store(linear, heads)
    return linear.requires_grad_(weight.requires_grad).train(like.training)
