"""Speed of the control plane, without a model: blocks a second, and the time to schedule a step.

    make bench            # or: pytest tests/benchmarks/bench_control_plane.py --benchmark-json=FILE

One round of the block benchmarks is 4,096 pairs of allocate and free, so pairs/s = 4,096 / time.
"""

import pytest

from labkit.core import Engine
from labkit.memory import BlockPool, KVCacheManager
from labkit.observe import Trace
from labkit.scheduling import Request, SamplingParams, Scheduler, SchedulerConfig
from labkit.simulation import SimulatedExecutor

PAIRS = 4096


@pytest.mark.parametrize("blocks_per_call", [1, 16])
def bench_block_pool_allocate_and_free(benchmark, blocks_per_call: int):
    pool = BlockPool(10_000)
    calls = range(PAIRS // blocks_per_call)

    def work():
        for _ in calls:
            pool.free(pool.allocate(blocks_per_call))

    benchmark.extra_info["pairs"] = PAIRS
    benchmark(work)


@pytest.mark.parametrize("traced", [False, True], ids=["untraced", "traced"])
def bench_manager_admit_and_free(benchmark, traced: bool):
    """A sequence of 64 blocks comes and goes: tables, counts and, if traced, events."""
    kv = KVCacheManager(10_000, 16)
    kv.events = [] if traced else None

    def work():
        for _ in range(PAIRS // 64):
            kv.admit("a", 1024)
            kv.free("a")
        if kv.events:
            kv.events.clear()

    benchmark.extra_info["pairs"] = PAIRS
    benchmark(work)


@pytest.mark.parametrize("num_blocks", [1_000, 10_000, 100_000, 1_000_000])
def bench_schedule_256_running(benchmark, num_blocks: int):
    """One ``schedule()`` with 256 decoding requests, which grow by a block every 16 steps."""
    kv = KVCacheManager(num_blocks, 16)
    limit = min(4096, num_blocks * 16)
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=256, max_model_len=limit), kv)
    executor = SimulatedExecutor()
    for i in range(256):
        scheduler.add(Request(f"r{i}", [i] * 8, SamplingParams(max_tokens=None, ignore_eos=True)))

    def finish_last_plan():
        plan = plans.pop()
        executor.submit(plan)
        scheduler.update(plan, executor.collect())

    plans = [scheduler.schedule()]

    def schedule():
        plans.append(scheduler.schedule())

    rounds = 32  # 256 requests of 8 + 32 tokens are 768 blocks: even the smallest pool never preempts
    benchmark.pedantic(schedule, setup=finish_last_plan, rounds=rounds)
    assert len(scheduler.running) == 256


@pytest.mark.parametrize("traced", [False, True], ids=["untraced", "traced"])
def bench_engine_step_256_running(benchmark, traced: bool):
    """A whole step with 256 decoding requests: schedule, a model that costs nothing, update, record."""
    kv = KVCacheManager(100_000, 16)
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=256), kv)
    engine = Engine(scheduler, SimulatedExecutor(), Trace(kv.num_blocks, 16) if traced else None)
    for i in range(256):
        engine.add_request(Request(f"r{i}", [i] * 8, SamplingParams(max_tokens=None, ignore_eos=True)))
    engine.step()
    benchmark.pedantic(engine.step, rounds=200)
    assert len(scheduler.running) == 256
