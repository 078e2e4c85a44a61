"""Ways in which a model's attention could go wrong unseen, that the parity matrix does not come across."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from labkit.engine import LLM, build
from labkit.kv_math import KVCacheSpec
from labkit.models import require_supported

from .forcing import assert_same_logits, reference_logits, run_forced
from .tiny_models import TINY, VOCAB_SIZE


@pytest.fixture
def windowed() -> PreTrainedModel:
    return TINY["mistral"]()  # 10 tokens


@pytest.mark.parametrize("num_tokens", [9, 10, 11, 12])
def test_a_window_of_10_shows_the_token_itself_and_9_before_it(windowed, num_tokens):
    """Sequences around that length, so that one token too many or too few would show."""
    ids = torch.randint(2, VOCAB_SIZE, (num_tokens,), generator=torch.Generator().manual_seed(2)).tolist()
    expected = reference_logits(windowed, ids, num_tokens - 1)
    with LLM(windowed, block_size=2) as llm:
        assert_same_logits(run_forced(llm, [ids], [num_tokens - 1]), [expected])


def test_a_window_that_lives_in_the_mask_only_is_refused_even_if_nothing_else_noticed(monkeypatch):
    monkeypatch.setattr(build, "require_supported", lambda model: None)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
    )
    config.sliding_window = 8
    with pytest.raises(ValueError, match=r"LlamaForCausalLM.*not supported: the sliding window of layers \[0, 1\]"):
        LLM(AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize("name", TINY)
def test_the_cache_takes_the_bytes_that_its_config_tells(name):
    """KV heads, head sizes, D_k and D_v apart, shared layers: what KVCacheSpec reads is what attention receives."""
    model = TINY[name]()
    with LLM(model, num_gpu_blocks_override=32) as llm:
        assert KVCacheSpec.from_config(model.config, "float32").bytes_per_token == llm.memory.bytes_per_token
        pool = sum(tensor.nbytes for tensor in llm._built.storage.tensors())  # type: ignore[union-attr]
        assert pool == llm.memory.kv_pool == KVCacheSpec.from_config(model.config, "float32").bytes_for_pool(32)


@pytest.mark.parametrize("model_type", ["diffllama", "hrm_text"])
def test_a_layer_with_two_caches_is_refused_by_name(model_type):
    with pytest.raises(ValueError, match=rf"'{model_type}'.* runs attention more than once in a layer"):
        require_supported(CONFIG_MAPPING[model_type]())
