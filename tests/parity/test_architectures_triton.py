"""Backend `triton` in Triton's interpreter, on the smallest models that need all that the kernels can do."""

from __future__ import annotations

import os

import pytest
import torch

from labkit.engine import LLM

from .forcing import assert_same_logits, reference_logits, run_forced
from .tiny_models import TINY, VOCAB_SIZE

NUM_PROMPT_TOKENS = [18, 5]
NUM_NEW_TOKENS = [2, 3]

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled here; tests/kernel runs them on the GPU"
)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "deepseek_v3"])
def test_same_logits_as_transformers(name):
    model = TINY[name]()
    generator = torch.Generator().manual_seed(1)
    sequences = [
        torch.randint(2, VOCAB_SIZE, (prompt + new,), generator=generator).tolist()
        for prompt, new in zip(NUM_PROMPT_TOKENS, NUM_NEW_TOKENS, strict=True)
    ]
    expected = [reference_logits(model, ids, n) for ids, n in zip(sequences, NUM_PROMPT_TOKENS, strict=True)]
    with LLM(model, attention_backend="triton", max_num_batched_tokens=16, max_num_seqs=4) as llm:
        assert llm.attention_backend == "triton"
        assert_same_logits(run_forced(llm, sequences, NUM_PROMPT_TOKENS), expected)
