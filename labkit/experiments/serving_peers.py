"""What serves beside labkit: transformers' static generation and its continuous batching, and vLLM."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from .serving_workload import ServeRequest


def serve_with_generate(
    model: PreTrainedModel, requests: Sequence[ServeRequest], batch_size: int = 64
) -> dict[str, Any]:
    """Static batches through ``model.generate`` with sdpa: padded on the left, each as long as its longest output."""
    model.set_attn_implementation("sdpa")
    start = time.perf_counter()
    for first in range(0, len(requests), batch_size):
        batch = requests[first : first + batch_size]
        longest = max(len(r.prompt_token_ids) for r in batch)
        tokens = torch.zeros(len(batch), longest, dtype=torch.int64)
        mask = torch.zeros_like(tokens)
        for row, request in enumerate(batch):
            tokens[row, longest - len(request.prompt_token_ids) :] = torch.tensor(request.prompt_token_ids)
            mask[row, longest - len(request.prompt_token_ids) :] = 1
        count = max(r.num_output_tokens for r in batch)
        model.generate(  # pyright: ignore[reportCallIssue]
            tokens.to(model.device),
            attention_mask=mask.to(model.device),
            do_sample=False,
            max_new_tokens=count,
            min_new_tokens=count,
            pad_token_id=0,
        )
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return {"seconds": time.perf_counter() - start}


def serve_with_continuous_batching(model: PreTrainedModel, requests: Sequence[ServeRequest]) -> dict[str, Any]:
    """transformers' own continuous batching with sdpa over its paged cache."""
    from transformers import GenerationConfig

    model.set_attn_implementation("sdpa")
    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=1024)
    manager = model.init_continuous_batching(generation_config=config)  # pyright: ignore[reportCallIssue]
    manager.start()
    try:
        manager.add_request(requests[0].prompt_token_ids, request_id="warm-up", max_new_tokens=2)
        manager.get_result(timeout=120)
        start = time.perf_counter()
        for number, request in enumerate(requests):
            manager.add_request(
                request.prompt_token_ids, request_id=f"request-{number}", max_new_tokens=request.num_output_tokens
            )
        finished, arrivals = 0, []
        while finished < len(requests):
            result = manager.get_result(timeout=120)
            if result is None:
                raise RuntimeError(f"continuous batching stopped after {finished} of {len(requests)} requests")
            finished += 1
            arrivals.append(time.perf_counter() - start)
        return {"seconds": float(np.max(arrivals))}
    finally:
        manager.stop(block=True)


def serve_with_vllm(model: PreTrainedModel, requests: Sequence[ServeRequest]) -> dict[str, Any]:
    """vLLM's offline engine, prefix caching off, on random weights of the model's shape; not run if not installed."""
    if find_spec("vllm") is None:
        return {"seconds": None}
    import vllm  # pyright: ignore[reportMissingImports]

    longest = max(len(r.prompt_token_ids) + r.num_output_tokens for r in requests)
    share = 0.9
    if model.device.type == "cuda":  # of what this model leaves
        free, total = torch.cuda.mem_get_info(model.device)
        share *= free / total
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        llm = vllm.LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype=str(model.dtype).removeprefix("torch."),
            max_model_len=longest,
            enable_prefix_caching=False,
            gpu_memory_utilization=share,
        )
        prompts = [{"prompt_token_ids": request.prompt_token_ids} for request in requests]
        params = [
            vllm.SamplingParams(temperature=0, max_tokens=r.num_output_tokens, ignore_eos=True, detokenize=False)
            for r in requests
        ]
        llm.generate(prompts[:4], params[:4], use_tqdm=False)
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return {"seconds": time.perf_counter() - start}
