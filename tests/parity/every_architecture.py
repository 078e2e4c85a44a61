"""A small model of every causal language model type of transformers, and whether the engine agrees with it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from labkit.engine import LLM
from labkit.models import check_support

from .forcing import assert_same_logits, reference_logits, run_forced

VOCAB_SIZE = 128
MAX_PARAMETERS = 30_000_000

# What a config calls its sizes, and what they become. A config takes those that it has.
_SIZES = (
    dict.fromkeys(["vocab_size", "vocab_size_per_layer_input"], VOCAB_SIZE)
    | dict.fromkeys(["hidden_size", "n_embd", "word_embed_proj_dim"], 64)
    | dict.fromkeys(["intermediate_size", "n_inner", "ffn_dim", "dff", "ffn_hidden_size"], 96)
    | dict.fromkeys(["num_hidden_layers", "n_layer", "num_layers"], 3)
    | dict.fromkeys(["num_attention_heads", "n_head", "swa_num_attention_heads"], 4)
    | dict.fromkeys(["num_key_value_heads", "num_global_key_value_heads", "swa_num_key_value_heads"], 2)
    | dict.fromkeys(["head_dim", "v_head_dim", "global_head_dim", "swa_head_dim", "swa_v_head_dim"], 16)
    | dict.fromkeys(["max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length"], 256)
    | dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"], 4)
    | dict.fromkeys(["num_experts_per_tok", "moe_topk", "moe_k"], 2)
    | dict.fromkeys(["n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "zero_expert_num"], 1)
    | dict.fromkeys(["n_group", "topk_group", "first_k_dense_replace", "num_kv_shared_layers"], 1)
    | dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"], 32)
    | dict.fromkeys(["moe_shared_expert_intermediate_size", "expert_ffn_hidden_size"], 32)
    | {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16}
    | {"hidden_size_per_layer_input": 16, "laurel_rank": 8, "altup_num_inputs": 2, "query_pre_attn_scalar": 16}
    | {"sliding_window": 8, "rotary_dim": 8, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
)
_ONLY_IF_SET = ("sliding_window", "num_kv_shared_layers")

NUM_PROMPT_TOKENS, NUM_NEW_TOKENS = [1, 5, 33, 20], [12, 9, 9, 14]


class Verdict(NamedTuple):
    """``kind`` is "same" (logits as in transformers), "refused", or "by config" (admitted, and too big to try)."""

    kind: str
    why: str = ""


def small_config(model_type: str) -> PreTrainedConfig:
    """A config of this type with small sizes; all else is as transformers has it."""
    kind = CONFIG_MAPPING[model_type]
    default = kind()
    known = default.to_dict().keys() | getattr(default, "attribute_map", {}).keys()
    sizes: dict[str, Any] = {name: size for name, size in _SIZES.items() if name in known}
    for name in _ONLY_IF_SET:
        if not getattr(default, name, None):
            sizes.pop(name, None)
    if "kv_lora_rank" in sizes:
        sizes |= {"num_key_value_heads": 4, "head_dim": 8}
    try:
        return kind(**sizes)
    except Exception:  # some compute the head's size themselves
        return kind(**{name: size for name, size in sizes.items() if name != "head_dim"})


def verdict(model_type: str) -> Verdict:
    """Ask :func:`check_support`, then try. Raises AssertionError if logits differ."""
    try:
        default = CONFIG_MAPPING[model_type]()
        has_parts = default.get_text_config() is not default
    except Exception as error:  # it needs arguments, or has several texts
        return Verdict("refused", f"has no default config ({str(error).splitlines()[-1].strip()})")
    reasons = check_support(default).reasons
    if not any("cannot be built" in reason for reason in reasons):
        if reasons:
            return Verdict("refused", "; ".join(reasons))
        if has_parts:
            return Verdict("by config", "has parts for images or sound, whose default sizes are large")
    config = small_config(model_type)
    reasons = check_support(config).reasons
    if reasons:
        return Verdict("refused", " ".join(reasons[0].split()).split(" You can install")[0])
    with torch.device("meta"):
        num_parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if num_parameters > MAX_PARAMETERS:
        return Verdict("by config", f"its smallest config has {num_parameters:,} parameters")
    assert_agrees(config)
    return Verdict("same")


def assert_agrees(config: PreTrainedConfig) -> None:
    """Same logits as transformers from chunked prompts, on a pool so tight that requests are preempted."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, 0.1)
            elif "norm" not in name:
                parameter.normal_(0.0, 0.3)
    generator = torch.Generator().manual_seed(1)
    sequences = [
        torch.randint(2, VOCAB_SIZE, (prompt + new,), generator=generator).tolist()
        for prompt, new in zip(NUM_PROMPT_TOKENS, NUM_NEW_TOKENS, strict=True)
    ]
    expected = [reference_logits(model, ids, n) for ids, n in zip(sequences, NUM_PROMPT_TOKENS, strict=True)]
    options = dict(block_size=4, max_model_len=48, num_gpu_blocks_override=18, max_num_seqs=6)
    with LLM(model, attention_backend="torch", max_num_batched_tokens=16, **options) as llm:
        run = run_forced(llm, sequences, NUM_PROMPT_TOKENS)
        assert_same_logits(run, expected)
        assert run.num_preemptions > 0
