"""Which decoder layers can be fused, and merging the projections that share an input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

FUSABLE_LAYERS = frozenset(
    f"transformers.models.{family}.modeling_{family}.{name}DecoderLayer"
    for family, name in (("llama", "Llama"), ("mistral", "Mistral"), ("qwen2", "Qwen2"), ("qwen3", "Qwen3"))
)
"""By exact class: others have the same modules but compute more (ministral3 scales q, granite scales residuals)."""


def why_layer_cannot_fuse(layer: Any) -> str | None:
    """None when the layer computes exactly what `FusedDecoderLayer` does, else the reason, as part of a sentence."""
    name = f"{type(layer).__module__}.{type(layer).__qualname__}"
    if name not in FUSABLE_LAYERS:
        families = ", ".join(sorted(known.split(".")[2] for known in FUSABLE_LAYERS))
        return f"{type(layer).__name__} is not one of the known Llama-structured layers ({families})"
    for path, module in layer.named_modules():
        if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
            return f"{path or 'the layer'} has hooks or a replaced forward, which fusing would skip"
    attn, mlp = layer.self_attn, layer.mlp
    groups = {
        "q_proj, k_proj and v_proj": [attn.q_proj, attn.k_proj, attn.v_proj],
        "o_proj": [attn.o_proj],
        "gate_proj and up_proj": [mlp.gate_proj, mlp.up_proj],
        "down_proj": [mlp.down_proj],
    }
    for names, linears in groups.items():
        for linear in linears:
            if type(linear) is not nn.Linear or type(linear.weight.data) is not torch.Tensor:
                kind = f"{type(linear).__name__} with a {type(linear.weight.data).__name__} weight"
                return f"{names} must be plain nn.Linear, found {kind}"
        if len({(linear.weight.dtype, linear.weight.device, linear.bias is None) for linear in linears}) > 1:
            return f"{names} differ in dtype, device or in having a bias"
    if type(mlp.act_fn).__name__ not in ("SiLU", "SiLUActivation"):
        return f"the activation is {type(mlp.act_fn).__name__}, not SiLU"
    return None


def sliding_window_of(layer: Any) -> int | None:
    """The window that this layer hands to the attention function of transformers."""
    attn = layer.self_attn
    if type(layer).__name__ == "MistralDecoderLayer":  # one window for all layers, in the config
        return attn.config.sliding_window
    return getattr(attn, "sliding_window", None)  # qwen2 and qwen3 decide per layer; llama has none


def merge_rows(linears: Sequence[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One weight [sum of out_features, in_features] and bias whose rows the given layers' parameters become views of.

    The parameters stay the same objects with the same values. Only one group of layers exists twice while copying.
    """
    weight = merge_tensors([linear.weight for linear in linears])
    bias = None if linears[0].bias is None else merge_tensors([linear.bias for linear in linears])
    return weight, bias


def merge_tensors(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """The concatenation of the parameters' rows; afterwards parameters[i] is a view of rows of it."""
    first = parameters[0]
    sizes = [parameter.shape[0] for parameter in parameters]
    if are_adjacent(parameters):
        return first.data.as_strided((sum(sizes), *first.shape[1:]), first.stride(), first.storage_offset())
    merged = torch.cat([parameter.data for parameter in parameters])
    for parameter, rows in zip(parameters, merged.split(sizes), strict=True):
        parameter.data = rows
    return merged


def are_adjacent(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether the parameters lie one after the other in one storage."""
    storage, end = parameters[0].untyped_storage().data_ptr(), parameters[0].storage_offset()
    for parameter in parameters:
        if parameter.untyped_storage().data_ptr() != storage or parameter.storage_offset() != end:
            return False
        if not parameter.is_contiguous():
            return False
        end += parameter.numel()
    return not parameters[0].is_meta
