"""Decode tokens/s of the embedded model on 2 CPU cores, batch of 8, greedy: labkit beside transformers.generate.

    python tests/benchmarks/bench_generate.py [--dtype float32] [--new-tokens 64] [--rounds 5]

Both run in turn in the same process on the same prompts; of each the median round counts. A decode step is timed
from one token to the next, host work included; the prompts' own step is left out on both sides.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList

from labkit.engine import LLM
from labkit.models import load_model
from labkit.scheduling import SamplingParams

PROMPTS = [
    "The history of the Roman Empire begins with",
    "Once upon a time, in a village by the sea, there lived an old fisherman who",
    "A list of ten things to do on a rainy day: first,",
    "The most important idea in statistics is",
    "Dear Sir or Madam, I am writing to you because",
    "In the year 2050 the cities of Europe will",
    "To bake good bread you need flour, water, salt and",
    "The theory of evolution explains how",
]


class _Clock(StoppingCriteria):
    """Notes the time of every token that transformers.generate chooses; never stops it."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def transformers_seconds(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, new_tokens: int) -> float:
    """Seconds of all decode steps of one call."""
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True, padding_side="left")
    clock = _Clock()
    model.generate(
        **inputs,
        do_sample=False,
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        stopping_criteria=StoppingCriteriaList([clock]),
    )
    return clock.times[-1] - clock.times[0]


def labkit_seconds(llm: LLM, new_tokens: int) -> float:
    """The same for labkit, from its trace."""
    assert llm.trace is not None
    first = len(llm.trace)
    llm.reset_prefix_cache()
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    llm.generate(PROMPTS, params, use_tqdm=False)
    steps = llm.trace.steps[first:]
    assert len(steps) == new_tokens and all(len(step.sampled_ids) == len(PROMPTS) for step in steps)
    return steps[-1].end - steps[0].end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(2)
    model, tokenizer = load_model(dtype=args.dtype, device="cpu")
    seconds: dict[str, list[float]] = {"transformers": [], "labkit": []}
    for _ in range(args.rounds):
        seconds["transformers"].append(transformers_seconds(model, tokenizer, args.new_tokens))
        with LLM(model, tokenizer=tokenizer, max_num_seqs=8, max_model_len=1024) as llm:
            seconds["labkit"].append(labkit_seconds(llm, args.new_tokens))
    num_tokens = len(PROMPTS) * (args.new_tokens - 1)
    rates = {name: num_tokens / statistics.median(times) for name, times in seconds.items()}
    for name, rate in rates.items():
        rounds = ", ".join(f"{num_tokens / t:.1f}" for t in seconds[name])
        print(f"{name:<14}{rate:8.1f} tokens/s   (rounds: {rounds})")
    ratio = rates["labkit"] / rates["transformers"]
    print(f"{'ratio':<14}{ratio:8.2f} x   {args.dtype}, batch of {len(PROMPTS)}, 2 threads")


if __name__ == "__main__":
    main()
