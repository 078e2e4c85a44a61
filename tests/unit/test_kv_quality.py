"""Perplexity with a quantised KV cache: the paired loss against the unquantised run, through the paged path."""

from __future__ import annotations

import json
import math

import pytest
import torch

from labkit import LLM
from labkit.experiments.kv_quality import kv_quality, quality_table, window_nll
from labkit.experiments.quality_policies import quality_policies
from labkit.experiments.recorded_quality import TEXT
from labkit.kv_math import KVCacheSpec
from labkit.models import load_model
from labkit.paths import data_path
from labkit.quant import KVFormat, KVPolicy


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return torch.randint(1, 120, (150,), generator=torch.Generator().manual_seed(0)).tolist()


def test_unquantised_nll_is_that_of_transformers_window_by_window(tiny_llama, tokens):
    nll = window_nll(tiny_llama, tokens, ctx=64, block_size=16)
    windows = torch.tensor(tokens[:128]).view(2, 64)  # the last 22 tokens fill no window
    with torch.inference_mode():
        logits = tiny_llama(windows).logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.transpose(1, 2), windows[:, 1:], reduction="none")
    assert nll.shape == (126,)
    assert torch.allclose(nll, expected.double().flatten(), atol=1e-5)


def test_the_model_has_its_own_attention_afterwards(tiny_llama, tokens):
    before = tiny_llama.config._attn_implementation
    window_nll(tiny_llama, tokens, KVPolicy.of("int8"), ctx=64)
    assert tiny_llama.config._attn_implementation == before


def test_storing_float32_or_rotating_alone_changes_nothing(tiny_llama, tokens):
    exact = window_nll(tiny_llama, tokens, ctx=64)
    for rotate in (False, True):
        policy = KVPolicy.of("float32", rotate=rotate)
        assert torch.allclose(window_nll(tiny_llama, tokens, policy, ctx=64), exact, atol=1e-5)


def test_k_and_v_are_both_quantised_also_within_the_window(tiny_llama, tokens):
    exact = window_nll(tiny_llama, tokens, ctx=64)
    crude = KVFormat.of("int4")
    for policy in (KVPolicy.of(crude, "float32"), KVPolicy.of("float32", crude)):
        change = (window_nll(tiny_llama, tokens, policy, ctx=64) - exact).abs()
        assert change[:8].max() > 1e-4  # the first tokens have no earlier chunk to read


def test_a_named_layer_keeps_its_format(tiny_llama, tokens):
    exact = window_nll(tiny_llama, tokens, ctx=64)
    spared = KVPolicy.of("int4").with_layers([0, 1, 2], "float32")
    assert torch.allclose(window_nll(tiny_llama, tokens, spared, ctx=64), exact, atol=1e-6)


def test_rows_are_paired_and_say_what_they_cost(tiny_llama, tokens):
    policies = {"int8": KVPolicy.of("int8"), "int4": KVPolicy.of("int4")}
    rows = kv_quality(tiny_llama, tokens, policies, text="random", ctx=64, block_size=16)
    base, int8, int4 = rows
    assert (base["policy"], base["dnll"], base["dnll_se"], base["bits_per_value"]) == ("unquantised", 0, 0, 32)
    assert (base["text"], base["tokens"], base["device"]) == ("random", 128, "cpu")
    assert int8["bits_per_value"] == 10  # 8 bits, and 32 bits of scale for a head of 16
    assert int4["dnll_se"] > int8["dnll_se"] > 0
    for row in rows:
        assert row["ppl"] == pytest.approx(base["ppl"] * math.exp(row["dnll"]))
        assert row["delta_ppl_percent"] == pytest.approx(100 * (row["ppl"] / base["ppl"] - 1), abs=1e-6)
    assert list(quality_table(rows)["dnll"]) == sorted(row["dnll"] for row in rows)


def test_bad_input_is_refused(tiny_llama, tokens):
    with pytest.raises(ValueError, match=r"ctx must be within \[2, 150\], the number of tokens, got 1024"):
        window_nll(tiny_llama, tokens)
    with pytest.raises(ValueError, match="got 3"):
        window_nll(tiny_llama, tokens, KVPolicy.of("int8").with_layers([3], "float32"), ctx=64)


def test_a_model_that_an_open_llm_has_fused_is_refused(tiny_llama, tokens):
    with LLM(tiny_llama, num_gpu_blocks_override=16), pytest.raises(RuntimeError, match="close it"):
        window_nll(tiny_llama, tokens, KVPolicy.of("int8"), ctx=64)
    window_nll(tiny_llama, tokens, KVPolicy.of("int8"), ctx=64)


def test_the_recorded_table_names_its_source_and_shows_the_known_order():
    recorded = json.loads(data_path("results/quality.json").read_text())
    assert "no GPU kernel ran" in recorded["measured"]
    assert recorded["provenance"]["gpu"] is None
    rows = {row["policy"]: row for row in recorded["rows"]}
    policies = quality_policies()
    assert set(rows) <= {"unquantised", *policies} and all(row["commit"] for row in rows.values())
    spec = KVCacheSpec(num_layers=30, num_kv_heads=3, head_dim=64, block_size=32)
    for name, row in rows.items():
        if name != "unquantised":
            assert row["bits_per_value"] == policies[name].bits_per_value(spec)
            assert (row["k_format"], row["v_format"]) == (str(policies[name].key), str(policies[name].value))
    dnll = {name: row["dnll"] for name, row in rows.items()}
    assert dnll["int8 per token-head"] < dnll["fp8 e4m3 per token-head"] < dnll["int4 K per channel, V per token"]
    assert dnll["int4 K per channel, V per token"] < dnll["int4 asymmetric, groups of 32"]
    assert dnll["int4 asymmetric, groups of 32"] < dnll["int4 per token-head, symmetric"]


@pytest.mark.slow
def test_int4_by_token_harms_the_embedded_model_and_int8_does_not():
    model, tokenizer = load_model(dtype=torch.float32, device="cpu")
    token_ids = tokenizer.encode(data_path(TEXT).read_text()[:8000], verbose=False)[:1024]
    chosen = {
        name: quality_policies()[name]
        for name in ("int8 per token-head", "int4 per token-head, symmetric", "int4 K per channel, V per token")
    }
    _, int8, per_token, per_channel = kv_quality(model, token_ids, chosen, text="1,024 tokens")
    assert abs(int8["dnll"]) < 0.005
    assert per_token["dnll"] - 4 * per_token["dnll_se"] > 0.05
    assert per_channel["dnll"] + 4 * per_channel["dnll_se"] < 0.07
