"""Where the memory goes: caps, host memory, and errors that say what to lower and by how much."""

from __future__ import annotations

import psutil
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from labkit.engine import LLM, memory_plan
from labkit.scheduling import SamplingParams

GIB = 1 << 30


def test_weights_and_pool_stay_below_memory_limit(tiny_llama):
    with LLM(tiny_llama, memory_limit=0.005, max_num_seqs=64) as llm:
        memory = llm.memory
        assert memory.weights + memory.kv_pool <= memory.total == int(0.005 * GIB)
        assert memory.num_blocks > 100
        assert llm.generate([1, 2, 3], SamplingParams(max_tokens=2), use_tqdm=False)[0].finished


def test_swap_space_is_counted_in_blocks_and_not_larger_than_any_use(tiny_llama):
    with LLM(tiny_llama, num_gpu_blocks_override=16, swap_space=2**-10, max_num_seqs=64) as llm:
        assert llm.memory.num_host_blocks == (1 << 20) // (llm.memory.bytes_per_token * 16)
        assert llm.memory.swap_space <= 1 << 20
    with LLM(tiny_llama, num_gpu_blocks_override=16, swap_space=1, max_num_seqs=4) as llm:
        assert llm.memory.num_host_blocks == 4 * 256 // 16


def test_more_swap_space_than_the_host_has_is_refused(tiny_llama, monkeypatch):
    class Small:
        total, available = 4 * GIB, 1 << 20

    monkeypatch.setattr(psutil, "virtual_memory", Small)
    with pytest.raises(ValueError, match=r"swap_space=2 GiB is more than the host has free: lower it to 0\.00 or less"):
        LLM(tiny_llama, max_num_seqs=256, max_model_len=256, num_gpu_blocks_override=16, swap_space=2)


@pytest.mark.parametrize(("fits", "advice"), [(1024, "max_num_batched_tokens to 1024$"), (128, "max_num_seqs to 128")])
def test_a_step_that_does_not_fit_names_a_size_that_does(tiny_llama, monkeypatch, fits, advice):
    def peak(model, num_tokens, num_logits):
        if num_tokens > fits:
            raise torch.OutOfMemoryError("out of memory")
        return num_tokens

    monkeypatch.setattr(memory_plan, "_peak_activations", peak)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * GIB, 8 * GIB))
    assert memory_plan._largest_step(tiny_llama, fits, 256) == fits
    with pytest.raises(ValueError, match=rf"max_num_batched_tokens=4096 does not fit into the 3.00 GiB .*: .*{advice}"):
        memory_plan._largest_step(tiny_llama, 4096, 256)


@pytest.mark.gpu
def test_on_a_gpu_memory_limit_binds_torch_until_close(tiny_llama):
    model = tiny_llama.to("cuda")
    try:
        with LLM(model, memory_limit=2) as llm:
            assert torch.cuda.memory_reserved() <= 2 * GIB
            assert llm.memory.total == 2 * GIB
            with pytest.raises(torch.OutOfMemoryError):
                torch.empty(3 * GIB, dtype=torch.uint8, device="cuda")
            assert llm.generate([1, 2, 3], SamplingParams(max_tokens=2), use_tqdm=False)[0].finished
        torch.empty(3 * GIB, dtype=torch.uint8, device="cuda")
    finally:
        tiny_llama.to("cpu")


@pytest.mark.gpu
def test_on_a_gpu_everything_stays_below_gpu_memory_utilization():
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=8192,
    )
    model = LlamaForCausalLM(config).eval().to("cuda", torch.bfloat16)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    share = (total - free + 4 * GIB) / total  # the pool would like 8 GiB
    with LLM(model, gpu_memory_utilization=share) as llm:
        assert llm.memory.graphs > 0 and llm.memory.kv_pool > GIB
        llm.generate([[1, 2, 3]] * 256, SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
        free, total = torch.cuda.mem_get_info()
        assert total - free <= share * total

        # What the graphs keep is told apart: without them it would look like the allocator's reserve.
        torch.cuda.empty_cache()
        snapshot = llm.memory_monitor().snapshot()
        assert 0 < snapshot.graphs <= 2 * llm.memory.graphs
        assert snapshot.activations + snapshot.allocator_reserve < 256 * 2**20
        assert sum(snapshot.parts().values()) == snapshot.total
