"""What an engine's step is made of, and what its features buy: prefix sharing, swapping, KV formats, starting."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import PreTrainedModel

from labkit.engine import LLM
from labkit.scheduling import PreemptionCost, SamplingParams

from .serving import run_requests
from .serving_workload import ServeRequest

Row = dict[str, Any]


def greedy(num_tokens: int) -> SamplingParams:
    """Forced length, likeliest tokens."""
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def decode_breakdown(
    llm: LLM, batch_sizes: Sequence[int], context: int, bytes_per_second: float | None = None
) -> list[Row]:
    """Milliseconds of a decode step, by part, at a context of about ``context`` tokens: medians over 40 steps.

    ``schedule``, ``submit`` (staging and launching), ``update`` and ``rest`` (records, outputs) are host work that
    runs while the device computes; ``wait`` is what the host then still waits for the device. ``step_over_floor``
    compares with reading weights and KV once at ``bytes_per_second``.
    """
    rows = []
    for batch_size in batch_sizes:
        times = _timed_steps(llm, batch_size, context)[8:-4]
        step = median(sum(parts.values()) for parts in times)
        row: Row = {"op": "decode step", "batch": batch_size, "context": context, "step_ms": 1e3 * step}
        row |= {f"{name}_ms": 1e3 * median(parts[name] for parts in times) for name in times[0]}
        if bytes_per_second is not None:
            num_bytes = llm.memory.weights + batch_size * context * llm.memory.bytes_per_token
            row["step_over_floor"] = step * bytes_per_second / num_bytes
        rows.append(row)
    return rows


def graph_gaps(llm: LLM, batch_size: int, context: int) -> Row:
    """Milliseconds of a decode step in which no graph runs, by the GPU's own clock: medians over the steady steps.

    From the end of one replay to the start of the next the GPU samples, copies tokens out and inputs in, and waits
    for the host if that is late.
    """
    replay = torch.cuda.CUDAGraph.replay
    replays: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def timed(graph: torch.cuda.CUDAGraph) -> None:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        replay(graph)
        end.record()
        replays.append((start, end))

    with mock.patch.object(torch.cuda.CUDAGraph, "replay", timed):
        _timed_steps(llm, batch_size, context)
    torch.cuda.synchronize()
    steady = list(pairwise(replays[8:-4]))
    step = median(start.elapsed_time(next_start) for (start, _), (next_start, _) in steady)
    gap = median(end.elapsed_time(next_start) for (_, end), (next_start, _) in steady)
    row = {"op": "gap between graphs", "batch": batch_size, "context": context}
    return row | {"step_ms": step, "gap_ms": gap, "gap_share": gap / step}


def prefix_sharing(
    model: PreTrainedModel, *, num_requests: int = 64, shared: int = 1500, own: int = 32, num_output_tokens: int = 16
) -> list[Row]:
    """A system prompt of ``shared`` tokens before each of ``num_requests`` prompts, prefix caching off and on.

    The system prompt is in the cache when the clock starts, as it is in a server's daily work.
    """
    rng = np.random.default_rng(0)
    system = rng.integers(10, model.config.vocab_size, shared).tolist()
    prompts = [system + rng.integers(10, model.config.vocab_size, own).tolist() for _ in range(num_requests)]
    rows = []
    for caching in (False, True):
        with LLM(model, max_model_len=shared + own + num_output_tokens, enable_prefix_caching=caching) as llm:
            llm.generate([[*system, 1]], greedy(2), use_tqdm=False)
            llm.reset_stats()
            llm.generate(prompts, greedy(num_output_tokens), use_tqdm=False)
            rows.append(
                {
                    "op": "prefix sharing",
                    "prefix_caching": caching,
                    "num_requests": num_requests,
                    "shared_tokens": shared,
                    "ttft_p50_s": llm.stats.time_to_first_token(50),
                    "hit_rate": llm.stats.prefix_cache_hit_rate,
                }
            )
    return rows


def prefix_caching_cost(model: PreTrainedModel, requests: Sequence[ServeRequest], **options: Any) -> list[Row]:
    """Tokens/s with prefix caching off and on when nothing is shared; the better of two runs each."""
    rows = []
    for caching in (False, True):
        with LLM(model, enable_prefix_caching=caching, **options) as llm:
            rates = []
            for run in range(2):
                llm.reset_prefix_cache()
                llm.reset_stats()
                fresh = [replace(r, prompt_token_ids=[t ^ run for t in r.prompt_token_ids]) for r in requests]
                rates.append(sum(r.num_output_tokens for r in requests) / run_requests(llm, fresh)["seconds"])
            rows.append(
                {"op": "prefix caching, nothing shared", "prefix_caching": caching, "tokens_per_second": max(rates)}
            )
    return rows


def swap_against_recompute(
    model: PreTrainedModel, requests: Sequence[ServeRequest], *, swap_space: float, share: float = 0.5, **options: Any
) -> list[Row]:
    """Tokens/s on a pool of ``share`` of the blocks that the requests need at their peak, by the way of preemption.

    Always by recompute, by swap wherever there is room, and by whichever the costs measured here prefer.
    """
    with LLM(model, enable_prefix_caching=False, **options) as llm:
        run_requests(llm, requests)
        blocks = round(llm.stats.peak_kv_cache_usage * llm.memory.num_blocks * share)
    rows = []
    for by, space in (("recompute", 0.0), ("swap", swap_space), ("measured cost", swap_space)):
        small = options | {"num_gpu_blocks_override": blocks, "swap_space": space}
        with LLM(model, enable_prefix_caching=False, **small) as llm:
            measured = llm.engine.scheduler.preemption_cost
            if by == "swap":
                llm.engine.scheduler.preemption_cost = PreemptionCost()
            figures = run_requests(llm, requests)
            row: Row = {
                "op": "preemption",
                "by": by,
                "num_blocks": blocks,
                "tokens_per_second": sum(r.num_output_tokens for r in requests) / figures["seconds"],
                "num_preemptions": figures["num_preemptions"],
                "num_swaps": llm.stats.num_swaps,
            }
            if by == "measured cost":
                row["ms_per_swapped_block"] = 1e3 * measured.seconds_per_swapped_block
                row["ms_per_computed_token"] = 1e3 * measured.seconds_per_computed_token
            rows.append(row)
    return rows


def start_time(model: PreTrainedModel, **options: Any) -> Row:
    """Seconds from a loaded model to its first token: sizing, kernels, graphs, one request."""
    start = time.perf_counter()
    with LLM(model, **options) as llm:
        ready = time.perf_counter()
        llm.generate([[1] * 100], greedy(1), use_tqdm=False)
        return {"op": "start", "ready_s": ready - start, "first_token_s": time.perf_counter() - start}


def _timed_steps(llm: LLM, batch_size: int, context: int) -> list[dict[str, float]]:
    """Seconds by part of the decode steps of ``batch_size`` requests around ``context`` tokens."""
    num_steps = 52
    for i in range(batch_size):
        llm.add_request(f"timed-{i}", [5 + i % 3] * max(1, context - num_steps // 2), greedy(num_steps))
    parts: dict[str, float] = {}
    watched = (
        (llm.engine.scheduler, "schedule", "schedule"),
        (llm.engine.executor, "submit", "submit"),
        (llm.engine.executor, "collect", "wait"),
        (llm.engine.scheduler, "update", "update"),
    )
    times = []
    with _timers(watched, parts):
        while llm.has_unfinished():
            parts.update({name: 0.0 for _, _, name in watched})
            start = time.perf_counter()
            llm.step()
            step = time.perf_counter() - start
            times.append(dict(parts) | {"rest": step - sum(parts.values())})
    return times[-num_steps:]


@contextmanager
def _timers(watched: Sequence[tuple[object, str, str]], parts: dict[str, float]) -> Iterator[None]:
    """Add the time of each call of ``owner.method`` to ``parts[name]`` for every (owner, method, name)."""

    def timed(call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args)
            finally:
                parts[name] += time.perf_counter() - start

        return run

    for owner, method, name in watched:
        setattr(owner, method, timed(getattr(owner, method), name))
    try:
        yield
    finally:
        for owner, method, _ in watched:
            delattr(owner, method)
