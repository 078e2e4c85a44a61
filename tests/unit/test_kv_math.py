"""Sizes of KV caches: every number here can be checked with pencil and paper."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.kv_math import (
    BITS,
    PER_CHANNEL,
    PER_HEAD,
    PER_TENSOR,
    PER_TOKEN_HEAD,
    KVCacheSpec,
    KVFormat,
    KVLayer,
    ScaleLayout,
    attention_kind,
    format_bytes,
    format_bytes_decimal,
    kv_bytes_per_token,
    kv_formats,
    model_shape,
    usual_block_size,
)

LLAMA_2_13B = KVCacheSpec(num_layers=40, num_kv_heads=40, head_dim=128, dtype="float16", block_size=16)


@pytest.mark.parametrize(
    ("model", "bytes_per_token"),
    [("llama-2-7b", 524_288), ("llama-2-13b", 819_200), ("llama-2-70b", 327_680), ("smollm2-135m", 23_040)],
)
def test_bytes_per_token_of_known_models(model: str, bytes_per_token: int) -> None:
    shape = model_shape(model)
    assert shape.kv_spec("float16").bytes_per_token == bytes_per_token
    assert kv_bytes_per_token(shape.num_layers, shape.num_kv_heads, shape.head_dim) == bytes_per_token


def test_llama_2_13b_at_32_requests_of_2048_tokens_takes_50_gib() -> None:
    num_bytes = LLAMA_2_13B.bytes_for_batch([2048] * 32)
    assert num_bytes == 53_687_091_200
    assert (format_bytes(num_bytes), format_bytes_decimal(num_bytes)) == ("50.00 GiB", "53.69 GB")
    assert LLAMA_2_13B.bytes_for_request(2048) == 1_677_721_600


def test_a_request_is_rounded_up_to_whole_blocks() -> None:
    assert [LLAMA_2_13B.blocks_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
    assert LLAMA_2_13B.bytes_per_block == 16 * 819_200
    assert LLAMA_2_13B.bytes_for_request(17) == 2 * LLAMA_2_13B.bytes_per_block
    assert LLAMA_2_13B.bytes_for_batch([1, 17]) == 3 * LLAMA_2_13B.bytes_per_block


def test_heads_tell_mha_gqa_and_mqa_apart() -> None:
    kinds = {kv: attention_kind(64, kv) for kv in (64, 8, 1)}
    assert kinds == {64: "MHA", 8: "GQA", 1: "MQA"}
    mha, gqa, mqa = (kv_bytes_per_token(80, kv, 128) for kv in kinds)
    assert (mha // mqa, gqa // mqa) == (64, 8)
    with pytest.raises(ValueError, match="num_kv_heads must divide num_heads: got 5 KV heads for 64"):
        attention_kind(64, 5)


def test_keys_and_values_may_differ_in_size_and_format() -> None:
    mla = KVCacheSpec(61, 128, 192, head_dim_v=128)
    assert mla.bytes_per_token == 61 * 128 * (192 + 128) * 2
    mixed = KVCacheSpec(2, 4, 64, "bfloat16", value_dtype="int8")
    assert mixed.bytes_per_token == 2 * 4 * (64 * 2 + 64 + 4)  # one fp32 scale for each token and head of V


def test_layers_may_differ() -> None:
    spec = KVCacheSpec(4, 2, 64, "int8").with_formats("bfloat16", layers=[0, -1])
    assert [layer.key.dtype for layer in spec.layers] == ["bfloat16", "int8", "int8", "bfloat16"]
    assert spec.bytes_per_token == 2 * (2 * 2 * 64 * 2) + 2 * (2 * 2 * (64 + 4))
    fmt = KVFormat.of("bfloat16")
    uneven = KVCacheSpec.from_layers([KVLayer(1, 64, 64, fmt, fmt), KVLayer(3, 128, 128, fmt, fmt)])
    assert uneven.bytes_per_token == 2 * 2 * (64 + 3 * 128)
    with pytest.raises(ValueError, match=r"layers must be within \[-4, 4\), got 4"):
        spec.with_formats("int8", layers=[4])


@pytest.mark.parametrize(
    ("scales", "bits_per_value"),
    [
        (PER_TENSOR, 8.0),
        (PER_HEAD, 8.0),
        (PER_TOKEN_HEAD, 8 + 32 / 128),  # 0.516 of 16 bit, not one half
        (ScaleLayout(1, 1, "all", scale_bits=16), 8 + 16 / 128),
        (ScaleLayout(1, 1, 32, scale_bits=16, zero_point_bits=16), 8 + 32 / 32),
        (PER_CHANNEL, 8 + 32 / 16),
        (ScaleLayout("block", 1), 8 + 32 / (16 * 128)),
    ],
)
def test_a_value_takes_its_share_of_the_scale(scales: ScaleLayout, bits_per_value: float) -> None:
    assert KVFormat("int8", scales).bits_per_value(num_kv_heads=8, head_dim=128, block_size=16) == bits_per_value


def test_scales_of_a_layer_stand_outside_the_blocks() -> None:
    per_head = KVCacheSpec(10, 8, 128, KVFormat("fp8_e4m3", PER_HEAD))
    assert per_head.bytes_per_token == 10 * 2 * 8 * 128
    assert per_head.fixed_bytes == 10 * 2 * 8 * 4
    assert per_head.bytes_for_pool(7) == 7 * per_head.bytes_per_block + per_head.fixed_bytes
    assert KVCacheSpec(10, 8, 128, KVFormat("fp8_e4m3", PER_TENSOR)).fixed_bytes == 10 * 2 * 4


def test_rounding_is_to_whole_bytes_for_each_head_of_a_token_and_once_for_the_scales_of_a_block() -> None:
    odd = KVFormat("int4", ScaleLayout(1, 1, "all", scale_bits=8, zero_point_bits=4))
    # 2 tokens x 3 heads: 5 values are 20 bits, so 3 bytes; 6 times 12 bits of scale and offset are 9 bytes
    assert odd.bytes_per_block(num_kv_heads=3, head_dim=5, block_size=2) == 2 * 3 * 3 + 9


def test_bytes_per_token_is_rounded_up_where_tokens_share_scales() -> None:
    spec = KVCacheSpec(1, 1, 64, KVFormat("int8", ScaleLayout("block", 1)), block_size=16)
    assert spec.bytes_per_block == 2 * (16 * 64 + 4)
    assert spec.bytes_per_token == 129  # 128.5


def test_names_of_dtypes() -> None:
    for name in ("bf16", "torch.bfloat16", "bfloat16"):
        assert KVFormat.of(name) == KVFormat("bfloat16")
    assert KVFormat.of("fp8").dtype == "fp8_e4m3"
    assert KVFormat.of("int4").bits_per_value(8, 128, 16) == 4.25
    assert str(KVFormat.of("int8")) == "int8, 32-bit scale per token x head"


def test_int4_alone_means_k_per_channel_and_v_per_token() -> None:
    key, value = kv_formats("int4")
    assert (key.scales, value.scales) == (ScaleLayout("block", 1, 1, 16, 16), ScaleLayout(1, 1, "all", 16, 16))
    assert kv_formats("int8", "int4") == (KVFormat.of("int8"), value)
    assert kv_formats("int4", "int8") == (key, KVFormat.of("int8"))
    assert kv_formats(value) == (value, value), "a format is taken as it is"
    spec = KVCacheSpec(1, 8, 128, "int4", block_size=32)
    assert spec.bytes_per_block * 8 / (32 * 8 * 256) == 4.625


def test_unfinished_blocks_wait_in_16_bit_only_where_tokens_share_scales() -> None:
    assert KVCacheSpec(2, 8, 128, "int4", block_size=32).bytes_for_tails(5) == 5 * 2 * 8 * 32 * 128 * 2
    assert KVCacheSpec(2, 8, 128, "int4", block_size=32).bytes_for_tails(1, "float32") == 2 * 8 * 32 * 128 * 4
    for name in ("bfloat16", "fp8", "int8"):
        assert KVCacheSpec(2, 8, 128, name).bytes_for_tails(5) == 0
    assert [usual_block_size(kv_formats(name)) for name in ("bfloat16", "fp8", "int8", "int4")] == [16, 16, 16, 32]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: KVCacheSpec(0, 1, 64), ValueError, "num_layers must be >= 1, got 0"),
        (lambda: KVCacheSpec(1, 1, 64.0), TypeError, r"head_dim must be an int >= 1, got 64\.0"),
        (lambda: KVCacheSpec(1, 1, 64, block_size=0), ValueError, "block_size must be >= 1, got 0"),
        (lambda: KVCacheSpec(1, 1, 64, "bflaot16"), ValueError, r"got 'bflaot16' \(did you mean 'bfloat16'\?\)"),
        (lambda: LLAMA_2_13B.bytes_for_request(-1), ValueError, "num_tokens must be >= 0, got -1"),
        (lambda: KVFormat("int8"), ValueError, "needs scales"),
        (lambda: KVFormat("float16", PER_HEAD), ValueError, "takes no scales"),
        (lambda: ScaleLayout("page"), ValueError, "tokens must be .*'page'"),  # type: ignore[arg-type]
        (lambda: ScaleLayout(1, scale_bits=12), ValueError, "scale_bits must be one of"),
        (lambda: KVCacheSpec(1, 1, 64, KVFormat("int8", ScaleLayout(32))), ValueError, "tokens=32 must divide .* 16"),
        (lambda: KVCacheSpec(1, 3, 64, KVFormat("int8", ScaleLayout(1, 2))), ValueError, "heads=2 must divide .* 3"),
        (lambda: KVCacheSpec.from_layers([]), ValueError, "layers must hold at least one"),
    ],
)
def test_bad_sizes_name_argument_value_and_range(call, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


sizes = st.integers(1, 160)
formats = st.sampled_from([*BITS]).map(KVFormat.of)


@given(layers=st.integers(1, 8), heads=sizes, d_k=sizes, d_v=sizes, block=sizes, key=formats, value=formats, n=sizes)
def test_a_block_has_room_for_every_bit_and_wastes_less_than_a_byte_a_row(
    layers: int, heads: int, d_k: int, d_v: int, block: int, key: KVFormat, value: KVFormat, n: int
) -> None:
    spec = KVCacheSpec(layers, heads, d_k, key, block, head_dim_v=d_v, value_dtype=value)
    needed_bits = 0
    for fmt, d in ((key, d_k), (value, d_v)):
        in_block = fmt.scales is not None and fmt.scales.tokens != "layer"
        needed_bits += block * heads * (d * fmt.bits + 32 * in_block)
    needed_bits *= layers
    assert 0 <= 8 * spec.bytes_per_block - needed_bits < 8 * layers * 2 * block * heads
    assert 0 <= spec.bytes_per_token * block - spec.bytes_per_block < block
    assert spec.bytes_for_request(n) == spec.bytes_for_batch([n]) == spec.blocks_for(n) * spec.bytes_per_block
    assert (spec.blocks_for(n) - 1) * block < n <= spec.blocks_for(n) * block


def test_a_spec_is_a_value() -> None:
    twin = KVCacheSpec(40, 40, 128, "float16")
    assert twin == LLAMA_2_13B and hash(twin) == hash(LLAMA_2_13B)
    assert twin != KVCacheSpec(40, 40, 128, "float16", block_size=32)
    assert str(twin).splitlines()[0] == "800.00 KiB a token, 12.50 MiB a block of 16 tokens"
    with pytest.raises(AttributeError):
        twin.block_size = 8  # type: ignore[misc]


@pytest.mark.parametrize(
    ("num_bytes", "binary", "decimal"),
    [
        (0, "0 B", "0 B"),
        (1023, "1023 B", "1.02 kB"),
        (1024**2 - 1, "1.00 MiB", "1.05 MB"),
        (10**9, "953.67 MiB", "1.00 GB"),
        (-(2**30), "-1.00 GiB", "-1.07 GB"),
        (3 * 2**50, "3072.00 TiB", "3377.70 TB"),
    ],
)
def test_gib_is_never_shown_as_gb(num_bytes: int, binary: str, decimal: str) -> None:
    assert (format_bytes(num_bytes), format_bytes_decimal(num_bytes)) == (binary, decimal)
