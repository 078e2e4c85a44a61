"""The tiny models of the parity tests are what they claim to be: parity on a dull model proves nothing."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from transformers import PreTrainedModel

from labkit.models import check_support

from .tiny_models import TINY, VOCAB_SIZE

NUM_TOKENS = 40


@cache
def tiny(name: str) -> PreTrainedModel:
    return TINY[name]()


def _tokens() -> torch.Tensor:
    return torch.randint(2, VOCAB_SIZE, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def _logits(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens, use_cache=False).logits[0]


@pytest.mark.parametrize("name", TINY)
def test_is_supported_float32_and_ready_for_inference(name):
    model = tiny(name)
    assert check_support(model).reasons == ()
    assert model.dtype == torch.float32 and not model.training


@pytest.mark.parametrize("name", TINY)
def test_logits_are_far_apart_and_depend_on_the_context(name):
    tokens = _tokens()
    logits = _logits(tiny(name), tokens)
    assert logits.shape == (NUM_TOKENS, VOCAB_SIZE) and logits.isfinite().all()
    assert logits.std(-1).min() > 0.5
    assert logits.argmax(-1).unique().numel() > 5
    changed = tokens.clone()
    changed[0, -5] = (changed[0, -5] + 1) % VOCAB_SIZE
    difference = (_logits(tiny(name), changed) - logits).abs().amax(-1)
    assert difference[:-5].max() < 1e-4  # causal
    assert difference[-1] > 1e-2  # and attention matters


@pytest.mark.parametrize("name", TINY)
def test_the_same_at_every_build(name):
    again = TINY[name]().state_dict()
    assert all(torch.equal(values, again[key]) for key, values in tiny(name).state_dict().items())


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3", "gpt_oss", "gemma3n"])
def test_the_window_is_shorter_than_the_prompts(name):
    model = tiny(name)
    window = model.config.sliding_window
    assert 8 <= window <= 12
    layer_types = getattr(model.config, "layer_types", None)
    assert layer_types is None or {"sliding_attention", "full_attention"} == set(layer_types)


def test_gpt_oss_has_sinks_that_matter():
    model = TINY["gpt_oss"]()
    before = _logits(model, _tokens())
    with torch.no_grad():
        for layer in model.model.layers:
            assert layer.self_attn.sinks.abs().min() > 0
            layer.self_attn.sinks.fill_(-1e4)
    assert (_logits(model, _tokens()) - before).abs().max() > 1e-2


def test_gemma2_has_a_softcap_that_matters():
    model = TINY["gemma2"]()
    before = _logits(model, _tokens())
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = None
    assert (_logits(model, _tokens()) - before).abs().max() > 1e-2


def test_deepseek_has_longer_keys_than_values():
    config = tiny("deepseek_v3").config
    assert config.qk_nope_head_dim + config.qk_rope_head_dim != config.v_head_dim


def test_gemma3n_shares_the_cache_of_a_layer_of_each_kind():
    config = tiny("gemma3n").config
    sharing = config.layer_types[-config.num_kv_shared_layers :]
    assert set(sharing) == {"sliding_attention", "full_attention"}
