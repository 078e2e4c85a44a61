"""The contiguous world: arenas, reservations and static batching, on the same engine as paging."""

import random

import pytest

from labkit.core import Engine
from labkit.memory import (
    ContiguousKVManager,
    FirstFitArena,
    KVCacheManager,
    reserve_max,
    reserve_nothing,
    reserve_oracle,
    reserve_power_of_two,
)
from labkit.scheduling import Request, SamplingParams, Scheduler, SchedulerConfig, StaticScheduler
from labkit.simulation import SimulatedExecutor

RESERVATIONS = {
    "reserve_max": reserve_max(64),
    "power_of_two": reserve_power_of_two,
    "oracle": reserve_oracle,
    "first_fit": reserve_nothing,
}


def test_the_arena_takes_the_first_hole_that_fits_and_joins_holes_again():
    arena = FirstFitArena(10)
    starts = [arena.allocate(n) for n in (3, 2, 4)]
    assert starts == [0, 3, 5]
    arena.free(0, 3)
    arena.free(5, 4)
    assert arena.holes == [(0, 3), (5, 5)]
    assert arena.allocate(4) == 5 and arena.allocate(4) is None  # 4 are free, but not side by side
    assert (arena.num_free, arena.largest_hole) == (4, 3)
    arena.free(3, 2)
    arena.free(5, 4)
    assert arena.holes == [(0, 10)]


def test_random_use_of_the_arena_never_overlaps():
    rng, arena, runs = random.Random(0), FirstFitArena(64), []
    for _ in range(2000):
        if runs and rng.random() < 0.5:
            arena.free(*runs.pop(rng.randrange(len(runs))))
        else:
            length = rng.randint(1, 12)
            at = rng.randrange(64)
            start = arena.allocate(length) if rng.random() < 0.7 else arena.allocate_at(at, min(length, 64 - at))
            if start is not None:
                runs.append((start, length if start != at else min(length, 64 - at)))
        taken = [b for start, length in runs for b in range(start, start + length)]
        assert len(set(taken)) == len(taken) and len(taken) + arena.num_free == 64
        assert all(b not in taken for start, length in arena.holes for b in range(start, start + length))


@pytest.mark.parametrize(
    ("name", "reserved"), [("reserve_max", 16), ("power_of_two", 8), ("oracle", 6), ("first_fit", 3)]
)
def test_what_each_policy_reserves_for_10_tokens_that_become_23(name: str, reserved: int):
    kv = ContiguousKVManager(32, 4, RESERVATIONS[name])
    assert kv.admit("a", 10, max_total_tokens=23)
    assert len(kv.block_table("a")) == reserved
    kv.commit("a", [], 10)
    usage = kv.usage()
    assert (usage.num_live_tokens, usage.num_fragmented_slots) == (10, reserved * 4 - 10)


def test_free_blocks_in_small_holes_admit_nobody():
    kv = ContiguousKVManager(9, 4, reserve_oracle)
    for name in "abc":
        kv.admit(name, 12, max_total_tokens=12)
    kv.free("a")
    kv.free("c")
    assert kv.num_free_blocks == 6
    assert not kv.admit("d", 16, max_total_tokens=16)
    assert kv.external_fragmentation == 0.5
    kv.check()


def test_a_run_grows_in_place_or_moves_with_its_content():
    kv = ContiguousKVManager(8, 4, reserve_nothing)
    kv.admit("a", 4)
    kv.commit("a", [], 4)
    assert kv.extend("a", 4, 1) == [] and kv.block_table("a") == [0, 1]
    kv.commit("a", [], 8)
    kv.admit("b", 4)
    assert kv.extend("a", 8, 1) == [(0, 3), (1, 4)] and kv.block_table("a") == [3, 4, 5]
    assert kv.extend("a", 12, 17) is None and kv.block_table("a") == [3, 4, 5]
    kv.check()


def test_a_run_at_the_end_can_slide_over_itself():
    kv = ContiguousKVManager(5, 4, reserve_nothing)
    kv.admit("a", 4)
    kv.admit("b", 16)
    kv.commit("b", [], 16)
    kv.free("a")
    assert kv.extend("b", 16, 1) == [(1, 0), (2, 1), (3, 2), (4, 3)]
    assert kv.block_table("b") == [0, 1, 2, 3, 4]


def requests(count: int, seed: int = 0) -> list[Request]:
    rng = random.Random(seed)
    made = []
    for i in range(count):
        params = SamplingParams(max_tokens=rng.randint(1, 30), ignore_eos=True)
        made.append(Request(f"r{i}", [rng.randrange(50) for _ in range(rng.randint(1, 30))], params, seed=i))
    return made


def run(scheduler: Scheduler, batch: list[Request]) -> int:
    """Run to the end, checking the accounting after each step; the number of steps it took."""
    engine = Engine(scheduler, SimulatedExecutor())
    for request in batch:
        engine.add_request(request)
    steps = 0
    while engine.has_unfinished:
        engine.step()
        scheduler.kv.check()
        steps += 1
        assert steps < 10_000, "no progress"
    assert scheduler.kv.usage().num_referenced_blocks == 0
    return steps


CONFIG = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64)


@pytest.mark.parametrize("name", RESERVATIONS)
@pytest.mark.parametrize("kind", [Scheduler, StaticScheduler])
def test_every_allocator_and_scheduler_gives_the_same_tokens(kind: type[Scheduler], name: str):
    paged, contiguous = requests(60), requests(60)
    run(Scheduler(CONFIG, KVCacheManager(64, 4)), paged)
    run(kind(CONFIG, ContiguousKVManager(40, 4, RESERVATIONS[name])), contiguous)
    assert [r.token_ids for r in contiguous] == [r.token_ids for r in paged]


def test_static_batching_waits_for_the_longest_and_takes_more_steps():
    static = run(StaticScheduler(CONFIG, KVCacheManager(256, 4)), requests(60))
    continuous = run(Scheduler(CONFIG, KVCacheManager(256, 4)), requests(60))
    assert static > 1.2 * continuous


def test_a_static_batch_holds_its_blocks_until_its_longest_ends():
    scheduler = StaticScheduler(CONFIG, KVCacheManager(64, 4, enable_prefix_caching=False))
    engine = Engine(scheduler, SimulatedExecutor())
    for i, max_tokens in enumerate((2, 10)):
        engine.add_request(Request(f"r{i}", [1] * 8, SamplingParams(max_tokens=max_tokens)))
    for _ in range(3):
        engine.step()
    engine.add_request(Request("late", [1] * 8, SamplingParams(max_tokens=2)))
    engine.step()
    assert len(scheduler.running) == 1 and len(scheduler.waiting) == 1
    assert scheduler.kv.usage().num_referenced_blocks >= 5
    while engine.has_unfinished:
        engine.step()
    assert scheduler.kv.usage().num_referenced_blocks == 0


def test_forks_need_the_paged_allocator():
    scheduler = Scheduler(CONFIG, ContiguousKVManager(64, 4, reserve_oracle))
    with pytest.raises(ValueError, match="n must be 1 with an allocator that cannot share blocks, got 2"):
        scheduler.add(Request("a", [1], SamplingParams(n=2)))
