"""One rank on one GPU with NCCL, graphs and fused layers; with two GPUs, two ranks. A CPU runs the first with gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from labkit.engine import LLM
from labkit.engine.options import EngineOptions
from labkit.engine.tensor_parallel import build_sharded_engine, resolve_sharded
from labkit.scheduling import Request, SamplingParams

from .tiny_models import TINY

OPTIONS: dict[str, Any] = dict(num_gpu_blocks_override=64, max_num_seqs=4)
PROMPTS = [[5, 6, 7, 8, 9], [3, 4, 11] * 10]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_one_rank_in_a_process_of_its_own(device):
    """LLM itself would run a single rank without another process; the parts are those of any number."""
    with LLM(TINY["llama"]().to(device), **OPTIONS) as alone:
        expected = [output.outputs[0].token_ids for output in alone.generate(PROMPTS, GREEDY, use_tqdm=False)]
    others: dict[str, Any] = dict.fromkeys(EngineOptions.__dataclass_fields__) | dict(
        gpu_memory_utilization=0.5,
        enable_prefix_caching=True,
        kv_cache_dtype="auto",
        swap_space=0,
        tensor_parallel_size=1,
        enforce_eager=False,
        seed=0,
        attention_backend="auto",
        kv_allocator="paged",
        scheduler="continuous",
    )
    options = EngineOptions(**others | OPTIONS)
    outline, _, source = resolve_sharded(TINY["llama"](), None, "auto", device, None, False, options)
    sharded = build_sharded_engine(outline, source, options)
    try:
        requests = [Request(str(number), prompt, GREEDY) for number, prompt in enumerate(PROMPTS)]
        for request in requests:
            sharded.engine.add_request(request)
        while sharded.engine.has_unfinished:
            sharded.engine.step()
        assert [request.output_token_ids for request in requests] == expected
        assert sharded.ready[0].fusion == "fused"
        assert sharded.ready[0].has_graphs == (device == "cuda")
    finally:
        sharded.release(outline)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_two_gpus_have_the_logits_of_one(name):
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=20)
    with LLM(TINY[name]().to("cuda"), **OPTIONS) as alone:
        expected = alone.generate(PROMPTS, params, use_tqdm=False)
    with LLM(TINY[name](), device="cuda", tensor_parallel_size=2, **OPTIONS) as llm:
        got = llm.generate(PROMPTS, params, use_tqdm=False)
        assert llm.memory.kv_pool * 2 == alone.memory.kv_pool
    for one, other in zip(got, expected, strict=True):
        assert one.prompt_logprobs is not None and other.prompt_logprobs is not None
        for row, wanted in zip(one.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True):
            assert row is not None and wanted is not None
            for token in row.keys() & wanted.keys():
                assert abs(row[token].logprob - wanted[token].logprob) < 1e-3  # matmuls of other shapes
