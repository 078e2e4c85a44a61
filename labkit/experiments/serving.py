"""Serving speed: the same requests through labkit and through what transformers itself offers, in one run."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from labkit.engine import LLM
from labkit.kv_math import model_shape
from labkit.models import RandomWeights, random_model
from labkit.scheduling import SamplingParams
from labkit.simulation import LengthTable, all_at_once, poisson_arrivals, sample_workload

from .serving_peers import serve_with_continuous_batching, serve_with_generate, serve_with_vllm
from .serving_workload import ServeRequest, fixed_workload, standard_workload, table_workload


@dataclass(frozen=True, slots=True)
class ServeRow:
    """One system's figures for one workload; times in seconds, None where a system cannot tell them.

    ``tokens_per_second`` counts generated tokens over the time from the first arrival to the last token; prefill is
    in it, loading, warm-up and graph capture are not. ``seconds`` is None for a system that is not installed.
    ``kv_pool_bytes`` and ``kv_bytes_per_token`` are those of one of ``tensor_parallel_size`` ranks.
    """

    model: str
    system: str
    workload: str
    kv_format: str
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    seconds: float | None
    tokens_per_second: float | None
    ttft_p50_s: float | None = None
    ttft_p99_s: float | None = None
    itl_p50_s: float | None = None
    itl_p99_s: float | None = None
    peak_kv_cache_usage: float | None = None
    num_preemptions: int | None = None
    tensor_parallel_size: int = 1
    kv_pool_bytes: int | None = None
    kv_bytes_per_token: int | None = None


def bench_serve(
    model: PreTrainedModel | RandomWeights,
    requests: Sequence[ServeRequest],
    *,
    systems: Sequence[str] = ("labkit",),
    model_name: str,
    workload_name: str,
    on_row: Callable[[ServeRow], object] | None = None,
    **llm_options: Any,
) -> list[ServeRow]:
    """Serve ``requests`` with each of ``systems`` (see :data:`SYSTEMS`), one after the other on the same model.

    ``on_row`` is called with each row once it is measured. ``llm_options`` go to labkit's :class:`LLM`. A system that
    is not installed gets a row without figures. Raises ValueError for an unknown system.
    """
    unknown = [name for name in systems if name not in SYSTEMS]
    if unknown:
        raise ValueError(f"systems must be among {', '.join(SYSTEMS)}, got {unknown}")
    size = llm_options.get("tensor_parallel_size", 1)
    if size > 1 and set(systems) != {"labkit"}:
        raise ValueError(f"systems must be labkit alone with tensor_parallel_size={size}, got {', '.join(systems)}")
    rows = []
    for name in systems:
        own = name == "labkit"
        figures = SYSTEMS[name](model, requests, **(llm_options if own else {}))
        num_output = sum(r.num_output_tokens for r in requests)
        kv_format = str(llm_options.get("kv_cache_dtype", "auto")) if own else "auto"
        seconds = figures["seconds"]
        rows.append(
            ServeRow(
                model=model_name,
                system=name,
                workload=workload_name,
                kv_format=str(model.dtype).removeprefix("torch.") if kv_format == "auto" else kv_format,
                num_requests=len(requests),
                num_prompt_tokens=sum(len(r.prompt_token_ids) for r in requests),
                num_output_tokens=num_output,
                tensor_parallel_size=size,
                tokens_per_second=None if seconds is None else num_output / seconds,
                **figures,
            )
        )
        if on_row is not None:
            on_row(rows[-1])
        _free_gpu()
    return rows


def _free_gpu() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def bench_serve_shape(
    shape: str,
    systems: Sequence[str],
    lengths: str | None = None,
    num_requests: int = 256,
    rate: float | None = None,
    max_model_len: int = 1536,
    seed: int = 0,
    **llm_options: Any,
) -> list[ServeRow]:
    """:func:`bench_serve` for random weights of a known shape.

    ``lengths`` names a shipped length table, or is one size for all such as "128x512" (prompt, output), None means
    :func:`standard_workload`; ``rate`` is arrivals a second, None means that all are there at once; ``llm_options`` go
    to labkit's :class:`LLM`, ``on_row`` to :func:`bench_serve`. Ranks of ``tensor_parallel_size`` > 1 make the weights
    themselves.
    """
    sharded = llm_options.get("tensor_parallel_size", 1) > 1
    _free_gpu()  # of what an earlier run left to this process: ranks are others
    model = RandomWeights(shape) if sharded else random_model(shape)
    vocab_size = model_shape(shape).vocab_size
    if lengths is not None and (sizes := re.fullmatch(r"(\d+)x(\d+)", lengths)):
        requests = fixed_workload(vocab_size, num_requests, int(sizes[1]), int(sizes[2]), rate, seed)
        name = f"{lengths}, {num_requests} " + ("at once" if rate is None else f"at {rate:g}/s")
    elif lengths is None and rate is None:
        requests = standard_workload(vocab_size, num_requests)
        name = f"lognormal, {num_requests} at once"
    else:
        times = all_at_once(num_requests) if rate is None else poisson_arrivals(num_requests, rate, seed)
        workload = sample_workload(LengthTable.load(lengths or "azure_conv"), times, seed)
        requests = table_workload(workload, vocab_size, max_model_len, seed)
        name = f"{lengths or 'azure_conv'}, {len(requests)} " + ("at once" if rate is None else f"at {rate:g}/s")
    names = {"model_name": shape, "workload_name": name}
    return bench_serve(model, requests, systems=systems, max_model_len=max_model_len, **names, **llm_options)


def serve_with_labkit(
    model: PreTrainedModel | RandomWeights, requests: Sequence[ServeRequest], **llm_options: Any
) -> dict[str, Any]:
    """Through :class:`LLM`: greedy, lengths forced, requests added when they arrive.

    On a GPU the same requests are served once before, all at once, so that no kernel is compiled in the timed run.
    """
    longest = max(len(r.prompt_token_ids) + r.num_output_tokens for r in requests)
    with LLM(model, **({"max_model_len": longest, "enable_prefix_caching": False} | llm_options)) as llm:
        llm.generate([[1] * min(600, longest - 4)] * 4, _forced(4), use_tqdm=False)  # compiles what prefill needs
        if llm.memory.device.startswith("cuda"):
            run_requests(llm, [replace(request, arrival_time=0.0) for request in requests])
            llm.reset_prefix_cache()
        llm.reset_stats()
        pool = {"kv_pool_bytes": llm.memory.kv_pool, "kv_bytes_per_token": llm.memory.bytes_per_token}
        return run_requests(llm, requests) | pool


def run_requests(llm: LLM, requests: Sequence[ServeRequest]) -> dict[str, Any]:
    """Serve requests to the end, each from the moment that it arrives; the figures of a :class:`ServeRow`."""
    start = time.perf_counter()
    if any(request.arrival_time > 0 for request in requests):
        _feed_in_time(llm, requests, start)
    else:
        params = [_forced(request.num_output_tokens) for request in requests]
        llm.generate([request.prompt_token_ids for request in requests], params, use_tqdm=False)
    seconds = time.perf_counter() - start
    stats = llm.stats
    return {
        "seconds": seconds,
        "ttft_p50_s": stats.time_to_first_token(50),
        "ttft_p99_s": stats.time_to_first_token(99),
        "itl_p50_s": stats.inter_token_latency(50),
        "itl_p99_s": stats.inter_token_latency(99),
        "peak_kv_cache_usage": stats.peak_kv_cache_usage,
        "num_preemptions": stats.num_preemptions,
    }


def _feed_in_time(llm: LLM, requests: Sequence[ServeRequest], start: float) -> None:
    """Add requests as their time comes, in seconds after ``start``, and step until all have ended."""
    upcoming = sorted(enumerate(requests), key=lambda pair: pair[1].arrival_time)[::-1]
    while upcoming or llm.has_unfinished():
        now = time.perf_counter() - start
        while upcoming and upcoming[-1][1].arrival_time <= now:
            number, request = upcoming.pop()
            llm.add_request(f"request-{number}", request.prompt_token_ids, _forced(request.num_output_tokens))
        if llm.has_unfinished():
            llm.step()
        elif upcoming:
            time.sleep(max(0.0, upcoming[-1][1].arrival_time - now))


def _forced(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


SYSTEMS: dict[str, Callable[..., dict[str, Any]]] = {
    "labkit": serve_with_labkit,
    "transformers-generate": serve_with_generate,
    "transformers-cb": serve_with_continuous_batching,
    "vllm": serve_with_vllm,
}
"""What can serve, by the name that stands in the table."""
