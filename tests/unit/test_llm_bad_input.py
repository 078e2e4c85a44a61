"""Bad input gets a clear error from the call that received it, nothing is admitted, and the next call works."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from labkit.engine import LLM
from labkit.scheduling import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture(scope="module")
def llm(tiny_llama) -> Iterator[LLM]:
    with LLM(tiny_llama, max_model_len=64, num_gpu_blocks_override=8, max_num_seqs=4) as llm:
        yield llm


@pytest.mark.parametrize(
    ("prompts", "error", "message"),
    [
        ([], ValueError, "prompts must hold at least one"),
        ([[1, 2], []], ValueError, r"prompts\[1\] must not be empty"),
        ([[1], [2, 128]], ValueError, r"token id 128 in prompts\[1\] must be in \[0, 128\)"),
        ([[-1]], ValueError, r"token id -1 .* must be in \[0, 128\)"),
        ([[1, 2.5]], TypeError, r"prompts\[0\] must be text or a list of token ids, got 2.5"),
        ([[True]], TypeError, "got True"),
        (17, TypeError, "prompts must be text, token ids or a list of those, got int"),
        ([17.5], TypeError, r"prompts\[0\] must be text or a list of token ids, got float"),
        (b"bytes", TypeError, "got bytes"),
        ("text", ValueError, r"prompt is text, but this LLM has no tokenizer.*tokenizer="),
        ({"tokens": [1]}, ValueError, "prompt_token_ids"),
        ([[5] * 64], ValueError, r"prompt of 64 tokens .* max_model_len=64"),
        ([[5] * 63, [5] * 100], ValueError, r"prompt of 100 tokens"),
    ],
)
def test_prompts(llm, prompts, error, message):
    with pytest.raises(error, match=message):
        llm.generate(prompts, GREEDY, use_tqdm=False)
    assert_unharmed(llm)


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ([GREEDY], ValueError, "sampling_params must be one or as many as the 2 prompts, got 1"),
        ([GREEDY, None], TypeError, "sampling_params must be SamplingParams, got NoneType"),
        ({"temperature": 0}, TypeError, "sampling_params must be SamplingParams, got dict"),
        (SamplingParams(stop="x"), ValueError, r"stop=\('x',\) needs a tokenizer"),
        (SamplingParams(stop_token_ids=[128]), ValueError, r"stop_token_ids must be in \[0, 128\).*got 128"),
        (SamplingParams(n=5), ValueError, r"n must be <= max_num_seqs \(4\), got 5"),
    ],
)
def test_params(llm, params, error, message):
    with pytest.raises(error, match=message):
        llm.generate([[1], [2]], params, use_tqdm=False)
    assert_unharmed(llm)


def test_stream_checks_before_its_first_output_is_asked_for(llm):
    with pytest.raises(ValueError, match="must not be empty"):
        llm.stream([[1], []], GREEDY)
    assert_unharmed(llm)


def test_request_ids(llm):
    llm.add_request("mine", [1, 2], GREEDY)
    with pytest.raises(ValueError, match="request_id 'mine' is already in use"):
        llm.add_request("mine", [3], GREEDY)
    with pytest.raises(TypeError, match="request_id must be a string, got 5"):
        llm.add_request(5, [3], GREEDY)
    while llm.has_unfinished():
        llm.step()
    llm.add_request("mine", [3], GREEDY)  # free again
    assert llm.abort("mine") and not llm.abort("mine")
    assert [o.outputs[0].finish_reason for o in llm.step()] == ["abort"]
    assert_unharmed(llm)


def assert_unharmed(llm: LLM) -> None:
    assert not llm.has_unfinished()
    usage = llm.engine.scheduler.kv.usage()
    assert usage.num_referenced_blocks == 0
    output = llm.generate([1, 2, 3], GREEDY, use_tqdm=False)[0]
    assert len(output.outputs[0].token_ids) == 4 and output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"block_size": 0}, ValueError, "block_size must be >= 1, got 0"),
        ({"block_size": 24}, ValueError, "block_size must be a power of two >= 1, got 24"),
        ({"block_size": 16.0}, TypeError, "block_size must be an integer >= 1, got 16.0"),
        ({"gpu_memory_utilization": 0}, ValueError, r"gpu_memory_utilization must be in \(0, 1\], got 0"),
        ({"gpu_memory_utilization": 1.01}, ValueError, r"gpu_memory_utilization must be in \(0, 1\], got 1.01"),
        ({"max_num_seqs": 0}, ValueError, "max_num_seqs must be >= 1, got 0"),
        ({"max_model_len": 0}, ValueError, "max_model_len must be >= 1, got 0"),
        ({"max_model_len": 257}, ValueError, "max_model_len must be <= 256.*got 257"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, ValueError, r"max_num_batched_tokens must be >= .*64"),
        ({"num_gpu_blocks_override": 0}, ValueError, "num_gpu_blocks_override must be >= 1, got 0"),
        ({"dtype": "int7"}, ValueError, "dtype must be .*'int7'"),
        ({"dtype": torch.float16}, ValueError, "dtype must be 'auto' with a module"),
        ({"device": "warp"}, ValueError, "device must be .*got 'warp'"),
        ({"seed": "0"}, TypeError, "seed must be an integer, got '0'"),
        ({"attention_backend": "flash"}, ValueError, "attention_backend must be one of auto, torch, triton"),
        ({"kv_allocator": "slab"}, ValueError, "kv_allocator must be one of paged, .*'slab'"),
        ({"scheduler": "random"}, ValueError, "scheduler must be one of continuous, static, got 'random'"),
        ({"swap_space": -1}, ValueError, "swap_space must be >= 0 GiB, got -1"),
        ({"swap_space": "4"}, TypeError, "swap_space must be a number >= 0 GiB, got '4'"),
        ({"swap_space": 2**-20}, ValueError, "swap_space=9.5.* GiB holds no block of .*: raise it, or use 0"),
        ({"swap_space": 1, "kv_allocator": "first_fit"}, ValueError, "swap_space must be 0 with kv_allocator='first_f"),
        ({"memory_limit": 0}, ValueError, "memory_limit must be > 0 GiB or None, got 0"),
        ({"memory_limit": 1e-4}, ValueError, r"no room for the KV pool: -?0.00 GiB .*raise memory_limit by 0.0"),
        (
            {"memory_limit": 0.001, "num_gpu_blocks_override": 100},
            ValueError,
            r"num_gpu_blocks_override=100 takes .* GiB are left for the KV pool: lower it to \d+ or less",
        ),
        ({"quantization": "fp8"}, ValueError, "quantization must be None with a module.*quantise_weights"),
        (
            {"max_model_len": 100, "num_gpu_blocks_override": 6},
            ValueError,
            "max_model_len=100 needs 7 blocks of 16 tokens, the pool has 6.*num_gpu_blocks_override",
        ),
        (
            {"num_gpu_blocks_override": 6},
            ValueError,
            "max_model_len=256 needs 16 blocks of 16 tokens, the pool has 6.*max_model_len.*num_gpu_blocks_override",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_construction(tiny_llama, arguments, error, message):
    before = tiny_llama.config._attn_implementation
    with pytest.raises(error, match=message):
        LLM(tiny_llama, **arguments)
    assert tiny_llama.config._attn_implementation == before


def test_an_unsupported_architecture_is_refused_by_name():
    from transformers import BloomConfig, BloomForCausalLM

    model = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2))
    with pytest.raises(ValueError, match=r"BloomForCausalLM.*not supported.*attention"):
        LLM(model)


def test_unknown_dtype_for_a_model_by_name():
    with pytest.raises(ValueError, match=r"dtype must be 'auto'.*'int7'"):
        LLM(dtype="int7")


def test_a_closed_llm_says_so(tiny_llama):
    llm = LLM(tiny_llama, num_gpu_blocks_override=16)
    llm.close()
    llm.close()
    for call in (lambda: llm.generate([1], GREEDY), lambda: llm.add_request("a", [1]), llm.step):
        with pytest.raises(RuntimeError, match="closed"):
            call()
