"""LLM(kv_cache_dtype=...): what the quantiser says, however requests are scheduled; int4 with its tails."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from labkit.engine import LLM, ModelExecutor
from labkit.engine.kv_policy import require_support
from labkit.experiments.kv_quality import window_nll
from labkit.kv_math import PER_HEAD, KVFormat, ScaleLayout
from labkit.memory import KVCacheManager
from labkit.models import load_model
from labkit.quant import KVPolicy, LayerScales, measure_scales, save_scales
from labkit.scheduling import PreemptionCost, SamplingParams

from .tiny_models import TINY

MAX_MODEL_LEN, NUM_NEW_TOKENS = 72, 16
MIXED = (
    KVPolicy.of("int8", "int4", rotate=True)
    .with_layers([0], "bfloat16")
    .with_layers([-1], "float32", KVFormat("fp8_e4m3"))
)
PER_TOKEN = {"int8": "int8", "mixed, rotated": MIXED}
WITH_TAILS = {
    "int4": "int4",
    "int4, rotated": KVPolicy.of("int4", rotate=True),
    "K int8, V int4": KVPolicy.of("int4", "int8"),
}
SCHEDULES = {
    "blocks of 8": {"block_size": 8},
    "chunks of 8": {"max_num_batched_tokens": 8},
    "no fused layers": {"enforce_eager": True},
    "no prefix cache": {"enable_prefix_caching": False},
    "computed again": {"num_gpu_blocks_override": 20},
    "swapped": {"num_gpu_blocks_override": 20, "swap_space": 0.5},
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return TINY["llama"]()


def prompts() -> list[list[int]]:
    """Some with the same beginning, one longer than a block of 32."""
    rng = random.Random(0)
    start = [rng.randrange(2, 128) for _ in range(12)]
    return [
        start * (i % 3 == 0) + [rng.randrange(2, 128) for _ in range(length)]
        for i, length in enumerate((3, 9, 40, 17, 5, 21))
    ]


def answers(llm: LLM, **params: Any) -> list[list[list[int]]]:
    """Tokens of every sample; afterwards nothing is held, no block and no tail row."""
    chosen = SamplingParams(**({"temperature": 0, "max_tokens": NUM_NEW_TOKENS, "ignore_eos": True} | params))
    outputs = llm.generate(prompts(), chosen, use_tqdm=False)
    require_empty(llm)
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def executor_of(llm: LLM) -> ModelExecutor:
    executor = llm.engine.executor
    assert isinstance(executor, ModelExecutor)
    return executor


def require_empty(llm: LLM) -> None:
    kv = llm.engine.scheduler.kv
    kv.check()
    assert kv.usage().num_referenced_blocks == kv.usage().num_in_flight_blocks == 0
    if isinstance(kv, KVCacheManager):
        assert kv.swap_space.num_free_blocks == kv.swap_space.num_host_blocks
    rows = executor_of(llm).tail_rows
    if rows is not None:  # those of the last step are taken back with the next
        rows.release(llm.engine.scheduler._ended_ids)
        assert len(rows) == 0


def open_llm(model, kv_cache_dtype, **options) -> LLM:
    llm = LLM(model, kv_cache_dtype=kv_cache_dtype, max_model_len=MAX_MODEL_LEN, max_num_seqs=8, **options)
    llm.engine.scheduler.preemption_cost = PreemptionCost()  # swap where there is room
    return llm


# ---------------------------------------------------------------- each token quantised on its own


@pytest.mark.parametrize("kv_cache_dtype", PER_TOKEN.values(), ids=PER_TOKEN)
def test_a_tokens_scale_is_its_own_so_no_schedule_changes_an_answer(model, kv_cache_dtype):
    with open_llm(model, kv_cache_dtype, block_size=4) as llm:
        expected = answers(llm)
    for name, options in SCHEDULES.items():
        with open_llm(model, kv_cache_dtype, **({"block_size": 4} | options)) as llm:
            assert answers(llm) == expected, name
            if name in ("computed again", "swapped"):
                assert llm.stats.num_preemptions > 0 and (llm.stats.num_swaps > 0) == (name == "swapped")
            if name == "blocks of 8":
                assert answers(llm) == expected, "with what the prefix cache has"


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3n", "deepseek_v3", "gpt_oss", "qwen3"])
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8", "mixed"])
def test_every_kind_of_attention_reads_what_the_quantiser_gives(name, kv_cache_dtype):
    model = TINY[name]()
    policy = MIXED if kv_cache_dtype == "mixed" else KVPolicy.of(kv_cache_dtype)
    tokens = [random.Random(1).randrange(2, 128) for _ in range(48)]
    if kv_cache_dtype == "fp8":  # the quantiser would measure scales where the engine has 1.0
        policy = KVPolicy.of(KVFormat("fp8_e4m3"))
    expected = window_nll(model, tokens, policy, ctx=48, block_size=16)
    with LLM(model, kv_cache_dtype=policy, max_model_len=64, max_num_batched_tokens=16, max_num_seqs=4) as llm:
        output = llm.generate([tokens], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)[0]
    rows = (output.prompt_logprobs or [])[1:]
    got = torch.tensor([row[token].logprob for row, token in zip(rows, tokens[1:], strict=True) if row])
    torch.testing.assert_close(-got.double(), expected, rtol=0, atol=0.02)
    assert (-got - expected).abs().median() < 1e-4


# ---------------------------------------------------------------- scales that span a block: tails


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_with_tails_every_request_ends_and_leaves_nothing_behind(model, schedule):
    with open_llm(model, "int4", **({"block_size": 4} | SCHEDULES[schedule])) as llm:
        for sampling in ({}, {"n": 3, "temperature": 1.0, "seed": 5}):
            tokens = answers(llm, **sampling)
            assert all(len(one) == NUM_NEW_TOKENS for samples in tokens for one in samples)
        preempted = schedule in ("computed again", "swapped")
        assert (llm.stats.num_preemptions > 0) == preempted
        assert (llm.stats.num_swaps > 0) == (schedule == "swapped")


@pytest.mark.parametrize("kv_cache_dtype", WITH_TAILS.values(), ids=WITH_TAILS)
def test_a_swapped_sequence_goes_on_from_its_last_full_block(model, kv_cache_dtype):
    """What it computes again it reads unquantised from its tail, as it did the first time."""
    with open_llm(model, kv_cache_dtype, block_size=4, enable_prefix_caching=False) as llm:
        expected = answers(llm)
    options = {"num_gpu_blocks_override": 20, "swap_space": 0.5, "enable_prefix_caching": False}
    with open_llm(model, kv_cache_dtype, block_size=4, **options) as llm:
        assert answers(llm) == expected
        assert llm.stats.num_swaps == llm.stats.num_preemptions > 0


def test_samples_of_a_request_share_full_blocks_and_begin_alike(model):
    """A sample computes the end of the prompt again, from the last full block on: the greedy ones agree."""
    with open_llm(model, "int4", block_size=4) as llm:
        one = answers(llm)
        for (single,), samples in zip(one, answers(llm, n=3, temperature=1.0, top_k=1), strict=True):
            # Not to the end: what is computed in another order may round to another code.
            assert [sample[:8] for sample in samples] == [single[:8]] * 3


def test_two_engines_of_one_model_store_their_own_way(model):
    alone = {}
    for name in ("int8", "int4"):
        with open_llm(model, name, block_size=4) as llm:
            alone[name] = answers(llm)
    with open_llm(model, "int8", block_size=4) as one, open_llm(model, "int4", block_size=4) as other:
        for number, prompt in enumerate(prompts()):
            for llm in (one, other):
                llm.add_request(str(number), prompt, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
        ended: dict[str, dict[str, list[int]]] = {"int8": {}, "int4": {}}
        while one.has_unfinished() or other.has_unfinished():
            for name, llm in (("int8", one), ("int4", other)):
                ended[name] |= {o.request_id: o.outputs[0].token_ids for o in llm.step() if o.finished}
        for name, tokens in ended.items():
            assert [[tokens[str(i)]] for i in range(len(tokens))] == alone[name]


def test_tail_rows_come_back_after_an_abort(model):
    with open_llm(model, "int4", block_size=4, num_gpu_blocks_override=26, swap_space=0.5) as llm:
        rng = random.Random(2)
        for number, prompt in enumerate(prompts() * 4):
            llm.add_request(str(number), prompt, SamplingParams(max_tokens=20, n=1 + number % 3, ignore_eos=True))
        while llm.has_unfinished():
            llm.step()
            llm.engine.scheduler.kv.check()
            if rng.random() < 0.2:
                llm.abort(str(rng.randrange(24)))
        require_empty(llm)


def test_int4_comes_in_blocks_of_32_and_says_what_its_tails_take(model):
    with LLM(model, kv_cache_dtype="int4", max_num_seqs=4) as llm:
        memory, storage = llm.memory, executor_of(llm).storage
        assert memory.block_size == 32 and memory.kv_pool == storage.num_bytes
        assert (
            memory.kv_tails == sum(tail.nbytes for tail in storage.tails) == storage.spec.bytes_for_tails(4, "float32")
        )
        assert "KV tails" in repr(memory)


# ---------------------------------------------------------------- how close


@pytest.mark.parametrize(("kv_cache_dtype", "most"), [("int8", 0.03), ("fp8", 0.3), ("int4", 0.5)])
def test_log_probabilities_stay_close_to_those_of_an_unquantised_cache(model, kv_cache_dtype, most):
    tokens = [random.Random(3).randrange(2, 128) for _ in range(64)]

    def prompt_logprobs(name: str) -> torch.Tensor:
        with LLM(model, kv_cache_dtype=name, max_num_seqs=4) as llm:
            output = llm.generate([tokens], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)[0]
        rows = zip((output.prompt_logprobs or [])[1:], tokens[1:], strict=True)
        return torch.tensor([row[token].logprob for row, token in rows if row])

    error = (prompt_logprobs(kv_cache_dtype) - prompt_logprobs("auto")).abs().mean()
    assert 1e-6 < error < most, error


def test_int8_goes_on_as_the_embedded_model_does_without_it():
    model, tokenizer = load_model(dtype="float32", device="cpu")
    params = SamplingParams(temperature=0, max_tokens=8)
    texts = []
    for name in ("auto", "int8"):
        with LLM(model, tokenizer=tokenizer, kv_cache_dtype=name, max_model_len=128, max_num_seqs=4) as llm:
            outputs = llm.generate(["The capital of France is", "def fibonacci(n):\n"], params, use_tqdm=False)
            texts.append([output.outputs[0].text for output in outputs])
    assert texts[0] == texts[1]


# ---------------------------------------------------------------- scales from a file, and what is refused


def test_scales_from_a_file(model, tmp_path):
    format = KVFormat("int8", PER_HEAD)
    policy = KVPolicy.of(format)
    sides = [measure_scales(torch.full((1, 2, 16), float(i + 4)), format) for i in range(3)]
    save_scales(tmp_path / "scales", {i: LayerScales(s, s) for i, s in enumerate(sides)}, policy)
    with open_llm(model, policy, kv_scales=tmp_path / "scales") as llm:
        pages = executor_of(llm).storage.pages(1)
        assert pages.k.scales.flatten().tolist() == pytest.approx([5 / 127] * 2)  # type: ignore[union-attr]
        assert len(answers(llm)) == 6
    with pytest.raises(ValueError, match=r"kv_scales='x' goes with a kv_cache_dtype whose scales are fixed"):
        open_llm(model, "int8", kv_scales="x")
    with pytest.raises(ValueError, match="measured before the run: pass kv_scales"):
        open_llm(model, policy)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"kv_cache_dtype": "int9"},
            ValueError,
            r"kv_cache_dtype must be one of auto, .*got 'int9' \(did you mean 'int",
        ),
        ({"kv_cache_dtype": torch.int8}, TypeError, "kv_cache_dtype must be a name or a labkit.quant.KVPolicy"),
        (
            {"kv_cache_dtype": KVPolicy.of("int8").with_layers([3], "fp8")},
            ValueError,
            r"layers must be within \[-3, 3\)",
        ),
        (
            {"kv_cache_dtype": KVPolicy.of(KVFormat("int8", ScaleLayout(32)))},
            ValueError,
            "does not fit: tokens=32 must",
        ),
        ({"kv_cache_dtype": KVPolicy.of(KVFormat("int8", ScaleLayout(4)))}, ValueError, "got 4 tokens a scale"),
    ],
)
def test_what_cannot_be_is_refused_with_its_name(model, options, error, message):
    with pytest.raises(error, match=message):
        LLM(model, max_num_seqs=4, block_size=16, **options)
    assert model.config._attn_implementation != "labkit_paged"


@pytest.mark.parametrize("policy", [KVPolicy.of("fp8"), KVPolicy.of("int8").with_layers([1], "int8", "fp8_e5m2")])
def test_fp8_needs_sm_89(monkeypatch, policy):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(ValueError, match="sm_89 or newer, A100 is sm_80: use kv_cache_dtype='int8'"):
        require_support(policy, torch.device("cuda"))
    require_support(policy, torch.device("cpu"))
    require_support(KVPolicy.of("int8"), torch.device("cuda"))
