"""Converting the number of KV heads: exact where it can be, and said where it cannot."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from labkit.models import convert_kv_heads, kv_heads_merge
from tests.parity.tiny_models import TINY

LLAMA_LIKE = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss", "stablelm"]
WITH_SVD = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3"]
TOKENS = torch.randint(2, 120, (2, 40), generator=torch.Generator().manual_seed(0))


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        return model(TOKENS).logits


@pytest.mark.parametrize("family", LLAMA_LIKE)
def test_repeating_heads_changes_no_logit_and_mean_undoes_it(family: str) -> None:
    model = TINY[family]()
    mha, report = convert_kv_heads(model, 4, "repeat")
    assert report.exact
    assert report.kv_bytes_after == 2 * report.kv_bytes_before == 2 * 2 * 3 * 2 * 16 * 2
    assert mha.config.num_key_value_heads == 4 and mha.config is not model.config
    assert torch.allclose(logits(mha), logits(model), atol=1e-5)
    back, report = convert_kv_heads(mha, 2, "mean")
    assert report.exact
    for name, tensor in back.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name


@pytest.mark.parametrize("family", WITH_SVD)
def test_svd_of_copies_is_exact_up_to_rounding(family: str) -> None:
    model = TINY[family]()
    mha, _ = convert_kv_heads(model, 4, "repeat")
    back, report = convert_kv_heads(mha, 2, "svd")
    assert report.exact
    assert torch.allclose(logits(back), logits(model), atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_svd_recovers_heads_that_differ_by_what_the_queries_can_absorb(family: str) -> None:
    """V heads mixed by any matrix and K heads turned in RoPE's planes look different, and are one head."""
    model, _ = convert_kv_heads(TINY[family](), 1, "mean")
    model, _ = convert_kv_heads(model, 2, "repeat")
    torch.manual_seed(1)
    for layer in model.model.layers:
        attn = layer.self_attn
        turned = torch.polar(torch.rand(2, 8, dtype=torch.float64) + 0.5, torch.rand(2, 8, dtype=torch.float64))
        mixed = torch.randn(2, 16, 16, dtype=torch.float64)
        for linear, change in (
            (attn.k_proj, lambda heads, c=turned: kv_heads_merge.turn_queries(heads, c)),
            (attn.v_proj, lambda heads, m=mixed: m @ heads),
        ):
            parameters = [linear.weight] if linear.bias is None else [linear.weight, linear.bias[:, None]]
            rows = torch.cat([p.detach().double() for p in parameters], dim=1).unflatten(0, (2, 16))
            changed = change(rows).flatten(0, 1)
            linear.weight.data = changed[:, :64].float()
            if linear.bias is not None:
                linear.bias.data = changed[:, 64].float()
    merged, report = convert_kv_heads(model, 1, "svd")
    assert report.exact
    assert torch.allclose(logits(merged), logits(model), atol=2e-4)
    _, averaged = convert_kv_heads(model, 1, "mean")
    assert not averaged.exact


def test_shared_heads_are_the_least_squares_ones() -> None:
    """The error is that of the singular values left out, and no other shared head comes closer."""
    torch.manual_seed(0)
    values = torch.randn(3, 4, 20, dtype=torch.float64)
    shared, mix = kv_heads_merge.shared_value_head(values, 1)
    error = kv_heads_merge.relative_error(values, mix @ shared.repeat(3, 1, 1)) * values.norm()
    left_out = torch.linalg.svdvals(values.flatten(0, 1))[4:]
    assert torch.isclose(error * 1.0, left_out.norm())
    keys = torch.randn(3, 4, 20, dtype=torch.float64)
    shared, factors = kv_heads_merge.shared_key_head(keys, 1)
    best = (keys - kv_heads_merge.keys_of_shared(shared, factors)).norm()
    mean = kv_heads_merge.mean_head(keys, 1)
    assert best < (keys - kv_heads_merge.repeat_heads(mean, 3)).norm()
    for _ in range(20):
        near = shared + 0.05 * torch.randn_like(shared)
        assert (keys - kv_heads_merge.keys_of_shared(near, factors)).norm() > best


@pytest.mark.parametrize("method", ["mean", "first", "svd"])
def test_fewer_heads_are_not_exact_and_the_report_says_so(tiny_llama: PreTrainedModel, method: str) -> None:
    before = {name: tensor.clone() for name, tensor in tiny_llama.state_dict().items()}
    mqa, report = convert_kv_heads(tiny_llama, 1, method)
    assert not report.exact and "uptrain" in str(report)
    assert "GQA 2 -> MQA 1" in str(report) and "384 -> 192 B" in str(report)
    assert (logits(mqa) - logits(tiny_llama)).abs().max() > 0.1
    assert mqa.model.layers[0].self_attn.k_proj.weight.shape == (16, 64)
    assert all(torch.equal(tensor, before[name]) for name, tensor in tiny_llama.state_dict().items())
    assert tiny_llama.config.num_key_value_heads == 2


def test_svd_is_closer_than_mean_and_mean_than_first(tiny_llama: PreTrainedModel) -> None:
    reports = {method: convert_kv_heads(tiny_llama, 1, method)[1] for method in ("svd", "mean", "first")}
    for error in ("key_error", "value_error"):
        assert getattr(reports["svd"], error) < getattr(reports["mean"], error) < getattr(reports["first"], error)


def test_the_converted_model_saves_and_loads(tiny_llama: PreTrainedModel, tmp_path) -> None:
    mqa, _ = convert_kv_heads(tiny_llama, 1, "mean")
    mqa.save_pretrained(tmp_path)
    assert torch.equal(logits(type(tiny_llama).from_pretrained(tmp_path).eval()), logits(mqa))


def test_numbers_that_do_not_fit_are_refused(tiny_llama: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="num_kv_heads must be a divisor of the model's 2 .*one of 1, 2; got 3"):
        convert_kv_heads(tiny_llama, 3, "mean")
    with pytest.raises(
        ValueError, match="multiple of the model's 2 that divides its 4 query heads.*one of 2, 4; got 8"
    ):
        convert_kv_heads(tiny_llama, 8, "repeat")
    with pytest.raises(ValueError, match="one of 2, 4; got 1"):
        convert_kv_heads(tiny_llama, 1, "repeat")
    with pytest.raises(ValueError, match="method must be one of 'repeat', 'mean', 'first', 'svd', got 'median'"):
        convert_kv_heads(tiny_llama, 1, "median")
    with pytest.raises(TypeError, match="num_kv_heads must be an int, got 1.0"):
        convert_kv_heads(tiny_llama, 1.0, "mean")
    with pytest.raises(TypeError, match="model must be a transformers PreTrainedModel, got str"):
        convert_kv_heads("llama", 1, "mean")


@pytest.mark.parametrize("family", ["phi3", "gpt2", "deepseek_v3", "olmo2", "gemma3n"])
def test_other_architectures_are_refused_by_name(family: str) -> None:
    model = TINY[family]()
    with pytest.raises(ValueError, match=f"the KV heads of {type(model).__name__} .* cannot be converted"):
        convert_kv_heads(model, 1, "mean")


def test_svd_is_refused_where_rope_is_not_known() -> None:
    with pytest.raises(ValueError, match="method='svd' cannot convert StableLmForCausalLM.*use 'mean'"):
        convert_kv_heads(TINY["stablelm"](), 1, "svd")
