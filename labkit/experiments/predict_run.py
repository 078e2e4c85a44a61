"""Predict a run on this machine before making it: a step's time fitted to a short warm-up, then the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from labkit.engine import LLM
from labkit.memory import KVCacheManager
from labkit.observe import BlockTableState, Trace
from labkit.scheduling import Request, SamplingParams, Scheduler, StepPlan
from labkit.simulation import SimulatedExecutor, simulate


@dataclass(frozen=True, slots=True)
class FittedStep:
    """Seconds of a step: ``per_step`` + ``per_token`` x its tokens + ``per_context`` x context tokens it reads."""

    per_step: float
    per_token: float
    per_context: float

    def __call__(self, plan: StepPlan) -> float:
        """Seconds for one step."""
        context = sum(first + count for _, first, count, _, _ in plan.requests)
        return self.per_step + self.per_token * plan.num_scheduled_tokens + self.per_context * context

    def __str__(self) -> str:
        ns = 1e9 * self.per_context
        context = "too little to see for" if ns == 0 else f"{ns:.1f} ns" if ns < 1000 else f"{ns / 1000:.1f} µs"
        return (
            f"{1e3 * self.per_step:.2f} ms a step + {1e3 * self.per_token:.3f} ms a token + {context} a context token"
        )


def fit_steps(llm: LLM) -> FittedStep:
    """Run a few batches of prompts on an idle engine and fit :class:`FittedStep` to their steps (non-negative)."""
    rng = np.random.default_rng(0)
    rows, seconds = [], []
    for batch_size, length in ((1, 16), (4, 32), (8, 48), (2, 96)):
        for max_tokens in (1, 8):  # the first run compiles and warms up what the second is timed with
            llm.engine.restart_records()
            prompts = rng.integers(10, llm.model.config.vocab_size, (batch_size, length)).tolist()
            params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
            llm.generate(prompts, params, use_tqdm=False)
        context, trace = 0, list(llm.trace or ())
        ends = [trace[0].start, *(step.end for step in trace)]
        for number, step in enumerate(trace[:-1]):
            tokens = sum(step.num_scheduled_tokens)
            context += tokens
            rows.append((1.0, tokens, context))
            seconds.append(ends[number + 1] - ends[number])
    llm.engine.restart_records()
    llm.reset_prefix_cache()
    return FittedStep(*_non_negative_fit(np.array(rows), np.array(seconds)))


def predicted_trace(
    llm: LLM, cost: FittedStep, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> Trace:
    """The run that ``llm.generate(prompts, params)`` would be, all requests there at once, on a simulated clock.

    Scheduler limits, pool and how far it schedules ahead are those of ``llm``; lengths must be forced (``ignore_eos``).
    """
    memory, config = llm.memory, llm.engine.scheduler.config
    kv = KVCacheManager(memory.num_blocks, memory.block_size)
    trace = Trace(memory.num_blocks, memory.block_size)
    requests = [Request(str(i), prompt, one) for i, (prompt, one) in enumerate(zip(prompts, params, strict=True))]
    simulate(requests, Scheduler(config, kv), SimulatedExecutor(cost, depth=llm.engine.executor.depth), trace=trace)
    return trace


def step_ms(trace: Trace) -> np.ndarray:
    """Milliseconds of each step: from the end of the one before, of the first from its start, to its own end."""
    return 1e3 * np.diff([trace.steps[0].start, *(step.end for step in trace)])


def residual(predicted: Trace, measured: Trace, depth: int) -> pd.DataFrame:
    """Predicted and measured milliseconds by kind of step, over the steps that both traces have; kinds as measured.

    With ``depth`` 2 prompts are launched while the step before them runs, so that step counts with theirs.
    """
    both = list(measured)[: len(predicted)]
    prompts = np.array([max(step.num_scheduled_tokens, default=0) > 1 for step in both])
    near = prompts | np.append(prompts[1:], False) if depth > 1 else prompts
    first = np.arange(len(near)) == 0
    later = "later ones with prompts" + (", each with the one before" if depth > 1 else "")
    tokens = np.array([sum(step.num_scheduled_tokens) for step in both])
    times = {"predicted, ms": step_ms(predicted)[: len(both)], "measured, ms": step_ms(measured)[: len(both)]}
    kinds = {"the first": first, later: near & ~first, "only decodes": ~near & ~first}
    return pd.DataFrame(
        {"steps": kind, "number": chosen.sum(), "tokens": tokens[chosen].sum()}
        | {name: ms[chosen].sum() for name, ms in times.items()}
        for kind, chosen in kinds.items()
    )


def occupancy(trace: Trace, name: str) -> pd.DataFrame:
    """Live tokens and running requests after each step, against seconds since the first: columns for a figure."""
    state, rows = BlockTableState(trace.num_blocks, trace.block_size), []
    begin = trace.steps[0].start
    for step in trace:
        state.apply(step)
        rows.append((name, step.end - begin, state.num_live_tokens, step.num_running))
    return pd.DataFrame(rows, columns=["run", "seconds", "live tokens", "running"])


def _non_negative_fit(terms: np.ndarray, seconds: np.ndarray) -> list[float]:
    """Least squares of relative errors without negative constants: terms that would be negative are left out."""
    weighted, kept = terms / seconds[:, None], list(range(terms.shape[1]))
    while True:
        solution = np.linalg.lstsq(weighted[:, kept], np.ones(len(seconds)), rcond=None)[0]
        if (solution >= 0).all():
            constants = [0.0] * terms.shape[1]
            for index, value in zip(kept, solution, strict=True):
                constants[index] = float(value)
            return constants
        kept.pop(int(solution.argmin()))
