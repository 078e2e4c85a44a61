"""What stands on perplexity: calibration, layers, the recommendation, fp8 weights and cache, the engine's own loss."""

from __future__ import annotations

import json

import pytest
import torch

from labkit import LLM
from labkit.experiments.calibration import calibrate
from labkit.experiments.engine_quality import engine_nll, engine_quality
from labkit.experiments.fp8_quality import fp8_ablation, fp8_ablation_emulated
from labkit.experiments.kv_quality import kv_quality, tail_bits, window_nll
from labkit.experiments.kv_windows import cache_spec, window_logits
from labkit.experiments.recommend import recommend
from labkit.experiments.recorded_quality import record_quality
from labkit.experiments.sensitivity import layer_sensitivity
from labkit.kv_math import PER_HEAD, PER_TENSOR, KVCacheSpec, KVFormat
from labkit.quant import KVPolicy, ScaleLayout, load_scales, measure_scales, save_scales


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return torch.randint(1, 120, (192,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(scope="module")
def keys(tiny_llama, tokens) -> dict[int, torch.Tensor]:
    """K of each layer, of two windows of 64 tokens."""
    seen: dict[int, list[torch.Tensor]] = {}

    def keep(layer, q, k, v):
        seen.setdefault(layer, []).append(k.clone())
        return q, k, v

    for _ in window_logits(tiny_llama, tokens[:128], keep, ctx=64):
        pass
    return {layer: torch.cat(parts) for layer, parts in seen.items()}


# ---------------------------------------------------------------- calibration


@pytest.mark.parametrize(
    "format",
    [
        KVFormat("fp8_e4m3", PER_TENSOR),
        KVFormat("int8", PER_HEAD),
        KVFormat("int8", ScaleLayout("layer", 1, 4, scale_bits=16, zero_point_bits=16)),
    ],
    ids=str,
)
def test_calibrated_scales_are_those_of_all_tokens_at_once(tiny_llama, tokens, keys, format):
    scales = calibrate(tiny_llama, tokens[:128], KVPolicy.of(format, "float32"), ctx=64)
    for layer, k in keys.items():
        expected, key = measure_scales(k, format), scales[layer].key
        assert key is not None and scales[layer].value is None
        assert torch.equal(key.scales, expected.scales)
        if expected.zero_points is not None:
            assert torch.equal(key.zero_points, expected.zero_points)


def test_scales_survive_a_file_and_serve_another_text(tiny_llama, tokens, tmp_path):
    policy = KVPolicy.of(KVFormat("int8", PER_HEAD), rotate=True)
    scales = calibrate(tiny_llama, tokens[:128], policy, ctx=64)
    save_scales(tmp_path / "scales.safetensors", scales, policy)
    loaded = load_scales(tmp_path / "scales.safetensors", policy)
    measured = window_nll(tiny_llama, tokens[128:], policy, ctx=64, scales=loaded)
    assert torch.equal(measured, window_nll(tiny_llama, tokens[128:], policy, ctx=64, scales=scales))
    exact = window_nll(tiny_llama, tokens[128:], ctx=64)
    assert 0 < (measured - exact).abs().mean() < 0.1


def test_scales_are_measured_from_a_text_file(tiny_llama, tmp_path, monkeypatch):
    from labkit.experiments import calibration as module

    class Letters:
        def encode(self, text: str, verbose: bool) -> list[int]:
            return [ord(letter) for letter in text]

    monkeypatch.setattr(module, "load_model", lambda name, device: (tiny_llama, Letters()))
    (tmp_path / "a.txt").write_text("a text to calibrate on " * 10)
    policy = module.calibrate_to_file(tmp_path / "s", tmp_path / "a.txt", dtype="fp8", per_head=True, ctx=64)
    assert policy == KVPolicy.of(KVFormat("fp8_e4m3", PER_HEAD))
    key = load_scales(tmp_path / "s", policy)[2].key
    assert key is not None and key.scales.shape == (1, 2, 1)


def test_what_lies_beyond_the_calibrated_range_saturates(tiny_llama, tokens):
    policy = KVPolicy.of(KVFormat("int8", PER_TENSOR), "float32")
    scales = calibrate(tiny_llama, tokens[:64], policy, ctx=64)
    for layer in scales.values():
        assert layer.key is not None
        layer.key.scales.mul_(0.01)
    exact = window_nll(tiny_llama, tokens[:64], ctx=64)
    fits = window_nll(tiny_llama, tokens[:64], policy, ctx=64)
    clipped = window_nll(tiny_llama, tokens[:64], policy, ctx=64, scales=scales)
    assert (clipped - exact).abs().mean() > 20 * (fits - exact).abs().mean()


def test_fixed_scales_ask_for_a_calibration_text(tiny_llama, tokens):
    policies = {"static": KVPolicy.of(KVFormat("int8", PER_TENSOR))}
    with pytest.raises(ValueError, match="calibration must hold tokens"):
        kv_quality(tiny_llama, tokens, policies, text="random", ctx=64)
    rows = kv_quality(tiny_llama, tokens[:128], policies, text="random", ctx=64, calibration=tokens[128:])
    assert rows[1]["dnll_se"] > 0


# ---------------------------------------------------------------- bits and layers


def test_tails_in_16_bit_count_as_bits_a_value():
    spec = KVCacheSpec(num_layers=30, num_kv_heads=3, head_dim=64, block_size=32)
    int4 = KVPolicy.of("int4")
    assert int4.bits_per_value(spec) == 4.75  # K: 4 + 32/32; V: 4 + 32/64; and their mean
    assert tail_bits(int4, spec, 1024) == 0.25  # 32 of 1,024 tokens of K, which is half of the values, in 16 bits
    assert tail_bits(KVPolicy.of("int8"), spec, 1024) == 0


def test_only_the_named_layer_is_quantised(tiny_llama, tokens):
    table = layer_sensitivity(tiny_llama, tokens[:64], "int4", ctx=64, block_size=16)
    assert table["layer"].tolist() == [0, 1, 2] and min(table["dnll_se"]) > 0
    exact = window_nll(tiny_llama, tokens[:64], ctx=64, block_size=16)
    alone = KVPolicy.of("float32").with_layers([1], "int4")
    expected = window_nll(tiny_llama, tokens[:64], alone, ctx=64, block_size=16) - exact
    assert table["dnll"].tolist()[1] == pytest.approx(float(expected.mean()), abs=1e-9)


# ---------------------------------------------------------------- by the engine


def test_the_engine_gives_the_same_loss_by_its_prompt_logprobs(tiny_llama, tokens):
    with LLM(tiny_llama, max_model_len=65) as llm:
        nll = engine_nll(llm, tokens[:150], ctx=64)
    assert torch.allclose(nll, window_nll(tiny_llama, tokens[:150], ctx=64), atol=1e-4)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_the_engine_loses_what_the_reference_quantiser_says(tiny_llama, tokens, dtype):
    _, row = engine_quality(tiny_llama, tokens[:128], [dtype], ctx=64)
    block_size = 32 if dtype == "int4" else 16
    options = {"ctx": 64, "block_size": block_size}
    policy = KVPolicy.of(dtype)
    expected = window_nll(tiny_llama, tokens[:128], policy, **options) - window_nll(tiny_llama, tokens[:128], **options)
    assert row["dnll"] == pytest.approx(float(expected.mean()), abs=1e-3)
    assert row["bytes_per_token"] == policy.apply_to(cache_spec(tiny_llama, block_size)).bytes_per_token


# ---------------------------------------------------------------- recommendation


def _row(policy: str, percent: float) -> dict:
    dnll = percent / 100
    return {
        "policy": policy,
        "text": "a text",
        "tokens": 1024,
        "delta_ppl_percent": percent,
        "dnll": dnll,
        "dnll_se": 0.001,
    }


EVIDENCE = [
    _row("unquantised", 0.0),
    _row("bf16", 0.0),
    _row("fp8 e4m3, scale 1", 0.3),
    _row("int8 per token-head", 0.05),
    _row("int4 K per channel, V per token", 1.0),
    _row("int4 per token-head, symmetric", 22.0),
]


@pytest.mark.parametrize(
    ("gpu", "budget", "expected"),
    [
        ("h200", 2.0, "int4 K per channel, V per token"),
        ("h200", 0.5, "fp8 e4m3, scale 1"),  # no scales: fewer bytes than int8
        ("a100-80gb", 0.5, "int8 per token-head"),  # sm_80 has no fp8
        ("h200", 0.1, "int8 per token-head"),
        ("h200", 30, "int4 per token-head, symmetric"),
        ("t4", 0.5, "int8 per token-head"),  # sm_75 has no bf16 either
    ],
)
def test_the_fewest_bytes_within_the_budget(gpu, budget, expected):
    found = recommend(gpu, "smollm2-1.7b" if gpu == "t4" else "llama-3-8b", budget, rows=EVIDENCE)
    assert found.name == expected
    assert found.bytes_saved_per_request > 0
    with_it, without = found.max_batch
    assert with_it > without > 0
    passed_over = dict(found.evidence[["policy", "passed_over"]].itertuples(index=False, name=None))
    assert passed_over[expected] == ""
    assert passed_over["bf16"] == ("saves nothing" if gpu != "t4" else "bfloat16 needs sm_80 or newer, T4 is older")
    assert expected in str(found) and found.plan.gpu.name in str(found)


def test_no_policy_within_the_budget_is_said_with_the_nearest():
    with pytest.raises(ValueError, match="on A100.* got 0.01 %: the nearest, 'int8 per token-head' loses 0.050 %"):
        recommend("a100-80gb", "llama-3-8b", 0.01, rows=EVIDENCE)
    with pytest.raises(ValueError, match="quality_budget must be > 0 percent"):
        recommend("h200", "llama-3-8b", 0)


def test_the_recorded_rows_recommend_the_shipped_int4_for_two_percent():
    found = recommend("h200", "llama-3-8b", 2.0)
    assert found.policy.key.dtype == "int4"
    assert found.plan.spec.bytes_per_token < found.unquantised.spec.bytes_per_token / 3


# ---------------------------------------------------------------- fp8 weights against an fp8 cache


def test_weights_and_cache_are_separate_savings(tiny_llama, tokens):
    before = tiny_llama.model.layers[0].mlp.up_proj.weight.clone()
    rows = fp8_ablation_emulated(tiny_llama, tokens[:64], calibration=tokens[64:], ctx=64)
    assert torch.equal(tiny_llama.model.layers[0].mlp.up_proj.weight, before)
    neither, weights, cache, both = rows
    assert (weights["weights"], weights["kv_cache"]) == ("fp8, emulated", "float32")
    assert (cache["weights"], cache["kv_cache"]) == ("float32", "fp8, emulated")
    assert neither["dnll"] == 0 and all(row["dnll_se"] > 0 for row in (weights, cache, both))
    assert weights["weights_bytes"] == both["weights_bytes"] < neither["weights_bytes"] == cache["weights_bytes"]
    assert cache["kv_bytes_per_token"] == both["kv_bytes_per_token"] == neither["kv_bytes_per_token"] // 4
    assert weights["kv_bytes_per_token"] == neither["kv_bytes_per_token"]


def test_without_fp8_tensor_cores_nothing_is_emulated_unasked(tokens):
    with pytest.raises(ValueError, match="would run on the CPU"):
        fp8_ablation(None, tokens, device="cpu")


# ---------------------------------------------------------------- recording


def test_recording_goes_on_where_it_stopped(tiny_llama, tokens, tmp_path, monkeypatch):
    from labkit.experiments import recorded_quality as module

    policies = {"int8": KVPolicy.of("int8"), "int4": KVPolicy.of("int4")}
    source = {"gpu": None, "commit": "abc", "date": "today"}
    monkeypatch.setattr(module, "quality_policies", lambda: policies)
    monkeypatch.setattr(module, "embedded_setup", lambda device: (tiny_llama, tokens, source))
    path = tmp_path / "quality.json"
    options = {"num_tokens": 128, "ctx": 64, "progress": False}
    assert [row["policy"] for row in record_quality(path, only=["int4"], **options)] == ["unquantised", "int4"]
    first = json.loads(path.read_text())["rows"]
    rows = record_quality(path, **options)
    assert [row["policy"] for row in rows] == ["unquantised", "int8", "int4"] and [rows[0], rows[2]] == first
    assert rows == record_quality(path, **options) == json.loads(path.read_text())["rows"]
    policies["int4"] = KVPolicy.of("int4", rotate=True)  # not what was measured under that name
    assert record_quality(path, **options)[2]["rotate"]
    with pytest.raises(ValueError, match="policies must be among int8, int4, got int3"):
        record_quality(path, only=["int3"], **options)


def test_tables_are_recorded_with_their_source(tiny_llama, tmp_path, monkeypatch):
    from labkit.experiments import recorded_kv_tables as module

    source = {"gpu": None, "commit": "abc", "date": "today"}
    text = torch.randint(1, 120, (module.NUM_TOKENS + 1024,), generator=torch.Generator().manual_seed(0)).tolist()
    monkeypatch.setattr(module, "embedded_setup", lambda device: (tiny_llama, text, source))
    monkeypatch.setattr(module, "CALIBRATION_TOKENS", 1024)
    rows = module.record_sensitivity(tmp_path / "layers.json", ["fp8", "int4"], num_tokens=1024)
    assert [row["layer"] for row in rows] == [0, 1, 2] * 2 and rows[0]["device"] == "cpu"
    tables = module.record_failures(tmp_path / "failures.json", num_tokens=1024)
    assert len(tables["key_bias"]) == 3 * 8
    module.record_fp8(tmp_path / "fp8.json", num_tokens=1024)
    assert "no fp8 product ran" in json.loads((tmp_path / "fp8.json").read_text())["measured"]
    for name in ("layers", "failures", "fp8"):
        assert json.loads((tmp_path / f"{name}.json").read_text())["provenance"] == source


def test_the_spec_is_that_of_the_model(tiny_llama):
    spec = cache_spec(tiny_llama, 16)
    assert (spec.num_layers, spec.bytes_per_token) == (3, 3 * 2 * 2 * 16 * 4)
