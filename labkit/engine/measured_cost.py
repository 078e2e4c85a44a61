"""What swapping and recomputing cost on this device, so that the scheduler can choose between them."""

from __future__ import annotations

import time

from labkit.scheduling import PreemptionCost, Request, SamplingParams, ScheduledRequest, StepPlan

from .host_blocks import HostBlocks
from .model_executor import ModelExecutor

MAX_BLOCKS = 256
MAX_TOKENS = 1024
REPEATS = 2


def measure_preemption_cost(executor: ModelExecutor, host: HostBlocks, max_num_tokens: int) -> PreemptionCost:
    """Run steps that move blocks out and in, and one that computes a prompt of up to ``max_num_tokens`` tokens.

    Tokens that are computed anew ride along with those that decode: a step that reads the weights is due anyway, so
    the time of a step of one token is not theirs.

    To be called before the first request: it overwrites blocks of the pool.
    """
    storage = host.storage
    num_blocks = min(MAX_BLOCKS, storage.num_blocks, host.num_blocks)
    pairs = tuple((i, i) for i in range(num_blocks))
    num_tokens = min(MAX_TOKENS, max_num_tokens, storage.num_blocks * storage.block_size)
    request = Request("measured", [0] * num_tokens, SamplingParams(temperature=0))
    prompt = ScheduledRequest(request, 0, num_tokens, range(-(-num_tokens // storage.block_size)), 1)
    moving = _seconds(executor, StepPlan(0, (), swap_outs=pairs)) + _seconds(executor, StepPlan(0, (), swap_ins=pairs))
    decoding = _seconds(executor, StepPlan(0, (ScheduledRequest(request, 0, 1, range(1), 1),)))
    computing = max(0.0, _seconds(executor, StepPlan(0, (prompt,))) - decoding)
    executor.submit(StepPlan(0, (), ended_ids=(request.request_id,)))
    executor.reset()
    return PreemptionCost(moving / (2 * num_blocks), computing / num_tokens)


def _seconds(executor: ModelExecutor, plan: StepPlan) -> float:
    """The shortest of a few runs; the first may have kernels to compile."""
    times = []
    for _ in range(1 + REPEATS):
        start = time.perf_counter()
        executor.submit(plan)
        executor.collect()
        times.append(time.perf_counter() - start)
    return min(times)
