"""Tensor parallelism without ranks: what is refused before a process starts, and plans as messages."""

from __future__ import annotations

import pickle
import subprocess

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Phi3Config

from labkit.engine import LLM
from labkit.engine.tensor_parallel.plan_codec import PlanDecoder, PlanEncoder
from labkit.engine.tensor_parallel.shard_group import ShardGroup
from labkit.memory import KVCacheManager
from labkit.quant import LayerScales, Scales
from labkit.scheduling import Request, SamplingParams, Scheduler, SchedulerConfig, StepPlan, StepResult

_SIZES = dict(vocab_size=64, hidden_size=32, num_hidden_layers=1, intermediate_size=32)


@pytest.fixture(autouse=True)
def no_process(monkeypatch):
    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)


def _model(config):
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("config", "size", "reason"),
    [
        (
            LlamaConfig(
                **_SIZES | {"hidden_size": 72}, num_attention_heads=9, num_key_value_heads=3
            ),  # as SmolLM2-135M
            2,
            "tensor_parallel_size must be one of 1, 3, 9 for LlamaForCausalLM .*, got 2: every rank takes whole "
            "heads, and there are 9 query heads and 3 KV heads",
        ),
        (LlamaConfig(**_SIZES, num_attention_heads=8, num_key_value_heads=2), 3, "must be one of 1, 2, 4, 8 "),
        (GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4), 2, "has no tensor-parallel plan for its attention"),
        (
            Phi3Config(**_SIZES, num_attention_heads=4, pad_token_id=0),
            2,
            "does not shard its heads: q_proj is not in it",
        ),
    ],
)
def test_models_that_cannot_be_shared_evenly_are_refused(config, size, reason):
    with pytest.raises(ValueError, match=reason):
        LLM(_model(config), device="cpu", tensor_parallel_size=size)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"swap_space": 1}, "swap_space must be 0 with tensor_parallel_size > 1, got 1"),
        ({"quantization": "fp8"}, "quantization must be None with tensor_parallel_size > 1"),
        ({"device": "cuda:1"}, "device='cuda:1': torch sees 0 CUDA devices"),
        ({"tokenizer": "some/where"}, "tokenizer must be a tokenizer object or None"),
    ],
)
def test_options_that_ranks_cannot_follow_are_refused(options, reason):
    model = _model(LlamaConfig(**_SIZES, num_attention_heads=4))
    with pytest.raises(ValueError, match=reason):
        LLM(model, **({"device": "cpu"} | options), tensor_parallel_size=2)


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(ValueError, match="tensor_parallel_size must be <= 1, the GPUs that torch sees here, got 2"):
        LLM(_model(LlamaConfig(**_SIZES, num_attention_heads=4)), device="cuda", tensor_parallel_size=2)


@pytest.mark.parametrize(("num_boxes", "size", "boxes"), [(4, 2, [2, 3]), (2, 4, [0]), (1, 2, [0])])
def test_a_rank_gets_the_scales_of_its_heads(num_boxes, size, boxes, monkeypatch):
    """Of four heads on two ranks the second's two; of two heads on four ranks the first, which two ranks have."""
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    scales, zero_points = torch.rand(2, 1, num_boxes, 3)
    whole = Scales(scales, zero_points)
    own = ShardGroup(size).own_scales({7: LayerScales(whole, None)})[7]
    assert own.value is None and own.key is not None
    assert torch.equal(own.key.scales, scales[:, boxes])
    assert torch.equal(own.key.zero_points, zero_points[:, boxes])


# ---------------------------------------------------------------- plans as messages


def test_ranks_see_the_plans_of_the_scheduler_through_preemption_forks_and_prefix_hits():
    scheduler = Scheduler(SchedulerConfig(4, 16, 40), KVCacheManager(14, 4))
    encoder, decoder = PlanEncoder(), PlanDecoder()
    for number in range(6):
        params = SamplingParams(max_tokens=20, ignore_eos=True, n=2 if number == 1 else 1)
        scheduler.add(Request(f"r{number}", [1, 2, 3, 4] * 2 + [number] * (number + 1), params))
    sizes, num_preempted, ran_ahead = [], 0, None
    for step in range(400):
        plan = scheduler.schedule()
        if plan.is_empty and ran_ahead is None:
            break
        if not plan.is_empty:
            num_preempted += sum(entry.request.num_preemptions > 0 for entry in plan.requests)
            message = pickle.dumps(encoder.encode(plan))
            sizes.append(len(message))
            _assert_same(decoder.decode(pickle.loads(message)), plan)
        if ran_ahead is not None:
            scheduler.update(ran_ahead, _tokens(ran_ahead, step))
        ran_ahead = None if plan.is_empty else plan
    assert not scheduler.has_unfinished
    assert num_preempted > 0
    assert max(sizes[-20:]) < 1500


def _tokens(plan: StepPlan, step: int) -> StepResult:
    return StepResult(
        {e.request.request_id: [step % 50 + i for i in range(e.num_samples)] for e in plan.requests if e.num_samples}
    )


def _assert_same(got: StepPlan, plan: StepPlan) -> None:
    assert (got.step, got.copies, got.ended_ids) == (plan.step, plan.copies, plan.ended_ids)
    for mirror, entry in zip(got.requests, plan.requests, strict=True):
        assert mirror[1:3] == entry[1:3] and mirror.num_samples == entry.num_samples
        assert list(mirror.block_table) == list(entry.block_table)
        assert mirror.request.request_id == entry.request.request_id
        assert mirror.request.token_ids == entry.request.token_ids
        assert mirror.request.sample_index == entry.request.sample_index
