"""The tiny model of the fault lab: a Llama of two layers with random weights, on the CPU, in memory full of NaN."""

from __future__ import annotations

from functools import cache

import torch
from transformers import LlamaConfig, PreTrainedModel

from labkit import LLM
from labkit.engine import ModelExecutor
from labkit.models import random_model


def tiny_llm(kv_cache_dtype: str, num_blocks: int, block_size: int, max_num_seqs: int, max_model_len: int) -> LLM:
    """An engine whose pool holds what memory may hold that nobody has written: NaN, or any code and scale."""
    llm = LLM(
        _tiny_llama(),
        block_size=block_size,
        num_gpu_blocks_override=num_blocks,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        kv_cache_dtype=kv_cache_dtype,
        attention_backend="torch",
    )
    executor = llm.engine.executor
    assert isinstance(executor, ModelExecutor)
    for tensor in executor.storage.tensors():
        tensor.fill_(torch.nan if kv_cache_dtype == "auto" else 1)
    return llm


@cache
def _tiny_llama() -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,  # far apart logits: what is read wrongly is seen
    )
    return random_model(config, dtype=torch.float32, device="cpu")
