"""Models with random weights: the right shape for measuring speed, without a download."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

from labkit.kv_math import ModelShape, model_shape

from .loading import resolve_device, resolve_dtype


@dataclass(frozen=True, slots=True)
class RandomWeights:
    """Random weights of a named shape, as ``LLM(model=...)`` takes them: made where they run, on each rank its own.

    :func:`random_model` with the same ``shape``, ``dtype`` and ``seed``.
    """

    shape: str
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0


def random_model(
    shape: str | ModelShape | PreTrainedConfig,
    *,
    dtype: str | torch.dtype = torch.bfloat16,
    device: str | torch.device | None = None,
    seed: int = 0,
) -> PreTrainedModel:
    """A model of a named shape, or of a transformers config, with random weights made on the device.

    The same seed gives the same weights on the same kind of device. Raises ValueError for an unknown name
    (``labkit.kv_math.MODEL_SHAPES`` lists them), dtype or device.
    """
    chosen_device = resolve_device(device)
    chosen_dtype = resolve_dtype(dtype, chosen_device) or torch.bfloat16
    if isinstance(shape, str):
        shape = model_shape(shape)
    config = config_of_shape(shape) if isinstance(shape, ModelShape) else shape
    generators = [chosen_device] if chosen_device.type == "cuda" else []
    with torch.random.fork_rng(generators), chosen_device:  # nothing is built on the CPU first
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=chosen_dtype)
    return model.eval()


def config_of_shape(shape: ModelShape) -> PreTrainedConfig:
    """A transformers config with exactly the parameters of ``shape``: Llama's, unless the shape says otherwise."""
    sizes: dict[str, Any] = dict(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_model_len,
        tie_word_embeddings=shape.tied_embeddings,
    )
    if shape.num_experts > 1:
        experts: dict[str, Any] = dict(
            num_local_experts=shape.num_experts, num_experts_per_tok=shape.num_active_experts
        )
        config = MixtralConfig(**sizes, **experts)
    elif shape.num_norms == 4:
        config = Gemma2Config(**sizes, query_pre_attn_scalar=shape.head_dim)
    elif shape.qkv_bias:
        config = Qwen2Config(**sizes)
    else:
        config = LlamaConfig(**sizes)
    config.name_or_path = f"{shape.name}, random weights"
    return config
