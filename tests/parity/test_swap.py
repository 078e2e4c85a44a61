"""Swapping changes no token: a tight pool with host memory behind it answers like a roomy one."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from labkit.engine import LLM
from labkit.memory import KVCacheManager
from labkit.scheduling import PreemptionCost, SamplingParams

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LIMITS = {"block_size": 4, "max_model_len": 64, "max_num_seqs": 8}


@pytest.fixture(scope="module", params=DEVICES)
def model(request) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
        eos_token_id=95,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval().to(request.param)


def workload() -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(0)
    prompts = [[rng.randrange(95) for _ in range(rng.randint(1, 24))] for _ in range(24)]
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=rng.randint(4, 38),
            ignore_eos=True,
            n=1 + (i % 6 == 0),
            prompt_logprobs=0 if i % 4 == 0 else None,
        )
        for i in range(len(prompts))
    ]
    return prompts, params


def answers(llm: LLM) -> tuple[list[list[list[int]]], list[float]]:
    """Tokens of every sample, and log-probabilities of every prompt token that was asked for."""
    outputs = llm.generate(*workload(), use_tqdm=False)
    usage = llm.engine.scheduler.kv.usage()
    llm.engine.scheduler.kv.check()
    assert usage.num_referenced_blocks == usage.num_in_flight_blocks == 0
    tokens = [[completion.token_ids for completion in output.outputs] for output in outputs]
    rows = [row for output in outputs for row in output.prompt_logprobs or [] if row]
    return tokens, [value.logprob for row in rows for value in row.values()]


@pytest.fixture(scope="module")
def expected(model):
    with LLM(model, num_gpu_blocks_override=256, **LIMITS) as llm:
        result = answers(llm)
        assert llm.stats.num_preemptions == 0
        return result


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("swap_space", [0.5, 2e-5], ids=["roomy", "often full"])
def test_swapped_sequences_go_on_with_the_same_tokens(model, expected, swap_space, enable_prefix_caching):
    options = LIMITS | {"swap_space": swap_space, "enable_prefix_caching": enable_prefix_caching}
    with LLM(model, num_gpu_blocks_override=20, **options) as llm:
        llm.engine.scheduler.preemption_cost = PreemptionCost()  # always swap if there is room
        tokens, logprobs = answers(llm)
        assert tokens == expected[0]
        assert logprobs == pytest.approx(expected[1], abs=1e-3)
        assert llm.stats.num_swaps > 0
        kv = llm.engine.scheduler.kv
        assert isinstance(kv, KVCacheManager)
        assert kv.swap_space.num_free_blocks == kv.swap_space.num_host_blocks == llm.memory.num_host_blocks


def test_the_cost_of_swapping_and_computing_is_measured(model):
    with LLM(model, num_gpu_blocks_override=64, swap_space=0.01, **LIMITS) as llm:
        cost = llm.engine.scheduler.preemption_cost
        assert 0 < cost.seconds_per_swapped_block < 1
        assert 0 <= cost.seconds_per_computed_token < 1
        assert "swap space" in repr(llm.memory)


def test_swap_and_abort_in_mid_air(model):
    with LLM(model, num_gpu_blocks_override=20, swap_space=0.01, **LIMITS) as llm:
        llm.engine.scheduler.preemption_cost = PreemptionCost()
        prompts, params = workload()
        for number, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            llm.add_request(str(number), prompt, one)
        kv = llm.engine.scheduler.kv
        assert isinstance(kv, KVCacheManager)
        rng = random.Random(1)
        while llm.has_unfinished():
            llm.step()
            kv.check()
            if llm.stats.num_swaps and rng.random() < 0.2:
                llm.abort(str(rng.randrange(len(prompts))))
                kv.check()
        assert llm.stats.num_swaps > 0
        assert kv.usage().num_referenced_blocks == kv.usage().num_in_flight_blocks == 0
        assert kv.swap_space.num_free_blocks == kv.swap_space.num_host_blocks
