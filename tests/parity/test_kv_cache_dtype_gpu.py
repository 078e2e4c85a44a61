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


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return TINY["llama"]().to("cuda", torch.float16)


def sequences() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(2, VOCAB_SIZE) for _ in range(n + NUM_NEW_TOKENS)] for n in (3, 16, 37, 50, 75, 9)]


def forced(model: PreTrainedModel, policy: KVPolicy, **options) -> ForcedRun:
    with LLM(model, kv_cache_dtype=policy, **(LIMITS | options)) as llm:
        llm.engine.scheduler.preemption_cost = PreemptionCost()
        run = run_forced(llm, sequences(), [len(ids) - NUM_NEW_TOKENS for ids in sequences()])
        require_empty(llm)
        return run


def require_same(run: ForcedRun, expected: ForcedRun, mean: float, most: float) -> None:
    """Differences of logits in units of their own spread; those of a wrong cache are about 1."""
    for ours, theirs in zip(run.logits, expected.logits, strict=True):
        error = (ours - theirs).abs() / theirs.std()
        assert error.mean() < mean and error.max() < most, (float(error.mean()), float(error.max()))


@pytest.mark.parametrize(
    "architecture, policy",
    [*(("llama", policy) for policy in ("int8", "fp8", "int4", "K int8, V int4")), ("gemma2", "int4"),
     ("deepseek_v3", "int4")],
)  # fmt: skip
def test_kernels_and_graphs_read_what_the_torch_backend_reads(architecture, policy):
    """In float32, where rounding moves few values to the next code.

    int4 has steps so wide that even one moved value shows. On the torch backend, noise of 3e-5 in K and V, more than
    kernels and torch differ by, moved the logits of a sequence by up to 0.051 on average and one logit by 2.2; zero
    points one code off, channels in a wrong order or nibbles swapped moved those of every sequence by 0.19 or more.
    """
    mean, most = (0.1, 3.0) if "int4" in policy else (5e-3, 0.1)
    model = TINY[architecture]().to("cuda")
    expected = forced(model, POLICIES[policy], attention_backend="torch")
    for options in (
        {},
        {"attention_backend": "unfused"},
        {"num_gpu_blocks_override": 8, "swap_space": 0.1, "enable_prefix_caching": False},
    ):
        run = forced(model, POLICIES[policy], **options)
        require_same(run, expected, mean, most)
        assert (run.num_preemptions > 0) == ("swap_space" in options)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_float16_up_to_values_that_rounding_moves_to_the_next_code(model, policy):
    """Random rounding of K and V alone moves the logits of this model by 0.09 on average (int4) and 0.65 at most."""
    require_same(forced(model, policy), forced(model, policy, attention_backend="torch"), 0.2, 2.0)


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
