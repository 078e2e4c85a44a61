"""What would it serve? A workload through the real scheduler and allocator, on a simulated H200."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from labkit.core import Engine
from labkit.kv_math import model_shape, plan_capacity
from labkit.memory import KVCacheManager
from labkit.scheduling import Scheduler, SchedulerConfig
from labkit.simulation import (
    LengthTable,
    Workload,
    calibrate,
    gamma_arrivals,
    make_requests,
    read_trace,
    recorded_rows,
    sample_workload,
    simulate,
)


def simulated_serving(
    *,
    workload: str = "azure_conv",
    num_requests: int | None = None,
    speed_up: float = 1.0,
    model: str = "mistral-7b",
    kv_dtype: str = "auto",
    block_size: int = 16,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 8192,
    gpu_memory_utilization: float = 0.9,
    enable_prefix_caching: bool | None = None,
    seed: int = 0,
    progress: bool = False,
) -> dict[str, Any]:
    """Serve ``workload`` with a model's shape and the pool that :func:`plan_capacity` gives it on an H200.

    Args:
        workload: a trace file, or a shipped length table, from which requests are then drawn.
        num_requests: the first so many; all that the trace has if None.
        speed_up: arrivals come so many times as fast.
        kv_dtype: bytes of the cache; arithmetic time stays that of 16 bit.
        enable_prefix_caching: None means where the trace says what prompts share; others are random.

    Requests longer than the model's context or its pool are left out and counted in ``num_too_long``. Times are
    simulated seconds, except ``took_s`` and ``took_cpu_s``: what the simulation itself took, and of that on its one
    core. Raises ValueError for a workload that is neither file nor table, or of whose requests none fits, for
    ``num_requests`` < 1 and for ``speed_up`` <= 0.
    """
    if speed_up <= 0:
        raise ValueError(f"speed_up must be > 0, got {speed_up}")
    if num_requests is not None and num_requests < 1:
        raise ValueError(f"num_requests must be >= 1, or None for all, got {num_requests}")
    began, cpu_began = time.perf_counter(), time.process_time()
    arriving = load_workload(workload, num_requests, seed)
    shape = model_shape(model)
    plan = plan_capacity(
        "h200",
        shape,
        kv_dtype=kv_dtype,
        block_size=block_size,
        gpu_memory_utilization=gpu_memory_utilization,
    )
    max_model_len = min(shape.max_model_len, plan.num_tokens)
    fitting = arriving.fitting(max_model_len)
    if not len(fitting):
        raise ValueError(f"workload must have requests of at most {max_model_len} tokens, and {workload!r} has none")
    served = Workload(
        fitting.arrival_times / speed_up, fitting.num_prompt_tokens, fitting.num_output_tokens, fitting.hash_ids
    )
    config = SchedulerConfig(max_num_seqs, max_num_batched_tokens, max_model_len)
    if enable_prefix_caching is None:
        enable_prefix_caching = served.hash_ids is not None
    kv = KVCacheManager(plan.num_blocks, block_size, enable_prefix_caching=enable_prefix_caching)
    executor = calibrate(recorded_rows()).executor(shape, plan.spec)
    with tqdm(total=len(served), desc="Requests", unit="req", disable=not progress) as bar:

        def show(engine: Engine) -> None:
            if ended := sum(engine.stats.num_finished.values()) - bar.n:
                bar.update(ended)

        requests = make_requests(served, shape.vocab_size, seed)
        stats = simulate(requests, Scheduler(config, kv), executor, on_step=show).stats
    return {
        "num_requests": len(served),
        "num_too_long": len(arriving) - len(served),
        "num_steps": stats.num_steps,
        "num_generated_tokens": stats.num_generated_tokens,
        "seconds": executor.now(),
        "tokens_per_busy_second": stats.tokens_per_second,
        "ttft_p50_s": stats.time_to_first_token(50),
        "ttft_p99_s": stats.time_to_first_token(99),
        "itl_p50_s": stats.inter_token_latency(50),
        "itl_p99_s": stats.inter_token_latency(99),
        "num_blocks": plan.num_blocks,
        "peak_kv_cache_usage": stats.peak_kv_cache_usage,
        "num_preemptions": stats.num_preemptions,
        "prefix_cache_hit_rate": stats.prefix_cache_hit_rate,
        "took_s": time.perf_counter() - began,
        "took_cpu_s": time.process_time() - cpu_began,
    }


def load_workload(name: str, num_requests: int | None = None, seed: int = 0) -> Workload:
    """The requests of a trace file, or drawn from a length table with its rate and burstiness of arrivals."""
    if name not in LengthTable.names():
        if not Path(name).is_file():
            raise ValueError(f"workload must be a trace file or one of {', '.join(LengthTable.names())}, got {name!r}")
        trace = read_trace(name)
        return trace if num_requests is None else trace.first(num_requests)
    table = LengthTable.load(name)
    count = table.num_requests if num_requests is None else num_requests
    arrivals = table.arrivals or {"rate": 1.0, "cv": 1.0}
    return sample_workload(table, gamma_arrivals(count, arrivals["rate"], arrivals["cv"], seed), seed)
