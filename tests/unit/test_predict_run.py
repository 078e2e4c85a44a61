"""Predicting a run: the same decisions as the engine makes, and a fit that never charges a negative time."""

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from labkit import LLM, SamplingParams
from labkit.experiments.predict_run import FittedStep, _non_negative_fit, fit_steps, occupancy, predicted_trace


def test_the_fit_finds_constants_and_leaves_negative_ones_out():
    rng = np.random.default_rng(0)
    terms = np.column_stack([np.ones(50), rng.integers(1, 100, 50), rng.integers(1, 1000, 50)])
    assert np.allclose(_non_negative_fit(terms, terms @ [0.01, 0.002, 1e-5]), [0.01, 0.002, 1e-5])
    fitted = _non_negative_fit(terms, np.maximum(terms @ [0.01, 0.002, -2e-5], 1e-3))
    assert min(fitted) >= 0


def test_a_predicted_run_decides_as_the_engine_does():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, head_dim=16
    )
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, 60, int(n)).tolist() for n in rng.integers(3, 40, 8)]
    params = [SamplingParams(temperature=0, max_tokens=int(n), ignore_eos=True) for n in rng.integers(3, 20, 8)]
    with LLM(LlamaForCausalLM(config).eval(), max_model_len=160, num_gpu_blocks_override=14, max_num_seqs=5) as llm:
        cost = fit_steps(llm)
        assert isinstance(cost, FittedStep) and cost.per_step + cost.per_token > 0
        predicted = predicted_trace(llm, cost, prompts, params)
        llm.generate(prompts, params, use_tqdm=False)
        assert llm.trace is not None
        assert [s.num_scheduled_tokens for s in predicted] == [s.num_scheduled_tokens for s in llm.trace]
        table = occupancy(llm.trace, "measured")
        assert max(table["live tokens"]) > 0 and list(table["seconds"]) == sorted(table["seconds"])
