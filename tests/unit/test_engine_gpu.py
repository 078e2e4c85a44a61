"""The engine on a GPU: several in one process, memory that comes back, and a device that fails."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from triton import knobs

from labkit.engine import LLM
from labkit.scheduling import SamplingParams

PROMPTS = [[3, 4, 5], list(range(10, 50)), [7] * 17, [99]]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SIZES = {"max_model_len": 128, "max_num_seqs": 8, "num_gpu_blocks_override": 64}
MIB = 1 << 20


def tiny(device: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval().to(device)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny("cuda")


@pytest.fixture(scope="module")
def expected(model: Any) -> list[list[int]]:
    """What transformers generates for each prompt alone."""
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt], device=model.device)
        options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        whole = model.generate(ids, max_new_tokens=GREEDY.max_tokens, **options)
        answers.append(whole[0, len(prompt) :].tolist())
    return answers


def answers(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.mark.gpu
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_same_tokens_as_transformers_with_graphs_and_without(model, expected, enforce_eager):
    with LLM(model, enforce_eager=enforce_eager, **SIZES) as llm:
        executor: Any = llm.engine.executor
        assert (executor.graphs is None) == enforce_eager
        assert answers(llm) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_serving_compiles_nothing(model, monkeypatch, kv_cache_dtype):
    """What tests/unit/test_warm_up.py reckons, counted."""
    sizes = SIZES | {"max_num_seqs": 40, "num_gpu_blocks_override": 512}
    compiled: list[str] = []
    with LLM(model, kv_cache_dtype=kv_cache_dtype, max_num_batched_tokens=64, **sizes) as llm:
        monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **how: compiled.append(how["repr"]))
        prompts = [[1] * (1 + i * 7 % 40) for i in range(80)]
        params = [SamplingParams(temperature=0, max_tokens=20 + i % 23, ignore_eos=True) for i in range(80)]
        llm.generate(prompts, params, use_tqdm=False)
    assert not compiled


@pytest.mark.gpu
def test_two_engines_in_one_process_take_turns(model, expected):
    with LLM(model, block_size=4, **SIZES) as one:
        with LLM(model, block_size=32, **SIZES) as two:
            streams = zip(one.stream(PROMPTS[0], GREEDY), two.stream(PROMPTS[1], GREEDY), strict=True)
            last = list(streams)[-1]
            assert [output.outputs[0].token_ids for output in last] == expected[:2]
        assert answers(one) == expected


@pytest.fixture
def settled() -> Iterator[int]:
    """Bytes that torch holds before the test, once what earlier tests left is gone."""
    gc.collect()
    torch.cuda.empty_cache()
    yield torch.cuda.memory_allocated()


@pytest.mark.gpu
def test_close_and_open_again_takes_no_more_each_time(model, expected, settled):
    reserved = []
    for _ in range(4):
        with LLM(model, **(SIZES | {"num_gpu_blocks_override": 4096}), swap_space=0.01) as llm:
            assert answers(llm) == expected
            assert torch.cuda.memory_allocated() - settled >= llm.memory.kv_pool
        reserved.append(torch.cuda.memory_reserved())
    del llm
    gc.collect()
    assert reserved[3] == reserved[1]
    assert torch.cuda.memory_allocated() - settled < MIB


@pytest.mark.gpu
def test_a_dropped_llm_returns_the_memory(model, settled):
    llm = LLM(model, **(SIZES | {"num_gpu_blocks_override": 4096}))
    answers(llm)
    pool = llm.memory.kv_pool
    assert torch.cuda.memory_allocated() - settled >= pool > 16 * MIB
    del llm
    gc.collect()
    assert torch.cuda.memory_allocated() - settled < MIB


FAILING_DEVICE = """
import warnings
import torch
from labkit.engine import LLM
from tests.unit.test_engine_gpu import GREEDY, PROMPTS, SIZES, answers, tiny

warnings.simplefilter("ignore")
llm = LLM(tiny("cuda"), swap_space=0.01, **SIZES)
before = answers(llm)
submit, num_steps = llm.engine.executor.submit, 0

def break_the_device(plan):
    global num_steps
    num_steps += 1
    if num_steps == 6:
        torch.zeros(4, device="cuda")[torch.tensor([1 << 20], device="cuda")]  # a kernel that asserts
    submit(plan)

llm.engine.executor.submit = break_the_device
for output, tokens in zip(llm.generate(PROMPTS, GREEDY, use_tqdm=False), before):
    (completion,) = output.outputs
    assert completion.finish_reason == "error" and "CUDA error" in completion.stop_reason, completion
    assert 0 < len(completion.token_ids) < len(tokens) and tokens[: len(completion.token_ids)] == completion.token_ids
for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False):
    (completion,) = output.outputs
    assert completion.finish_reason == "error" and completion.token_ids == [], completion
    assert "failed in an earlier step" in completion.stop_reason and "restart" in completion.stop_reason
llm.engine.scheduler.kv.check()
assert llm.engine.scheduler.kv.usage().num_referenced_blocks == 0
llm.close()
print("refused")
"""


@pytest.mark.gpu
def test_after_a_cuda_error_requests_fail_and_no_step_runs_any_more():
    """In a process of its own, since the error makes its CUDA context useless."""
    command, root = [sys.executable, "-c", FAILING_DEVICE], Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and done.stdout.strip() == "refused", done.stdout + done.stderr


def test_a_device_that_failed_is_not_used_again(monkeypatch):
    """The same without a GPU: what the error is, not where it comes from, makes the difference."""
    with LLM(tiny("cpu"), **SIZES) as llm:
        before = answers(llm)
        forward, num_steps = llm.model.forward, 0

        def fail(*args, **kwargs):
            nonlocal num_steps
            num_steps += 1
            if num_steps == 6:
                raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
            return forward(*args, **kwargs)

        monkeypatch.setattr(llm.model, "forward", fail)
        with pytest.warns(UserWarning, match="illegal memory access"):
            failed = answers(llm)
        assert all(tokens[:5] == got for tokens, got in zip(before, failed, strict=True))
        with pytest.warns(UserWarning, match="failed in an earlier step .* restart the process"):
            assert answers(llm) == [[]] * len(PROMPTS)
        assert num_steps == 6
