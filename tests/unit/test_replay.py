"""A trace played back agrees with the allocator that wrote it, after every record."""

from __future__ import annotations

import random

import pytest

from labkit.core import Engine
from labkit.memory import (
    ContiguousKVManager,
    KVCacheManager,
    reserve_max,
    reserve_nothing,
    reserve_oracle,
    reserve_power_of_two,
)
from labkit.observe import (
    BlockCopied,
    BlocksAllocated,
    BlocksCached,
    BlocksFreed,
    BlocksShared,
    BlockTableState,
    BlockView,
    StepRecord,
    Trace,
)
from labkit.observe.replay import FREE_BLOCK
from labkit.scheduling import Request, SamplingParams, Scheduler, SchedulerConfig, StaticScheduler
from labkit.simulation import SimulatedExecutor


def record(*before, scheduled=None, after=()) -> StepRecord:
    scheduled = scheduled or {}
    return StepRecord(
        0, 0.0, 1.0, tuple(scheduled), tuple(scheduled.values()), (), 1, 0, len(before), (*before, *after)
    )


def random_request(rng: random.Random, number: int, max_n: int) -> Request:
    length = min(60, int(rng.expovariate(1 / 12)) + 1)
    shared = rng.random() < 0.5
    prompt = [i if shared else rng.randrange(1000) for i in range(length)]
    params = SamplingParams(n=rng.randint(1, max_n), max_tokens=rng.randint(1, 30), ignore_eos=True)
    return Request(f"r{number}", prompt, params)


def run(engine: Engine, rng: random.Random, num_requests: int, max_n: int, after_step) -> None:
    """Random arrivals and aborts until ``num_requests`` have come and ended."""
    num_added = 0
    while num_added < num_requests or engine.has_unfinished:
        while num_added < num_requests and rng.random() < 0.5:
            engine.add_request(random_request(rng, num_added, max_n))
            num_added += 1
        engine.step()
        if engine.has_unfinished and rng.random() < 0.03:
            engine.abort(rng.choice(engine.scheduler.running + engine.scheduler.waiting).request_id)
        if engine.has_unfinished and rng.random() < 0.01:
            engine.scheduler.kv.reset_prefix_cache()
        after_step()


def agree(state: BlockTableState, kv) -> None:
    usage = kv.usage()
    assert state.num_referenced_blocks == usage.num_referenced_blocks
    assert state.num_cached_free_blocks == usage.num_cached_free_blocks
    assert state.num_free_blocks == usage.num_free_blocks
    assert state.num_live_tokens == usage.num_live_tokens
    assert state.num_fragmented_slots == usage.num_fragmented_slots
    for request_id, table in state.block_tables.items():
        assert table == kv.block_table(request_id)
    for block_id in range(kv.num_blocks):
        in_tables = [name for name, table in state.block_tables.items() if block_id in table]
        assert sorted(state.holders(block_id)) == sorted(in_tables)
        view = state.block(block_id)
        assert view.ref_cnt == len(in_tables)
        if in_tables:
            assert state.block_tables[view.request_id][view.logical_index] == block_id


def views(state: BlockTableState) -> list[BlockView]:
    return [state.block(block_id) for block_id in range(state.num_blocks)]


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_replay_equals_the_paged_manager_after_every_record(seed: int, prefix_caching: bool):
    rng = random.Random(seed)
    kv = KVCacheManager(24, 4, enable_prefix_caching=prefix_caching)
    trace = Trace(24, 4)
    config = SchedulerConfig(max_num_seqs=12, max_num_batched_tokens=24, max_model_len=92)
    engine = Engine(Scheduler(config, kv), SimulatedExecutor(), trace)
    state, num_seen = BlockTableState(24, 4), 0

    def compare() -> None:
        nonlocal num_seen
        if engine._events:  # an abort that the next record will tell of
            return
        for step in trace.steps[num_seen:]:
            before = views(state)
            changed = state.apply(step)
            different = {i for i, (old, new) in enumerate(zip(before, views(state), strict=True)) if old != new}
            assert different <= changed
        num_seen = len(trace)
        agree(state, kv)

    run(engine, rng, 80, max_n=4, after_step=compare)
    kinds = {type(event) for step in trace for event in step.events}
    assert {BlocksAllocated, BlocksFreed, BlocksShared, BlockCopied} <= kinds
    assert engine.stats.num_preemptions > 0
    assert num_seen == len(trace) and state.num_referenced_blocks == 0


@pytest.mark.parametrize("seed", range(4))
def test_replay_of_steps_that_overlap_agrees_in_the_end(seed: int):
    kv, trace = KVCacheManager(24, 4), Trace(24, 4)
    config = SchedulerConfig(max_num_seqs=12, max_num_batched_tokens=24, max_model_len=92)
    engine = Engine(Scheduler(config, kv), SimulatedExecutor(depth=2), trace)
    run(engine, random.Random(seed), 150, max_n=4, after_step=lambda: None)
    state = BlockTableState(24, 4)
    for step in trace:
        state.apply(step)
        assert state.num_live_tokens + state.num_fragmented_slots <= 24 * 4 and state.num_fragmented_slots >= 0
    agree(state, kv)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("reserve", [reserve_nothing, reserve_oracle, reserve_power_of_two, reserve_max(92)])
def test_replay_of_contiguous_runs_that_move(reserve, depth: int):
    kv, trace = ContiguousKVManager(40, 4, reserve), Trace(40, 4)
    config = SchedulerConfig(max_num_seqs=12, max_num_batched_tokens=24, max_model_len=92)
    engine = Engine(Scheduler(config, kv), SimulatedExecutor(depth=depth), trace)
    state, num_seen = BlockTableState(40, 4), 0

    def compare() -> None:
        nonlocal num_seen
        for step in trace.steps[num_seen:]:
            state.apply(step)
        num_seen = len(trace)
        if depth == 1 and not engine._events:
            agree(state, kv)

    run(engine, random.Random(5), 150, max_n=1, after_step=compare)
    moved = any(isinstance(event, BlockCopied) for step in trace for event in step.events)
    assert moved == (reserve is reserve_nothing)
    assert state.num_free_blocks == 40


def test_a_moved_run_leaves_its_reserved_end_behind():
    kv, state = ContiguousKVManager(12, 4, reserve_nothing), BlockTableState(12, 4)
    kv.events = []
    kv.admit("a", 12)
    kv.admit("b", 4)
    assert kv.extend("a", 3, 14) == [(0, 4)]  # 17 tokens do not fit in place; only the first block was written
    state.apply(record(*kv.events))
    agree(state, kv)


def test_static_batches_keep_blocks_of_ended_requests():
    kv, trace = KVCacheManager(64, 4), Trace(64, 4)
    engine = Engine(StaticScheduler(SchedulerConfig(4, 64, 92), kv), SimulatedExecutor(), trace)
    run(engine, random.Random(1), 40, max_n=1, after_step=lambda: None)
    state = BlockTableState(64, 4)
    for step in trace:
        state.apply(step)
    agree(state, kv)


def test_what_a_block_shows_through_its_life():
    state = BlockTableState(4, 16)
    assert state.block(2) == FREE_BLOCK
    changed = state.apply(record(BlocksAllocated("a", 0, (2, 0)), scheduled={"a": 20}))
    assert changed == {0, 2}
    assert state.block(2) == BlockView("a", 0, 16, 1, False)
    assert state.block(0) == BlockView("a", 1, 4, 1, False)
    state.apply(record(BlocksCached((2,)), BlocksShared("b", 0, (2,), 16)))
    assert state.block(2) == BlockView("a", 0, 16, 2, True)
    assert state.holders(2) == ["a", "b"]
    assert state.num_computed_tokens == {"a": 20, "b": 16}
    state.apply(record(BlocksFreed("a", (2, 0))))
    assert state.block(2) == BlockView("b", 0, 16, 1, True)
    assert state.block(0) == FREE_BLOCK
    state.apply(record(BlocksFreed("b", (2,))))
    assert state.block(2) == BlockView("b", 0, 16, 0, True), "cached content keeps the colour of its last holder"
    assert (state.num_cached_free_blocks, state.num_free_blocks, state.num_live_tokens) == (1, 3, 0)


def test_events_after_the_forward_pass_come_after_its_tokens():
    state = BlockTableState(4, 16)
    state.apply(record(BlocksAllocated("a", 0, (1,)), scheduled={"a": 5}, after=(BlocksShared("a#1", 0, (1,), 5),)))
    assert state.block(1) == BlockView("a", 0, 5, 2, False)
    assert state.num_computed_tokens["a#1"] == 5
    state.apply(record(BlocksFreed("a", (1,)), scheduled={"a": 1, "a#1": 1}))
    assert state.block(1) == BlockView("a#1", 0, 6, 1, False), "tokens of a request without a table are skipped"


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (16, 0)])
def test_a_pool_of_nothing_is_refused(num_blocks: int, block_size: int):
    with pytest.raises(ValueError, match=f"{num_blocks} and {block_size}"):
        BlockTableState(num_blocks, block_size)
