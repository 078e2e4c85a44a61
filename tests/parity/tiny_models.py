"""Tiny models with random weights, one for every kind of attention that the engine must get right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB_SIZE = 128

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}


def _build(model_type: str, **options: Any) -> PreTrainedModel:
    """A seeded float32 model whose logits are far apart: weights with a standard deviation of 0.2."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**(_COMMON | options))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, 0.2)
            elif ("norm" in name or "ln_" in name) and name.endswith("weight"):
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:  # biases, attention sinks
                parameter.normal_(0.0, 0.5)
    return model.eval()


def _gpt2() -> PreTrainedModel:
    return _build("gpt2", num_key_value_heads=4, n_embd=64, n_layer=3, n_head=4, n_positions=256, n_inner=96)


def _opt() -> PreTrainedModel:
    return _build("opt", num_key_value_heads=4, ffn_dim=96, word_embed_proj_dim=64, do_layer_norm_before=True)


def _deepseek_v3() -> PreTrainedModel:
    """Multi-head latent attention: keys of 24 numbers, values of 16; experts from the second layer on."""
    return _build(
        "deepseek_v3",
        num_key_value_heads=4,
        head_dim=8,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
    )


def _gpt_oss() -> PreTrainedModel:
    """Attention sinks, and a window in every other layer."""
    return _build(
        "gpt_oss",
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )


def _gemma3n() -> PreTrainedModel:
    """The last two of six layers read the K and V of earlier ones."""
    return _build(
        "gemma3n_text",
        num_hidden_layers=6,
        intermediate_size=[96] * 6,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 3,
        sliding_window=8,
        vocab_size_per_layer_input=VOCAB_SIZE,
        hidden_size_per_layer_input=16,
        laurel_rank=8,
        altup_num_inputs=2,
        activation_sparsity_pattern=[0.0] * 6,
        final_logit_softcapping=30.0,
    )


TINY: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: _build("llama"),
    "qwen2": lambda: _build("qwen2"),
    "qwen3": lambda: _build("qwen3"),
    "mistral": lambda: _build("mistral", sliding_window=10),
    "gemma2": lambda: _build("gemma2", sliding_window=8, query_pre_attn_scalar=16, attn_logit_softcapping=5.0),
    "gemma3": lambda: _build("gemma3_text", sliding_window=8, query_pre_attn_scalar=16, sliding_window_pattern=2),
    "gpt_oss": _gpt_oss,
    "phi3": lambda: _build("phi3"),
    "gpt2": _gpt2,
    "opt": _opt,
    "olmo2": lambda: _build("olmo2"),
    "deepseek_v3": _deepseek_v3,
    "stablelm": lambda: _build("stablelm", partial_rotary_factor=0.5),
    "gemma3n": _gemma3n,
}
"""Builders by name; each takes well under a second."""
