"""Contract 3 for every kind of attention: same logits as transformers whatever the blocks, chunks, pool and cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import labkit.engine  # noqa: F401 (registers the attention before models are made)
from labkit.engine import LLM

from .forcing import assert_same_logits, reference_logits, run_forced
from .tiny_models import TINY, VOCAB_SIZE

NUM_PROMPT_TOKENS = [1, 5, 33, 20, 16]
NUM_NEW_TOKENS = [20, 12, 9, 14, 1]

SETTINGS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "chunks of 7": {"max_num_batched_tokens": 7, "max_num_seqs": 6},
    "block size 1": {"block_size": 1, "max_num_batched_tokens": 24, "max_num_seqs": 6},
    "tight pool": {"block_size": 4, "max_model_len": 48, "num_gpu_blocks_override": 14, "max_num_seqs": 6},
    "tight pool, chunks": {
        "block_size": 4,
        "max_model_len": 48,
        "num_gpu_blocks_override": 14,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 9,
        "enable_prefix_caching": False,
    },
}


def random_sequences() -> list[list[int]]:
    """Prompts of the lengths above, each with its continuation."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(2, VOCAB_SIZE, (prompt + new,), generator=generator).tolist()
        for prompt, new in zip(NUM_PROMPT_TOKENS, NUM_NEW_TOKENS, strict=True)
    ]


@pytest.fixture(scope="module", params=TINY)
def case(request):
    """A model, sequences of tokens with prompt lengths, and transformers' logits for them."""
    model, sequences = TINY[request.param](), random_sequences()
    expected = [reference_logits(model, ids, n) for ids, n in zip(sequences, NUM_PROMPT_TOKENS, strict=True)]
    return model, sequences, expected


@pytest.mark.parametrize("setting", SETTINGS)
def test_same_logits_as_transformers(case, setting):
    model, sequences, expected = case
    with LLM(model, attention_backend="torch", **SETTINGS[setting]) as llm:
        run = run_forced(llm, sequences, NUM_PROMPT_TOKENS)
        assert_same_logits(run, expected)
        assert (run.num_preemptions > 0) == setting.startswith("tight")
        llm.engine.scheduler.kv.check()


def test_same_logits_from_the_prefix_cache(case):
    model, sequences, expected = case
    with LLM(model, attention_backend="torch", block_size=4) as llm:
        first = run_forced(llm, sequences, NUM_PROMPT_TOKENS)
        second = run_forced(llm, sequences, NUM_PROMPT_TOKENS)
        assert first.num_cached_tokens == 0 and second.num_cached_tokens == 4 + 32 + 16 + 12
        assert_same_logits(second, expected)


def test_a_request_alone_gets_what_it_gets_in_a_batch(case):
    model, sequences, expected = case
    with LLM(model, attention_backend="torch") as llm:
        for ids, count, logits in zip(sequences, NUM_PROMPT_TOKENS, expected, strict=True):
            assert_same_logits(run_forced(llm, [ids], [count]), [logits])


def test_unwritten_slots_are_poison_proof(case):
    model, sequences, expected = case
    with LLM(model, attention_backend="torch", num_gpu_blocks_override=32) as llm:
        for tensor in llm._built.storage.tensors():  # type: ignore[union-attr]
            tensor.fill_(float("nan"))
        assert_same_logits(run_forced(llm, sequences, NUM_PROMPT_TOKENS), expected)
