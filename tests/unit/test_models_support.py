"""What the engine refuses, by name and with the reason, and what it does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from labkit.models import check_support, explain_support, require_supported

_SIZES = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def config(model_type: str, **changes: Any) -> PreTrainedConfig:
    return CONFIG_MAPPING[model_type](**changes)


REFUSED = [
    ("falcon", {}, "does not call attention through transformers' interface"),
    ("bloom", {}, "does not call attention through transformers' interface"),
    ("mpt", {}, "does not call attention through transformers' interface"),
    ("xglm", {}, "does not call attention through transformers' interface"),
    ("gpt_neo", {}, "does not call attention through transformers' interface"),
    ("git", {}, "does not call attention through transformers' interface"),
    ("llama4_text", {}, "layers of type chunked_attention"),
    ("phimoe", {"sliding_window": 100}, "applies its sliding window of 100 by a mask alone"),
    ("doge", {}, "adds a learned mask"),
    ("mamba", {}, "linear_attention|recurrent"),
    ("jamba", {}, "linear_attention|recurrent"),
    ("recurrent_gemma", {}, "linear_attention|recurrent"),
    ("qwen3_next", {}, "layers of type linear_attention"),
    ("rwkv", {}, "recurrent or convolutional layers"),
    ("t5", {}, "encoder-decoder"),
    ("bart", {}, "encoder-decoder"),
    ("bart", {"is_encoder_decoder": False}, "takes no position_ids"),
    ("bert", {}, "not causal"),
    ("mllama", {}, "cross-attention layers"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "both directions"),
    ("vit", {}, "no causal language model"),
]


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"), REFUSED, ids=[f"{r[0]}-{i}" for i, r in enumerate(REFUSED)]
)
def test_refused_from_the_config_alone(model_type, changes, reason):
    with pytest.raises(ValueError, match=rf"(?s)model_type '{model_type}.*not supported: .*({reason})"):
        require_supported(config(model_type, **changes))


SUPPORTED = (
    "llama qwen2 qwen3 mistral gemma2 gemma3_text gemma3n_text gpt_oss phi3 gpt2 opt olmo2 deepseek_v3 stablelm "
    "mixtral starcoder2 cohere2 biogpt longcat_flash"
)


@pytest.mark.parametrize("model_type", SUPPORTED.split())
def test_supported(model_type):
    assert check_support(config(model_type)).reasons == ()


def test_a_model_is_looked_at_as_well_as_its_config():
    falcon = AutoModelForCausalLM.from_config(config("falcon", **_SIZES))
    with pytest.raises(ValueError, match=r"FalconForCausalLM \(model_type 'falcon'\) is not supported"):
        require_supported(falcon)
    assert check_support(AutoModelForCausalLM.from_config(config("llama", **_SIZES, intermediate_size=96))).supported


def test_a_window_longer_than_the_model_changes_nothing():
    assert check_support(config("phimoe", sliding_window=8192, max_position_embeddings=4096)).supported


# ---------------------------------------------------------------- rotary encodings that follow the batch


def _phi3(max_position_embeddings: int) -> PreTrainedConfig:
    factors = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48, "original_max_position_embeddings": 4096}
    return config(
        "phi3",
        max_position_embeddings=max_position_embeddings,
        original_max_position_embeddings=4096,
        rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, **factors},
    )


def test_longrope_is_refused_only_where_its_frequencies_can_change():
    assert "'longrope'" in check_support(_phi3(131072)).reasons[0]
    assert check_support(_phi3(4096)).supported


@pytest.mark.parametrize(
    ("kind", "supported"), [("dynamic", False), ("linear", True), ("yarn", True), ("llama3", True)]
)
def test_other_scaled_rotary_encodings(kind, supported):
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 1024}
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    assert check_support(config("llama", rope_parameters=rope)).supported is supported


def test_dynamic_rope_really_lets_requests_change_each_other():
    """The reason for the refusal: a long neighbour changes what a short request gets."""
    torch.manual_seed(0)
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    sizes = _SIZES | {"intermediate_size": 96, "max_position_embeddings": 32, "initializer_range": 0.2}
    model = AutoModelForCausalLM.from_config(config("llama", **sizes, rope_parameters=rope)).eval()
    short, long = torch.arange(20)[None], torch.arange(100)[None]
    both = torch.zeros(2, 100, dtype=torch.int64)
    both[0, :20], both[1] = short, long
    with torch.inference_mode():
        alone, batched = model(short).logits[0], model(both).logits[0, :20]
    assert (alone - batched).abs().max() > 1e-2


# ---------------------------------------------------------------- notes and names


def test_notes_say_what_is_special():
    assert "newest 4096 tokens" in check_support(config("gemma2")).notes[0]
    assert "per head" in check_support(config("deepseek_v3")).notes[0]
    assert any("read the KV cache of earlier ones" in note for note in check_support(config("gemma3n_text")).notes)
    assert "note: " in str(check_support(config("gemma2")))


def test_explained_by_folder_without_weights(tmp_path):
    config("falcon", **_SIZES).save_pretrained(tmp_path)
    report = explain_support(tmp_path)
    assert str(report).startswith("falcon: not supported: does not call attention")
    assert str(explain_support(None)) == "llama: supported"


def test_a_config_that_makes_no_model_is_no_crash():
    broken = config("llama", **_SIZES)
    broken.hidden_act = "no such function"
    assert "cannot be built from its config" in check_support(broken).reasons[0]
