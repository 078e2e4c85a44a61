"""Which models' KV heads can be converted: plain projections in every layer, nothing else that counts KV heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_PER_QUERY_HEAD = {"sinks"}  # parameters that do not count KV heads
# Where rotate_half turns all channels of a head, channel p together with p + head_dim / 2.
_ROTATES_HALVES = {
    "gemma", "gemma2", "gemma3_text", "llama", "ministral", "mistral", "mixtral", "qwen2", "qwen2_moe",
    "qwen3", "qwen3_moe",
}  # fmt: skip


def attention_layers(model: PreTrainedModel) -> list[Any]:
    """The attention modules of the decoder, in order. Raises ValueError, by name, for a model that is no Llama."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers PreTrainedModel, got {type(model).__name__}")
    config = model.config.get_text_config(decoder=True)
    layers = [m for m in model.modules() if hasattr(m, "layer_idx") and _is_attention(m)]
    reason = "its config has no num_key_value_heads" if not getattr(config, "num_key_value_heads", None) else None
    if reason is None and len(layers) != config.num_hidden_layers:
        reason = f"{len(layers)} of its {config.num_hidden_layers} layers have attention with k_proj, v_proj and o_proj"
    for attn in layers if reason is None else ():
        reason = reason or _why_not(attn, config.num_attention_heads, config.num_key_value_heads)
    if reason:
        raise ValueError(
            f"the KV heads of {type(model).__name__} (model_type {model.config.model_type!r}) cannot be converted: "
            f"{reason}"
        )
    return layers


def why_no_svd(model: PreTrainedModel) -> str | None:
    """None where the pairs of channels that RoPE turns are known, else the reason, as part of a sentence."""
    config = model.config.get_text_config(decoder=True)
    if config.model_type not in _ROTATES_HALVES:
        return f"how its RoPE pairs the channels is not known here (known: {', '.join(sorted(_ROTATES_HALVES))})"
    parameters = getattr(config, "rope_parameters", None) or {}
    for table in (parameters, *(t for t in parameters.values() if isinstance(t, dict))):
        if table.get("partial_rotary_factor", 1.0) != 1.0:
            return "its RoPE turns a part of the channels only"
    return None


def _is_attention(module: nn.Module) -> bool:
    return all(getattr(module, name, None) is not None for name in _PROJECTIONS)


def _why_not(attn: Any, num_heads: int, num_kv_heads: int) -> str | None:
    name = type(attn).__name__
    for projection in _PROJECTIONS:
        linear = getattr(attn, projection)
        if type(linear) is not nn.Linear or type(linear.weight.data) is not torch.Tensor:
            kind = type(linear).__name__
            return f"{projection} must be a plain nn.Linear, found {kind} (quantised, sharded or adapted)"
    rows = {
        "q_proj": (attn.q_proj.out_features, num_heads),
        "k_proj": (attn.k_proj.out_features, num_kv_heads),
        "v_proj": (attn.v_proj.out_features, num_kv_heads),
        "o_proj": (attn.o_proj.in_features, num_heads),
    }
    for projection, (found, heads) in rows.items():
        if found != heads * attn.head_dim:
            return f"{projection} of a layer spans {found} channels, not {heads} heads of {attn.head_dim}"
    for parameter, tensor in attn.named_parameters():
        module = parameter.split(".")[0]
        if module in ("q_norm", "k_norm") and tensor.shape != (attn.head_dim,):
            return f"{module} of {name} spans more than one head"
        if module not in (*_PROJECTIONS, "q_norm", "k_norm", *_PER_QUERY_HEAD):
            return f"{name} has parameters that are not known here ({parameter})"
    return None
