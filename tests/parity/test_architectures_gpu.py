"""Contract 3 on a GPU: kernels, fused layers and CUDA graphs give transformers' logits, whatever pool and chunks."""

from __future__ import annotations

from typing import Any

import pytest

import labkit.engine  # noqa: F401 (registers the attention before models are made)
from labkit.engine import LLM
from labkit.scheduling import PreemptionCost

from .forcing import assert_same_logits, reference_logits, run_forced
from .test_architectures import NUM_PROMPT_TOKENS, random_sequences
from .tiny_models import TINY

pytestmark = pytest.mark.gpu

SETTINGS: dict[str, dict[str, Any]] = {
    "graphs": {"max_num_seqs": 8},
    "eager": {"max_num_seqs": 8, "enforce_eager": True},
    "chunks, tight pool, swap": {
        "block_size": 4,
        "max_model_len": 48,
        "num_gpu_blocks_override": 14,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 9,
        "swap_space": 0.01,
    },
}


@pytest.fixture(scope="module", params=TINY)
def case(request):
    """A model on the GPU, sequences of tokens, and transformers' logits for them there."""
    model = TINY[request.param]().cuda()
    sequences = random_sequences()
    expected = [reference_logits(model, ids, n) for ids, n in zip(sequences, NUM_PROMPT_TOKENS, strict=True)]
    return model, sequences, expected


READ_ON_THE_HOST = {"gpt_oss", "deepseek_v3", "gemma3n", "gemma3n_text"}
"""Their forward passes read something on the host, so no CUDA graph holds them: the engine runs them without."""


@pytest.mark.parametrize("setting", SETTINGS)
def test_same_logits_as_transformers(case, setting):
    model, sequences, expected = case
    with LLM(model, **({"max_model_len": 64, "num_gpu_blocks_override": 64} | SETTINGS[setting])) as llm:
        assert llm.attention_backend == "triton"
        captures = "enforce_eager" not in SETTINGS[setting] and model.config.model_type not in READ_ON_THE_HOST
        executor: Any = llm.engine.executor
        assert (executor.graphs is not None) == captures
        llm.engine.scheduler.preemption_cost = PreemptionCost()  # always swap if there is room
        assert_same_logits(run_forced(llm, sequences, NUM_PROMPT_TOKENS), expected)
        assert (llm.stats.num_swaps > 0) == ("swap" in setting)
        llm.engine.scheduler.kv.check()
