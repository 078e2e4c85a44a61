"""Counters and latencies, from records whose right answer can be worked out by hand."""

from __future__ import annotations

import math

import pytest

from labkit.core import Engine
from labkit.memory import KVCacheManager, KVCacheUsage
from labkit.observe import (
    BlocksShared,
    EngineStats,
    Event,
    RequestArrived,
    RequestFinished,
    RequestPreempted,
    StepRecord,
)
from labkit.scheduling import Request, SamplingParams, Scheduler, SchedulerConfig
from labkit.simulation import SimulatedExecutor, simulate

EMPTY = KVCacheUsage(8, 4, 0, 0, 8, 0)


def step(start: float, end: float, scheduled: dict[str, int], sampled: str = "", events: tuple[Event, ...] = ()):
    ids, counts = tuple(scheduled), tuple(scheduled.values())
    return StepRecord(0, start, end, ids, counts, tuple(sampled.split()), len(ids), 0, 0, events)


def test_latencies_of_one_request():
    stats = EngineStats()
    stats.update(step(1.0, 2.0, {"a": 8}, "", (RequestArrived("a", 16, 0.5),)), EMPTY)
    stats.update(step(2.0, 3.0, {"a": 8}, "a"), EMPTY)
    stats.update(step(3.0, 3.25, {"a": 1}, "a"), EMPTY)
    stats.update(step(3.25, 4.25, {"a": 1}, "a", (RequestFinished("a", "stop", 3),)), EMPTY)
    assert stats.time_to_first_token() == 2.5
    assert stats.inter_token_latency(50) == 0.25
    assert stats.inter_token_latency(99) == 1.0
    assert (stats.num_prompt_tokens, stats.num_computed_tokens, stats.num_generated_tokens) == (16, 18, 3)
    assert stats.busy_seconds == 3.25
    assert stats.tokens_per_second == 3 / 3.25
    assert stats.num_finished == {"stop": 1}


def test_an_id_that_is_used_again_starts_afresh():
    stats = EngineStats()
    for arrival in (0.0, 100.0):
        events = (RequestArrived("a", 4, arrival), RequestFinished("a", "length", 1))
        stats.update(step(arrival, arrival + 1, {"a": 4}, "a", events), EMPTY)
    assert stats.time_to_first_token(100) == 1.0
    assert math.isnan(stats.inter_token_latency())


def test_idle_time_and_overlapping_steps_are_not_counted_twice():
    stats = EngineStats()
    stats.update(step(0.0, 2.0, {"a": 1}, "a"), EMPTY)
    stats.update(step(1.0, 3.0, {"a": 1}, "a"), EMPTY)  # submitted while the first ran
    stats.update(step(10.0, 11.0, {"a": 1}, "a"), EMPTY)
    assert stats.busy_seconds == 4.0


def test_a_record_without_a_step_counts_no_step():
    stats = EngineStats()
    stats.update(step(5.0, 5.0, {}, "", (RequestFinished("a", "abort", 0),)), EMPTY)
    assert (stats.num_steps, stats.busy_seconds, stats.num_finished) == (0, 0.0, {"abort": 1})


def test_cached_tokens_are_hits_and_not_forks():
    stats = EngineStats()
    hit, fork = BlocksShared("a", 0, (1,), 30), BlocksShared("a#1", 0, (1,), 40)
    stats.update(step(0, 1, {"a": 10}, "a a#1", (RequestArrived("a", 40, 0.0), hit, fork)), EMPTY)
    assert stats.num_cached_tokens == 30
    assert stats.prefix_cache_hit_rate == 0.75


@pytest.mark.parametrize(("percentile", "expected"), [(0, 1), (1, 1), (50, 50), (99, 99), (100, 100)])
def test_percentiles_are_by_nearest_rank(percentile: float, expected: float):
    stats = EngineStats()
    for i in range(100, 0, -1):
        arrived = RequestArrived(str(i), 1, 0.0)
        stats.update(step(0, i, {str(i): 1}, str(i), (arrived, RequestFinished(str(i), "stop", 1))), EMPTY)
    assert stats.time_to_first_token(percentile) == expected


def test_usage_is_the_last_and_its_peak_is_kept():
    stats = EngineStats()
    for referenced, live in ((2, 8), (6, 12), (4, 14)):
        stats.update(step(0, 1, {"a": 1}), KVCacheUsage(8, 4, referenced, 0, 8 - referenced, live))
    assert stats.kv_cache_usage == 0.5
    assert stats.peak_kv_cache_usage == 0.75
    assert stats.internal_fragmentation == 2 / 16


def test_preemptions_are_counted():
    stats = EngineStats()
    stats.update(step(0, 1, {"a": 1}, "", (RequestPreempted("b"), RequestPreempted("c"))), EMPTY)
    assert stats.num_preemptions == 2


def test_a_simulated_run_adds_up():
    kv = KVCacheManager(64, 4)
    requests = [
        Request(f"r{i}", list(range(i, i + 9)), SamplingParams(n=1 + i % 2, max_tokens=5, ignore_eos=True))
        for i in range(6)
    ]
    scheduler = Scheduler(SchedulerConfig(8, 32, 64), kv)
    engine: Engine = simulate(requests, scheduler, SimulatedExecutor(lambda plan: 0.5))
    stats = engine.stats
    assert stats.num_prompt_tokens == 54
    assert stats.num_generated_tokens == 5 * (3 * 1 + 3 * 2)
    assert stats.num_finished == {"length": 9}
    assert stats.busy_seconds == 0.5 * stats.num_steps == engine.executor.now()
    assert stats.inter_token_latency() == 0.5
    assert stats.kv_cache_usage == 0


def test_before_the_first_step_everything_can_be_shown():
    stats = EngineStats()
    assert math.isnan(stats.time_to_first_token())
    assert stats.snapshot()["tokens_per_second"] == 0
    assert "generated_tokens" in repr(stats) and "<table>" in stats._repr_html_()
