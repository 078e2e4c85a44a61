"""KVCacheSpec.from_config against what transformers really caches, and against the configs of big models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from labkit.kv_math import KVCacheSpec

LLAMA_3_8B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}

SMALL = {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 32, "vocab_size": 64}
TINY_MODELS: dict[str, dict[str, Any]] = {
    "llama": SMALL | {"num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen3": SMALL | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    "gpt2": {"n_layer": 2, "n_head": 4, "n_embd": 32, "vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0},
    "opt": SMALL | {"num_attention_heads": 4, "ffn_dim": 32, "word_embed_proj_dim": 32},
    "phi3": SMALL | {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0},
    "gemma2": SMALL | {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16},
    "falcon": {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 64},
    "gpt_bigcode": {"n_layer": 2, "n_head": 4, "n_embd": 32, "vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0},
    "gemma3n_text": SMALL
    | {
        "num_hidden_layers": 5,
        "num_kv_shared_layers": 2,
        "intermediate_size": [32] * 5,
        "vocab_size_per_layer_input": 64,
    }
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "hidden_size_per_layer_input": 8}
    | {"layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"], "laurel_rank": 4}
    | {"activation_sparsity_pattern": [0.0] * 5},
    "gemma4_text": SMALL
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16}
    | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
    | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64},
}


@pytest.mark.parametrize("model_type", TINY_MODELS)
def test_the_spec_equals_what_transformers_caches(model_type: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.CONFIG_MAPPING[model_type](**TINY_MODELS[model_type])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    num_tokens = 5
    with torch.no_grad():
        cache = model(torch.arange(num_tokens)[None], use_cache=True).past_key_values
    cached = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers if layer.keys is not None)
    spec = KVCacheSpec.from_config(config, "float32", block_size=1)
    assert spec.bytes_for_request(num_tokens) == cached
    assert KVCacheSpec.from_config(config.to_dict(), "float32", block_size=1) == spec  # a config.json says the same


def test_mla_is_counted_as_attention_receives_it_not_as_the_latent() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.CONFIG_MAPPING["deepseek_v3"](
        **SMALL,
        **{"num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": None},
        **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 10, "first_k_dense_replace": 3},
    )
    received: dict[int, int] = {}

    def attention(module, query, key, value, attention_mask, **kwargs):
        received[module.layer_idx] = key.nbytes + value.nbytes
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

    transformers.AttentionInterface.register("bytes_received", attention)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.set_attn_implementation("bytes_received")
    with torch.no_grad():
        model(torch.arange(5)[None], use_cache=False)
    spec = KVCacheSpec.from_config(config, "float32", block_size=1)
    assert spec.bytes_for_request(5) == sum(received.values()) == 5 * 3 * 4 * (12 + 10) * 4


def test_dicts_and_objects_say_the_same() -> None:
    spec = KVCacheSpec.from_config(LLAMA_3_8B)
    assert spec == KVCacheSpec.from_config(SimpleNamespace(**LLAMA_3_8B)) == KVCacheSpec(32, 8, 128, "bfloat16")
    assert KVCacheSpec.from_config(LLAMA_3_8B, "int8", value_dtype="int4").layers[0].value.dtype == "int4"


def test_the_dtype_is_the_configs_own_unless_it_has_none() -> None:
    assert KVCacheSpec.from_config(LLAMA_3_8B | {"torch_dtype": "float16"}).layers[0].key.dtype == "float16"
    without = {name: value for name, value in LLAMA_3_8B.items() if name != "torch_dtype"}
    assert KVCacheSpec.from_config(without).layers[0].key.dtype == "bfloat16"


def test_a_multimodal_wrapper_counts_its_text_model() -> None:
    wrapper = {"model_type": "some_vlm", "text_config": LLAMA_3_8B, "vision_config": {"num_hidden_layers": 24}}
    assert KVCacheSpec.from_config(wrapper) == KVCacheSpec.from_config(LLAMA_3_8B)


def test_deepseek_v3_caches_k_of_192_and_v_of_128_for_every_head() -> None:
    config = {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "hidden_size": 7168,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    assert KVCacheSpec.from_config(config) == KVCacheSpec(61, 128, 192, head_dim_v=128)


@pytest.mark.parametrize(
    ("changes", "kv_heads"),
    [
        ({"num_key_value_heads": None}, [32] * 32),
        ({"num_key_value_heads": [8] * 16 + [2] * 16}, [8] * 16 + [2] * 16),
        ({"num_key_value_heads": None, "multi_query": True}, [1] * 32),
        (
            {"num_key_value_heads": None, "multi_query": True, "num_kv_heads": 4, "new_decoder_architecture": True},
            [4] * 32,
        ),
        ({"num_key_value_heads": None, "multi_query_attention": True, "multi_query_group_num": 2}, [2] * 32),
        ({"num_key_value_heads": None, "attn_config": {"kv_n_heads": 8}}, [8] * 32),
        ({"num_kv_shared_layers": 20}, [8] * 12),
    ],
)
def test_kv_heads_under_their_many_names(changes: dict, kv_heads: list[int]) -> None:
    assert [layer.num_kv_heads for layer in KVCacheSpec.from_config(LLAMA_3_8B | changes).layers] == kv_heads


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "qwen3_next", "layer_types": ["linear_attention"]},
            "qwen3_next: layers of kind linear_attention",
        ),
        ({"model_type": "t5", "is_encoder_decoder": True}, "t5: encoder-decoder"),
        ({"model_type": "mllama", "cross_attention_layers": [3]}, "mllama: cross-attention layers"),
        ({"hidden_size": 100}, "llama: hidden_size 100 is no multiple of 32 heads"),
        ({"hidden_size": None}, "llama: the config has none of hidden_size"),
        ({"num_hidden_layers": None}, "llama: the config has none of num_hidden_layers"),
    ],
)
def test_what_cannot_be_counted_is_refused_by_name(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVCacheSpec.from_config(LLAMA_3_8B | changes)
