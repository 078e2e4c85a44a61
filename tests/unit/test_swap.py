"""Preemption by swap: who holds which block when, and what the scheduler makes of it."""

from __future__ import annotations

import pytest

from labkit.core import Engine
from labkit.memory import ContiguousKVManager, KVCacheManager, reserve_oracle
from labkit.observe import BlocksFreed, BlocksLanded, BlocksSwappedIn, BlocksSwappedOut, Trace
from labkit.scheduling import PreemptionCost, Request, SamplingParams, Scheduler, SchedulerConfig, StaticScheduler
from labkit.simulation import RooflineCost, SimulatedExecutor

TOKENS = list(range(100, 110))


def manager(num_blocks: int = 8, num_host_blocks: int = 8, **options) -> KVCacheManager:
    kv = KVCacheManager(num_blocks, 4, num_host_blocks=num_host_blocks, **options)
    assert kv.admit("a", len(TOKENS), prefix=kv.match_prefix(TOKENS))
    kv.commit("a", TOKENS, len(TOKENS))
    kv.events = []
    return kv


def split(kv: KVCacheManager) -> tuple[int, int, int, int]:
    kv.check()
    usage = kv.usage()
    return (
        usage.num_referenced_blocks,
        usage.num_in_flight_blocks,
        usage.num_cached_free_blocks,
        usage.num_free_blocks,
    )


def test_blocks_are_in_flight_until_their_copies_have_landed():
    kv = manager(enable_prefix_caching=False)
    copies = kv.swap_out("a")
    assert copies == [(0, 0), (1, 1), (2, 2)]
    assert split(kv) == (0, 3, 0, 5) and kv.num_free_blocks == 5
    assert kv.swap_in("a", 10) is None, "its content is not in host memory yet"
    kv.land(copies, [])
    assert split(kv) == (0, 0, 0, 8)

    back = kv.swap_in("a", 13)
    assert back is not None and [host for host, _ in back] == [0, 1, 2]
    assert [block for _, block in back] == kv.block_table("a")[:3] and len(kv.block_table("a")) == 4
    assert kv.num_computed_tokens("a") == 10
    assert split(kv) == (4, 0, 0, 4) and kv.swap_space.num_free_blocks == 5
    kv.land([], back)
    assert split(kv) == (4, 0, 0, 4) and kv.swap_space.num_free_blocks == 8


def test_blocks_that_others_share_are_copied_and_stay_theirs():
    kv = manager()
    kv.fork("a", "b")
    copies = kv.swap_out("a")
    assert copies is not None and split(kv) == (3, 0, 0, 5)
    assert kv.extend("b", 10, 1) == [(2, 3)], "a block that is being copied is not written"
    assert split(kv) == (3, 1, 0, 4)
    kv.land(copies, [])
    assert split(kv) == (3, 0, 0, 5)


def test_what_the_prefix_cache_still_has_is_not_copied_back():
    kv = manager()
    kv.land(kv.swap_out("a") or [], [])
    assert split(kv) == (0, 0, 2, 6)
    back = kv.swap_in("a", 10, prefix=kv.match_prefix(TOKENS))
    assert back is not None and len(back) == 1 and kv.num_computed_tokens("a") == 10
    assert kv.block_table("a")[:2] == [0, 1]
    kv.land([], back)
    assert kv.swap_space.num_free_blocks == 8


@pytest.mark.parametrize(("num_host_blocks", "num_computed"), [(0, 10), (2, 10), (8, 0)])
def test_nothing_changes_if_there_is_no_room_or_nothing_to_save(num_host_blocks, num_computed):
    kv = KVCacheManager(8, 4, num_host_blocks=num_host_blocks)
    kv.admit("a", 10)
    kv.commit("a", TOKENS, num_computed)
    before = split(kv)
    assert kv.swap_out("a") is None
    assert split(kv) == before and len(kv.block_table("a")) == 3


def test_swapping_in_needs_room_for_the_whole_sequence():
    kv = manager(num_blocks=6, enable_prefix_caching=False)
    kv.land(kv.swap_out("a") or [], [])
    kv.admit("b", 12)
    assert kv.swap_in("a", 13) is None
    assert kv.swap_in("a", 10, keep_free=1) is None
    assert "a" in kv and split(kv) == (3, 0, 0, 3)
    assert kv.swap_in("a", 10) is not None


@pytest.mark.parametrize("when", ["going out", "stored", "coming in"])
def test_a_sequence_that_ends_leaves_nothing_behind_once_copies_have_landed(when):
    kv = manager(enable_prefix_caching=False)
    out, back = kv.swap_out("a") or [], []
    if when != "going out":
        kv.land(out, [])
        out = []
    if when == "coming in":
        back = kv.swap_in("a", 10) or []
    kv.free("a")
    assert "a" not in kv
    in_flight = 0 if when == "stored" else 3
    assert split(kv) == (0, in_flight, 0, 8 - in_flight)
    kv.land(out, back)
    assert split(kv) == (0, 0, 0, 8) and kv.swap_space.num_free_blocks == 8


def test_events_name_both_ends_of_the_copies():
    kv = manager(enable_prefix_caching=False)
    kv.land(kv.swap_out("a") or [], [])
    kv.land([], kv.swap_in("a", 10) or [])
    out, freed, landed, _, back, landed_again = kv.events or []
    assert out == BlocksSwappedOut("a", (0, 1, 2), (0, 1, 2))
    assert freed == BlocksFreed("a", (0, 1, 2))
    assert landed == BlocksLanded((0, 1, 2))
    table = tuple(kv.block_table("a"))
    assert back == BlocksSwappedIn("a", 0, table, (0, 1, 2), 10)
    assert landed_again == BlocksLanded(table)


def test_where_unfinished_blocks_are_not_shared_a_sequence_comes_back_at_its_last_full_block():
    kv = manager(enable_prefix_caching=False, shares_partial_blocks=False)
    copies = kv.swap_out("a")
    assert copies == [(0, 0), (1, 1)] and kv.num_computed_tokens("a") == 8
    assert split(kv) == (0, 2, 0, 6)
    kv.land(copies, [])
    back = kv.swap_in("a", 10)
    assert back is not None and len(back) == 2 and kv.num_computed_tokens("a") == 8
    assert len(kv.block_table("a")) == 3, "with room for the tokens to compute again"
    kv.land([], back)
    assert split(kv) == (3, 0, 0, 5)

    kv.admit("short", 3)
    kv.commit("short", TOKENS, 3)
    assert kv.swap_out("short") is None, "no full block, nothing to keep"


def test_negative_host_memory_is_refused():
    with pytest.raises(ValueError, match="num_host_blocks must be >= 0, got -1"):
        KVCacheManager(8, 4, num_host_blocks=-1)


# ---------------------------------------------------------------------- scheduling


def engine(kv, scheduler=Scheduler, executor=None, trace=None) -> Engine:
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=32, watermark=0.0)
    return Engine(scheduler(config, kv), executor or SimulatedExecutor(), trace)


def add(e: Engine, count: int = 4, **options) -> list[Request]:
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    requests = [Request(f"r{i}", list(range(10 * i, 10 * i + 7)), params, seed=i, **options) for i in range(count)]
    for request in requests:
        e.add_request(request)
    return requests


def run(e: Engine) -> None:
    for _ in range(2000):
        if not e.has_unfinished:
            break
        e.step()
        e.scheduler.kv.check()
    usage = e.scheduler.kv.usage()
    assert not e.has_unfinished, "no progress"
    assert usage.num_referenced_blocks == usage.num_in_flight_blocks == 0


@pytest.mark.parametrize("scheduler", [Scheduler, StaticScheduler])
@pytest.mark.parametrize("depth", [1, 2])
def test_swapped_requests_compute_no_token_twice_but_those_under_way(scheduler, depth):
    e = engine(KVCacheManager(8, 4, num_host_blocks=64), scheduler, SimulatedExecutor(depth=depth))
    requests = add(e)
    run(e)
    assert all(r.num_output_tokens == 20 for r in requests)
    assert e.stats.num_swaps > 0
    needed = sum(r.num_tokens - 1 for r in requests)
    wasted = e.stats.num_computed_tokens - needed
    assert wasted == 0 if depth == 1 else 0 <= wasted <= 8 * e.stats.num_preemptions


def test_the_cheaper_way_is_taken():
    assert PreemptionCost(1.0, 1.0).prefers_swap(num_blocks=4, num_tokens=8)
    assert not PreemptionCost(1.0, 1.0).prefers_swap(num_blocks=4, num_tokens=7)
    for cost, swaps in [(PreemptionCost(1.0, 9.0), True), (PreemptionCost(9.0, 1.0), False)]:
        e = engine(KVCacheManager(8, 4, num_host_blocks=64))
        e.scheduler.preemption_cost = cost
        add(e)
        run(e)
        assert e.stats.num_preemptions > 0
        assert (e.stats.num_swaps > 0) == swaps


def test_a_full_host_falls_back_to_computing_again():
    e = engine(KVCacheManager(8, 4, num_host_blocks=2))
    requests = add(e)
    run(e)
    assert 0 <= e.stats.num_swaps < e.stats.num_preemptions
    assert all(r.num_output_tokens == 20 for r in requests)


def test_an_allocator_that_cannot_swap_computes_again():
    e = engine(ContiguousKVManager(8, 4, reserve_oracle))
    add(e)
    run(e)
    assert e.stats.num_swaps == 0


def test_who_cannot_grow_sits_out_while_blocks_are_in_flight():
    e = engine(KVCacheManager(8, 4, num_host_blocks=64, enable_prefix_caching=False))
    first, *_, last = add(e)
    plans = []
    while not plans or not plans[-1].swap_outs:
        plans.append(e.scheduler.schedule())
        e.executor.submit(plans[-1])
        result = e.executor.collect()
        if plans[-1].swap_outs:
            break
        e.scheduler.update(plans[-1], result)
    kv = e.scheduler.kv
    assert first not in [entry.request for entry in plans[-1].requests]
    assert kv.usage().num_in_flight_blocks > 0
    assert last.num_computed_tokens > 0 and last.request_id in kv
    e.scheduler.update(plans[-1], result)
    assert kv.usage().num_in_flight_blocks == 0
    assert first in [entry.request for entry in e.scheduler.schedule().requests]


class FailsSwaps(SimulatedExecutor):
    """Every step that carries swaps breaks before they are made."""

    def submit(self, plan):
        if plan.swap_outs or plan.swap_ins:
            raise RuntimeError("no bus")
        super().submit(plan)


@pytest.mark.parametrize("depth", [1, 2])
def test_after_failed_swaps_requests_start_again(depth):
    kv = KVCacheManager(8, 4, num_host_blocks=64)
    e = engine(kv, executor=FailsSwaps(depth=depth))
    requests = add(e)
    run(e)
    assert {r.finish_reason for r in requests} <= {"length", "error"}
    assert any(r.num_preemptions and r.finish_reason == "length" for r in requests)
    assert kv.swap_space.num_free_blocks == 64


def test_an_interrupt_while_copies_are_under_way_loses_no_block():
    class Interrupted(SimulatedExecutor):
        armed = True

        def submit(self, plan):
            super().submit(plan)
            if plan.swap_outs and self.armed:
                self.armed = False
                raise KeyboardInterrupt

    kv = KVCacheManager(8, 4, num_host_blocks=64)
    e = engine(kv, executor=Interrupted())
    requests = add(e)
    with pytest.raises(KeyboardInterrupt):
        run(e)
    kv.check()
    assert kv.usage().num_in_flight_blocks == 0
    run(e)
    assert all(r.finish_reason == "length" for r in requests if r.num_preemptions)
    assert kv.swap_space.num_free_blocks == 64


def test_a_trace_with_swaps_is_saved_and_loaded(tmp_path):
    trace = Trace(8, 4)
    e = engine(KVCacheManager(8, 4, num_host_blocks=64), trace=trace)
    add(e)
    run(e)
    trace.save(tmp_path / "swaps.trace")
    assert Trace.load(tmp_path / "swaps.trace").steps == trace.steps
    assert {BlocksSwappedOut, BlocksSwappedIn, BlocksLanded} <= {type(x) for step in trace for x in step.events}


def test_simulated_swaps_take_time_beside_the_step():
    cost = RooflineCost(100, 1, 1, 1, bytes_per_second=100, flops_per_second=100, seconds_per_swapped_block=0.75)
    kv = KVCacheManager(8, 4, num_host_blocks=64)
    e = engine(kv, executor=SimulatedExecutor(cost))
    add(e)
    longest = 0.0
    while e.has_unfinished:
        before = e.executor.now()
        plan_swaps = e.stats.num_swapped_blocks
        e.step()
        if e.stats.num_swapped_blocks > plan_swaps:
            longest = max(longest, (e.executor.now() - before) / (e.stats.num_swapped_blocks - plan_swaps))
    assert longest >= 0.75
