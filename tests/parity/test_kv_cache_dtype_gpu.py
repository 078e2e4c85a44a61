"""Quantised caches on a GPU: kernels and CUDA graphs against the readable torch path, and under pressure."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import PreTrainedModel

from labkit.engine import LLM
from labkit.quant import KVPolicy
from labkit.scheduling import PreemptionCost, SamplingParams

from .forcing import ForcedRun, run_forced
from .test_kv_cache_dtype import require_empty
from .tiny_models import TINY, VOCAB_SIZE

pytestmark = pytest.mark.gpu

POLICIES = {
    "int8": KVPolicy.of("int8"),
    "fp8": KVPolicy.of("fp8"),
    "fp8_e5m2": KVPolicy.of("fp8_e5m2"),
    "int4": KVPolicy.of("int4"),
    "int4, rotated, first layer 16 bit": KVPolicy.of("int4", rotate=True).with_layers([0], "float16"),
    "K int8, V int4": KVPolicy.of("int8", "int4"),
}
LIMITS = {"block_size": 16, "max_model_len": 112, "max_num_seqs": 8, "max_num_batched_tokens": 48}
NUM_NEW_TOKENS = 20


@pytest.fixture(scope="module", params=["llama", "gemma2", "qwen3", "deepseek_v3"])
def model(request) -> PreTrainedModel:
    return TINY[request.param]().to("cuda", torch.float16)


def sequences() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(2, VOCAB_SIZE) for _ in range(n + NUM_NEW_TOKENS)] for n in (3, 16, 37, 50, 75, 9)]


def forced(model: PreTrainedModel, policy: KVPolicy, **options) -> ForcedRun:
    with LLM(model, kv_cache_dtype=policy, **(LIMITS | options)) as llm:
        llm.engine.scheduler.preemption_cost = PreemptionCost()
        run = run_forced(llm, sequences(), [len(ids) - NUM_NEW_TOKENS for ids in sequences()])
        require_empty(llm)
        return run


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_kernels_and_graphs_read_what_the_torch_backend_reads(model, policy):
    expected = forced(model, policy, attention_backend="torch").logits
    for options in (
        {},
        {"enforce_eager": True},
        {"attention_backend": "unfused"},
        {"num_gpu_blocks_override": 8, "swap_space": 0.1, "enable_prefix_caching": False},
    ):
        run = forced(model, policy, **options)
        for ours, theirs in zip(run.logits, expected, strict=True):
            error = (ours - theirs).abs() / theirs.std()
            # Rounding in 16 bit may move a value to the next code, so single logits may differ by more.
            assert error.mean() < 0.03 and error.max() < 0.5, (options, float(error.mean()), float(error.max()))
        assert (run.num_preemptions > 0) == ("swap_space" in options)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_every_request_ends_under_pressure(model, policy):
    rng = random.Random(1)
    options = LIMITS | {"num_gpu_blocks_override": 8, "swap_space": 1e-4}
    with LLM(model, kv_cache_dtype=policy, **options) as llm:
        llm.engine.scheduler.preemption_cost = PreemptionCost()
        for number in range(40):
            prompt = [rng.randrange(2, VOCAB_SIZE) for _ in range(rng.randint(1, 60))]
            params = SamplingParams(max_tokens=rng.randint(1, 40), n=1 + number % 3, ignore_eos=True)
            llm.add_request(str(number), prompt, params)
        while llm.has_unfinished():
            llm.step()
            llm.engine.scheduler.kv.check()
            if rng.random() < 0.05:
                llm.abort(str(rng.randrange(40)))
        require_empty(llm)
        assert llm.stats.num_preemptions > 0
