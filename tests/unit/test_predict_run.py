"""Predicting a run: the same decisions as the engine makes, and a fit that never charges a negative time."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from labkit import LLM, SamplingParams
from labkit.experiments.predict_run import (
    FittedStep,
    _non_negative_fit,
    fit_steps,
    occupancy,
    predicted_trace,
    residual,
    step_ms,
)
from labkit.observe import StepRecord, Trace


def test_the_fit_finds_constants_and_leaves_negative_ones_out():
    rng = np.random.default_rng(0)
    terms = np.column_stack([np.ones(50), rng.integers(1, 100, 50), rng.integers(1, 1000, 50)])
    assert np.allclose(_non_negative_fit(terms, terms @ [0.01, 0.002, 1e-5]), [0.01, 0.002, 1e-5])
    fitted = _non_negative_fit(terms, np.maximum(terms @ [0.01, 0.002, -2e-5], 1e-3))
    assert min(fitted) >= 0


def test_what_is_left_is_told_apart_by_kind_of_step():
    def trace(*ms):
        steps, start = Trace(8, 16), 0.0
        for number, (length, tokens) in enumerate(zip(ms, ([40], [1], [1], [1, 30], [1, 1]), strict=True)):
            ids = ("a", "b")[: len(tokens)]
            end = start + length / 1e3
            steps.record(StepRecord(number, start, end, ids, tuple(tokens), (), 0, 0, 0, ()))
            start = end
        return steps

    predicted, measured = trace(5, 1, 1, 3, 1), trace(4, 1, 12, 1, 1)
    kinds = residual(predicted, measured, depth=2)
    assert list(kinds.number) == [1, 2, 2] and list(kinds.tokens) == [40, 32, 3]
    assert np.allclose(kinds["predicted, ms"], [5, 4, 2]) and np.allclose(kinds["measured, ms"], [4, 13, 2])
    assert np.allclose(residual(predicted, measured, depth=1)["measured, ms"], [4, 1, 14])


def test_a_constant_of_nanoseconds_is_readable():
    assert str(FittedStep(1e-3, 2e-6, 5.2e-9)) == "1.00 ms a step + 0.002 ms a token + 5.2 ns a context token"
    assert str(FittedStep(1e-3, 2e-6, 1.6577e-4)).endswith("+ 165.8 µs a context token")
    assert str(FittedStep(1e-3, 2e-6, 0)).endswith("+ too little to see for a context token")


@pytest.mark.parametrize("depth", [1, 2])
def test_a_predicted_run_decides_as_the_engine_does(depth):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, head_dim=16
    )
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, 60, int(n)).tolist() for n in rng.integers(3, 40, 8)]
    params = [SamplingParams(temperature=0, max_tokens=int(n), ignore_eos=True) for n in rng.integers(3, 20, 8)]
    with LLM(LlamaForCausalLM(config).eval(), max_model_len=160, num_gpu_blocks_override=14, max_num_seqs=5) as llm:
        llm.engine.executor.depth = depth
        cost = fit_steps(llm)
        assert isinstance(cost, FittedStep) and cost.per_step + cost.per_token > 0
        predicted = predicted_trace(llm, cost, prompts, params)
        llm.generate(prompts, params, use_tqdm=False)
        assert llm.trace is not None
        assert [s.num_scheduled_tokens for s in predicted] == [s.num_scheduled_tokens for s in llm.trace]
        table = occupancy(llm.trace, "measured")
        kinds = residual(predicted, llm.trace, depth)
        assert sum(kinds["number"]) == len(llm.trace)
        assert sum(kinds["measured, ms"]) == pytest.approx(sum(step_ms(llm.trace)))
        assert max(table["live tokens"]) > 0 and list(table["seconds"]) == sorted(table["seconds"])
