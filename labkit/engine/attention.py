"""The plug-in that sends a Hugging Face model's attention to labkit."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

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


AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)


def attach(model: PreTrainedModel) -> str | None:
    """Make ``model`` call our attention; returns the name of what it used before, for :func:`detach`.

    Raises ValueError if the architecture does not go through transformers' attention interface (falcon, bloom, mpt
    and others only log that they ignore the request).
    """
    text_config = model.config.get_text_config()
    before = text_config._attn_implementation
    model.set_attn_implementation(ATTENTION_NAME)
    if text_config._attn_implementation != ATTENTION_NAME:
        raise ValueError(
            f"{type(model).__name__} (model_type {model.config.model_type!r}) does not let its attention be replaced: "
            "it does not use transformers' attention interface, so its KV cache cannot be paged"
        )
    return before


def detach(model: PreTrainedModel, before: str | None) -> None:
    """Give the model its own attention back."""
    model.set_attn_implementation(before or "eager")
