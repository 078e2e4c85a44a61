"""Rotation, policies by layer with their exact bytes, and scales on disk."""

from __future__ import annotations

import pytest
import torch

from labkit.kv_math import PER_HEAD, PER_TOKEN_HEAD, KVCacheSpec
from labkit.quant import (
    KVFormat,
    KVPolicy,
    LayerScales,
    ScaleLayout,
    dequantise,
    hadamard,
    load_scales,
    measure_scales,
    quant_error,
    quantise,
    round_trip,
    save_scales,
)

SPEC = KVCacheSpec(num_layers=4, num_kv_heads=3, head_dim=64, block_size=32)


# ---------------------------------------------------------------- rotation


@pytest.mark.parametrize("head_dim", [1, 2, 64, 72, 80, 96, 128, 160, 192, 256])
def test_the_rotation_is_orthogonal_and_flat(head_dim):
    matrix = hadamard(head_dim).double()
    assert torch.allclose(matrix @ matrix.T, torch.eye(head_dim, dtype=torch.float64), atol=1e-6)
    assert torch.allclose(matrix.abs(), torch.full_like(matrix, head_dim**-0.5), atol=1e-7)


@pytest.mark.parametrize("head_dim", [0, -4, 3, 6, 100, 112])
def test_sizes_without_a_construction_are_refused_by_name(head_dim):
    with pytest.raises(ValueError, match=f"got {head_dim}"):
        hadamard(head_dim)


@pytest.mark.parametrize("head_dim", [64, 80])
def test_rotation_keeps_scores_and_lets_int4_survive_outlier_channels(head_dim):
    torch.manual_seed(0)
    q, k = torch.randn(40, 1, head_dim), torch.randn(40, 1, head_dim)
    k[..., [3, 11]] *= 30
    scores = q[:, 0] @ k[:, 0].T
    rotation = hadamard(head_dim)
    rotated_q, rotated_k = q @ rotation, k @ rotation
    assert torch.allclose(rotated_q[:, 0] @ rotated_k[:, 0].T, scores, atol=2e-4)
    format = KVFormat("int4", PER_TOKEN_HEAD)
    plain = quant_error(k, round_trip(k, format))
    rotated = quant_error(rotated_k, round_trip(rotated_k, format))
    ordinary = torch.arange(head_dim) % 8 != 3
    back = round_trip(rotated_k, format) @ rotation.T
    assert quant_error(k[..., ordinary], round_trip(k, format)[..., ordinary]).relative > 0.8
    assert quant_error(k[..., ordinary], back[..., ordinary]).relative < 0.8
    assert rotated.cosine > 0.98 and plain.cosine > 0.98


# ---------------------------------------------------------------- policies


def test_layers_may_differ_and_bytes_are_exact():
    policy = KVPolicy.of("int8").with_layers([0, -1], "bfloat16")
    spec = policy.apply_to(SPEC)
    assert [layer.key.dtype for layer in spec.layers] == ["bfloat16", "int8", "int8", "bfloat16"]
    per_token = 2 * 2 * 3 * 64 * 2 + 2 * 2 * 3 * (64 + 4)
    assert spec.bytes_per_block == 32 * per_token
    assert policy.bits_per_value(SPEC) == 8 * per_token / (4 * 2 * 3 * 64)


def test_k_and_v_may_differ_and_the_last_mention_of_a_layer_holds():
    policy = KVPolicy.of("int4", "int8").with_layers([1, 2], "bfloat16").with_layers([-2], "fp8")
    names = [tuple(f.dtype for f in policy.formats(layer, 4)) for layer in range(4)]
    assert names == [("int4", "int8"), ("bfloat16",) * 2, ("fp8_e4m3",) * 2, ("int4", "int8")]
    assert policy.formats(-1, 4) == policy.formats(3, 4)


def test_bytes_of_a_policy_are_what_the_quantiser_stores():
    x = torch.randn(64, 3, 64)
    stored = sum(quantise(x, f, block_size=32).num_bytes for f in KVPolicy.of("int4").formats(0, 4))
    assert stored * 4 == 2 * KVPolicy.of("int4").apply_to(SPEC).bytes_per_block


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_int4_takes_at_most_five_bits_with_its_scales(head_dim):
    spec = KVCacheSpec(32, 8, head_dim, block_size=32)
    assert KVPolicy.of("int4").bits_per_value(spec) <= 5.0


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (KVPolicy.of("int8").with_layers([4], "bfloat16"), r"layers must be within \[-4, 4\), got 4"),
        (KVPolicy.of(KVFormat("int8", ScaleLayout(tokens=5))), "must divide the block size"),
        (KVPolicy.of(KVFormat("int8", ScaleLayout(tokens=1, heads=2))), "must divide the number of KV heads"),
    ],
)
def test_a_policy_that_does_not_fit_the_cache_is_refused(policy, message):
    with pytest.raises(ValueError, match=message):
        policy.apply_to(SPEC)


def test_what_cannot_be_stored_or_rotated_is_refused_at_once():
    with pytest.raises(ValueError, match="did you mean 'int8'"):
        KVPolicy.of("int9")
    with pytest.raises(ValueError, match="zero points of 0, 16 or 32 bits"):
        KVPolicy.of(KVFormat("int4", ScaleLayout(tokens=1, zero_point_bits=8)))
    with pytest.raises(TypeError, match="KVPolicy.of takes names"):
        KVPolicy("int8", "int8")
    with pytest.raises(ValueError, match="to be rotated, got 112"):
        KVPolicy.of("int8", rotate=True).apply_to(KVCacheSpec(1, 2, 112))


def test_a_policy_prints_what_it_is():
    text = str(KVPolicy.of("int8", rotate=True).with_layers([0], "bfloat16"))
    assert text == (
        "K int8, 32-bit scale per token x head; V int8, 32-bit scale per token x head; q and k rotated; "
        "layer 0: K bfloat16; V bfloat16"
    )


# ---------------------------------------------------------------- scales on disk


FIXED = KVPolicy.of("fp8", KVFormat("int8", ScaleLayout("layer", 1, "all", 16, 16))).with_layers([1], "int8", "fp8")


def measured() -> dict[int, LayerScales]:
    torch.manual_seed(0)
    x = torch.randn(20, 3, 8)
    key, value = FIXED.formats(0, 2)
    fixed_v = KVFormat("fp8_e4m3", FIXED.formats(1, 2)[1].scales)
    return {
        0: LayerScales(measure_scales(x, key), measure_scales(x, value)),
        1: LayerScales(None, measure_scales(2 * x, fixed_v)),  # K of layer 1 has a scale a token
    }


def test_scales_come_back_from_disk_bit_for_bit(tmp_path):
    path, scales = tmp_path / "scales.safetensors", measured()
    save_scales(path, scales, FIXED)
    loaded = load_scales(path, FIXED)
    assert loaded[1].key is None and sorted(loaded) == [0, 1]
    for layer, side in ((0, "key"), (0, "value"), (1, "value")):
        before, after = getattr(scales[layer], side), getattr(loaded[layer], side)
        assert torch.equal(before.scales, after.scales) and before.scales.dtype == after.scales.dtype
        assert (before.zero_points is None) == (after.zero_points is None)
    x = torch.randn(5, 3, 8)
    before, after = (quantise(x, FIXED.value, scales=s[0].value) for s in (scales, loaded))
    assert torch.equal(dequantise(before), dequantise(after))


def test_scales_of_another_policy_are_refused(tmp_path):
    path = tmp_path / "scales.safetensors"
    save_scales(path, measured(), FIXED)
    with pytest.raises(ValueError, match="was measured for layers.0.key as fp8_e4m3"):
        load_scales(path, KVPolicy.of(KVFormat("fp8_e5m2", PER_HEAD), FIXED.value))
    with pytest.raises(ValueError, match="was measured with rotate=False"):
        load_scales(path, KVPolicy(FIXED.key, FIXED.value, True, FIXED.exceptions))


def test_missing_layers_and_missing_scales_are_refused(tmp_path):
    path, scales = tmp_path / "scales.safetensors", measured()
    with pytest.raises(ValueError, match=r"layers 0 to n - 1, got \[1\]"):
        save_scales(path, {1: scales[1]}, FIXED)
    with pytest.raises(ValueError, match="scales of layers.0.key must be given"):
        save_scales(path, {0: LayerScales(None, scales[0].value), 1: scales[1]}, FIXED)
    assert not path.exists()


def test_another_file_is_no_file_of_scales(tmp_path):
    from safetensors.torch import save_file

    save_file({"x": torch.ones(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="is not a file of scales"):
        load_scales(tmp_path / "other.safetensors", FIXED)
