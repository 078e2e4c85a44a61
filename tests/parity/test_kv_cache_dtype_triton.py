"""Quantised caches through the Triton kernels, in Triton's interpreter, against the readable torch path."""

from __future__ import annotations

import os

import pytest
import torch

from labkit.engine import LLM
from labkit.quant import KVPolicy

from .forcing import ForcedRun, run_forced
from .tiny_models import TINY, VOCAB_SIZE

NUM_PROMPT_TOKENS, NUM_NEW_TOKENS = [17, 4], 2
POLICIES = {
    "int8": KVPolicy.of("int8"),
    "fp8": KVPolicy.of("fp8"),
    "int4": KVPolicy.of("int4"),
    "K int8, V int4, rotated": KVPolicy.of("int8", "int4", rotate=True),
}

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled here; tests/kernel runs them on the GPU"
)


def forced(policy: KVPolicy, backend: str) -> ForcedRun:
    """Chunks of 10 tokens, so that one begins in the middle of a block of 16 and completes it."""
    generator = torch.Generator().manual_seed(1)
    lengths = [prompt + NUM_NEW_TOKENS for prompt in NUM_PROMPT_TOKENS]
    sequences = [torch.randint(2, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]
    options = {"block_size": 16, "max_model_len": 48, "max_num_seqs": 4, "max_num_batched_tokens": 10}
    with LLM(TINY["llama"](), kv_cache_dtype=policy, attention_backend=backend, **options) as llm:
        return run_forced(llm, sequences, NUM_PROMPT_TOKENS)


@pytest.mark.parametrize(("policy", "backend"), [*((policy, "triton") for policy in POLICIES), ("int4", "unfused")])
def test_same_logits_as_the_torch_backend(policy, backend):
    expected, got = (forced(POLICIES[policy], b).logits for b in ("torch", backend))
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=3e-3)


def test_formats_without_a_kernel_are_refused_while_the_engine_is_made():
    policy = KVPolicy.of("int8", KVPolicy.of("int4").key)
    with pytest.raises(ValueError, match="'triton' cannot run kv_cache_dtype .*use attention_backend='torch'"):
        LLM(TINY["llama"](), kv_cache_dtype=policy, attention_backend="triton", max_num_seqs=4, max_model_len=48)
