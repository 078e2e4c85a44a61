"""Catalogues and the capacity planner."""

from __future__ import annotations

import pytest

from labkit.kv_math import (
    GIB,
    GPU,
    GPUS,
    MODEL_SHAPES,
    ModelShape,
    gpu,
    memory_bound_seconds,
    model_shape,
    plan_capacity,
)

# Counted from the modules that transformers 5.24 builds for each config.
NUM_PARAMS = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "phi-3-mini": 3_821_079_552,
    "gemma-2-9b": 9_241_705_984,
}


@pytest.mark.parametrize("name", MODEL_SHAPES)
def test_parameters_are_exact(name: str) -> None:
    shape = model_shape(name)
    assert shape.num_params == NUM_PARAMS[name]
    assert shape.weights_bytes("float16") == 2 * shape.num_params


def test_tensor_parallel_parts_add_up() -> None:
    shape = model_shape("llama-2-70b")
    repeated = shape.num_layers * 2 * shape.hidden_size + shape.hidden_size  # norms stand on every GPU
    assert 8 * shape.num_params_per_gpu(8) == shape.num_params + 7 * repeated
    assert [shape.kv_heads_per_gpu(n) for n in (1, 2, 8, 16)] == [8, 4, 1, 1]
    assert shape.kv_spec(num_gpus=8).bytes_per_token == shape.kv_spec().bytes_per_token // 8
    with pytest.raises(ValueError, match="num_gpus=2 cannot divide smollm2-135m's 9 query heads"):
        model_shape("smollm2-135m").num_params_per_gpu(2)


def test_names_are_found_however_they_are_written() -> None:
    assert gpu("H200") is gpu("h200") and gpu("A100 80GB") is gpu("a100-80gb") and gpu("RTX 4090") is gpu("rtx_4090")
    assert model_shape("Llama 2 13B") is model_shape("llama-2-13b")
    with pytest.raises(ValueError, match="unknown GPU 'a100': did you mean a100-40gb or a100-80gb"):
        gpu("a100")
    with pytest.raises(ValueError, match="unknown model shape 'lama-2-13b': did you mean llama-2-13b"):
        model_shape("lama-2-13b")
    with pytest.raises(TypeError, match="must be a string, got 4090"):
        gpu(4090)  # type: ignore[arg-type]


def test_the_catalogue_is_in_plausible_units() -> None:
    for card in GPUS.values():
        assert 10 * GIB < card.memory_bytes < 200 * GIB
        assert 2e11 < card.bandwidth < 1e13 and 5e13 < card.flops_16bit < 5e15
    assert {name for name, card in GPUS.items() if not card.supports_fp8} == {
        *("v100-16gb", "v100-32gb", "t4", "a100-40gb", "a100-80gb", "a10", "rtx-3090")
    }


def test_llama_2_13b_on_an_a100_by_hand() -> None:
    plan = plan_capacity("a100-80gb", "llama-2-13b", dtype="float16", max_model_len=4096)
    assert plan.usable_bytes == 80 * GIB * 9 // 10
    assert plan.weights_bytes == 26_031_728_640
    assert plan.kv_bytes == plan.usable_bytes - plan.weights_bytes
    assert plan.num_blocks == plan.kv_bytes // (16 * 819_200) == 3912
    assert plan.num_tokens == 62_592
    assert plan.max_concurrency() == 15
    assert plan.max_concurrency(1366) == 45


def test_the_ladder_of_a_40_gib_card() -> None:
    """Full-length requests of Llama-2-13B: 3, then 47 with 8 KV heads and int8."""
    base = model_shape("llama-2-13b")
    gqa = ModelShape("llama-2-13b-gqa-8", 40, 40, 8, 128, 5120, 13824, 32000, 4096)
    assert plan_capacity("a100-40gb", base).max_concurrency() == 3
    assert plan_capacity("a100-40gb", gqa).max_concurrency() == 23
    assert plan_capacity("a100-40gb", gqa, kv_dtype="int8").max_concurrency() in (45, 46)  # 47 without scales
    assert base.num_params - gqa.num_params == 40 * 2 * 5120 * 32 * 128


def test_activations_and_scales_come_out_of_the_pool() -> None:
    plain = plan_capacity("h200", "llama-3-8b", kv_dtype="fp8")
    with_activations = plan_capacity("h200", "llama-3-8b", kv_dtype="fp8", activation_bytes=2 * GIB)
    assert plain.kv_bytes - with_activations.kv_bytes == 2 * GIB
    for plan in (plain, with_activations):
        assert (
            plan.spec.bytes_for_pool(plan.num_blocks) <= plan.kv_bytes < plan.spec.bytes_for_pool(plan.num_blocks + 1)
        )


def test_int4_is_planned_in_blocks_of_32_with_a_tail_beside_each_request() -> None:
    plan = plan_capacity("h200", "llama-3-8b", kv_dtype="int4")
    assert plan.spec.block_size == 32 and plan.tail_bytes == 32 * 8 * 128 * 32 * 2
    per_request = plan.spec.bytes_for_request(8192) + plan.tail_bytes
    assert plan.max_concurrency() == plan.kv_bytes // per_request
    assert ("16-bit tail per request", "2.00 MiB") in plan.rows()
    assert plan_capacity("h200", "llama-3-8b", kv_dtype="int8").tail_bytes == 0


def test_two_gpus_hold_more_than_twice_the_tokens_of_one() -> None:
    one, two = (plan_capacity("h200", "llama-3-8b", num_gpus=n) for n in (1, 2))
    assert two.spec.bytes_per_token == one.spec.bytes_per_token // 2
    assert two.num_tokens > 2 * one.num_tokens


def test_a_decode_step_is_bound_by_what_it_reads() -> None:
    a100 = gpu("a100-80gb")
    assert memory_bound_seconds(a100, 26_031_728_640, 244 * 256 * 819_200) == pytest.approx(244 / 6444, rel=1e-3)

    plan = plan_capacity(a100, "llama-2-7b", max_model_len=4096)
    empty, full = plan.decode_step_seconds(8, 1), plan.decode_step_seconds(8)
    assert full - empty == pytest.approx(8 * 4095 * 524_288 / a100.bandwidth)
    assert plan.decode_tokens_per_second() == plan.max_concurrency() / plan.decode_step_seconds(plan.max_concurrency())
    # short requests, many of them: arithmetic takes over
    assert plan.decode_step_seconds(100_000, 1) == pytest.approx(
        2 * 100_000 * (6_738_415_616 - 32_000 * 4096) / a100.flops_16bit
    )


def test_a_mixture_reads_only_the_experts_that_its_tokens_reach() -> None:
    mixtral = model_shape("mixtral-8x7b")
    per_expert = 32 * 3 * 4096 * 14336
    assert mixtral.num_params_used(2) - mixtral.num_params_used(1) == 2 * per_expert
    assert mixtral.num_params_used(4) == mixtral.num_params_used(99) == mixtral.num_params - 32_000 * 4096


def test_the_table_says_both_units_and_the_html_is_the_same_table() -> None:
    plan = plan_capacity("a100-40gb", "llama-2-13b")
    text = str(plan)
    assert "24.24 GiB (26.03 GB) in bfloat16" in text
    assert "819,200 B = 800.00 KiB" in text
    assert plan._repr_html_().count("<tr>") == len(text.splitlines())


def test_a_pool_without_room_for_one_full_request_says_so() -> None:
    plan = plan_capacity("a100-40gb", "llama-2-13b", max_model_len=20_000)
    assert plan.max_concurrency() == 0 and plan.decode_tokens_per_second() == 0
    assert "not even one fits" in str(plan)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"gpu": "a100-80gb", "model": "llama-2-70b"},
            r"llama-2-70b does not fit .*weights 128\.48 GiB.* > 72\.00 GiB",
        ),
        ({"gpu_memory_utilization": 0}, r"gpu_memory_utilization must be in \(0, 1\], got 0"),
        ({"gpu_memory_utilization": 1.1}, r"gpu_memory_utilization must be in \(0, 1\], got 1\.1"),
        ({"kv_dtype": "fp8"}, "kv_dtype='fp8_e4m3' needs sm_89 or newer, A100 SXM4 40 GB is sm_80: use int8"),
        ({"value_dtype": "fp8_e5m2"}, "value_dtype='fp8_e5m2' needs sm_89"),
        ({"gpu": "v100-32gb", "dtype": "bfloat16"}, "dtype='bfloat16' needs sm_80 or newer.*use float16"),
        ({"dtype": "int8"}, "kv_dtype must be given when the weights are int8"),
        ({"max_model_len": 0}, "max_model_len must be >= 1, got 0"),
        ({"activation_bytes": -1}, "activation_bytes must be >= 0, got -1"),
        ({"num_gpus": 3}, "num_gpus=3 cannot divide"),
    ],
)
def test_bad_plans_say_what_is_wrong(kwargs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_capacity(**({"gpu": "a100-40gb", "model": "llama-2-7b"} | kwargs))


def test_a_gpu_that_is_not_in_the_catalogue() -> None:
    card = GPU("my card", 24 * GIB, 1e12, 1e14, (8, 6), "its label")
    plan = plan_capacity(card, "smollm2-135m", dtype="float32")
    assert plan.weights_bytes == 4 * 134_515_008
    assert plan.spec.bytes_per_token == 2 * 23_040
