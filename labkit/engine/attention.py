"""The plug-in that sends a Hugging Face model's attention to labkit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import AttentionInterface, PreTrainedModel

from labkit.models import FusedAttentionInfo

from .forward_context import current_handler

ATTENTION_NAME = "labkit_paged"


def paged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it: [1, num_heads, num_tokens, D] in, [1, num_tokens, num_heads, D_v] out.

    The one "sequence" of the batch is all tokens of the step, one request after the other. ``attention_mask`` is
    None, since no mask function is registered under our name: what a token may see follows from block tables.
    """
    out = current_handler()(
        module.layer_idx,  # type: ignore[arg-type]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return out[None], None


def attend_fused(info: FusedAttentionInfo, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Attention as fused layers call it (see labkit.models.fused)."""
    return current_handler().attend_fused(info, qkv, cos, sin)


AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)


@dataclass(slots=True)
class _Attached:
    before: str | None
    num_engines: int


# Engines may share a model: it gets its own attention back when the last of them lets go.
_attached: WeakKeyDictionary[PreTrainedModel, _Attached] = WeakKeyDictionary()


def attach(model: PreTrainedModel) -> None:
    """Make ``model`` call our attention, until as many calls of :func:`detach`.

    Raises ValueError if the architecture does not go through transformers' attention interface (falcon, bloom, mpt
    and others only log that they ignore the request).
    """
    if model in _attached:
        _attached[model].num_engines += 1
        return
    before = model.config.get_text_config()._attn_implementation
    model.set_attn_implementation(ATTENTION_NAME)
    if not is_attached(model):
        raise ValueError(
            f"{type(model).__name__} (model_type {model.config.model_type!r}) does not let its attention be replaced: "
            "it does not use transformers' attention interface, so its KV cache cannot be paged"
        )
    _attached[model] = _Attached(before, 1)


def is_attached(model: PreTrainedModel) -> bool:
    """Whether ``model`` calls our attention now."""
    return model.config.get_text_config()._attn_implementation == ATTENTION_NAME


def detach(model: PreTrainedModel) -> None:
    """Undo one :func:`attach`; after the last the model has its own attention back."""
    attached = _attached[model]
    attached.num_engines -= 1
    if attached.num_engines == 0:
        del _attached[model]
        model.set_attn_implementation(attached.before or "eager")
