"""Preemption by swap: random use, with every token's place followed from block to host block and back."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from labkit.core import Engine
from labkit.memory import KVCacheManager
from labkit.observe import BlockTableState, Trace
from labkit.scheduling import PreemptionCost, Request, SamplingParams, Scheduler, SchedulerConfig, StepPlan, StepResult
from labkit.simulation import SimulatedExecutor

BLOCK_SIZE = 4


class Memory:
    """What stands in each block of the pool and of the host; copies take place when they land, and not before."""

    def __init__(self) -> None:
        self.pool: dict[int, list[int | None]] = {}
        self.host: dict[int, list[int | None]] = {}

    def write(self, table, position: int, token: int | None) -> None:
        block = self.pool.setdefault(table[position // BLOCK_SIZE], [None] * BLOCK_SIZE)
        block[position % BLOCK_SIZE] = token

    def read(self, table, count: int) -> list[int | None]:
        return [self.pool[table[p // BLOCK_SIZE]][p % BLOCK_SIZE] for p in range(count)]

    def copy(self, pairs) -> None:
        contents = [list(self.pool.get(src, [None] * BLOCK_SIZE)) for src, _ in pairs]
        for (_, dst), content in zip(pairs, contents, strict=True):
            self.pool[dst] = content

    def swap(self, swap_outs, swap_ins) -> None:
        for src, host in swap_outs:
            self.host[host] = list(self.pool[src])
        for host, dst in swap_ins:
            self.pool[dst] = list(self.host[host])


class SwappedSequences(RuleBasedStateMachine):
    """Sequences come, grow, fork, leave the pool and come back; copies land late, in any order of events."""

    shares_partial_blocks = True

    def __init__(self) -> None:
        super().__init__()
        self.kv = KVCacheManager(12, BLOCK_SIZE, num_host_blocks=8, shares_partial_blocks=self.shares_partial_blocks)
        self.memory = Memory()
        self.tokens: dict[str, list[int]] = {}  # of those with a table
        self.swapped: dict[str, list[int]] = {}
        self.arriving: dict[str, list[int]] = {}
        self.under_way: list[tuple[list, list, str | None]] = []
        self.num_ids = 0

    def new_id(self) -> str:
        self.num_ids += 1
        return f"s{self.num_ids}"

    def write(self, name: str, start: int) -> None:
        for position in range(start, len(self.tokens[name])):
            self.memory.write(self.kv.block_table(name), position, self.tokens[name][position])
        self.kv.commit(name, self.tokens[name], len(self.tokens[name]))

    @rule(length=st.integers(1, 20), start=st.integers(0, 1))
    def admit(self, length: int, start: int) -> None:
        name, tokens = self.new_id(), [start * 100 + i for i in range(length)]
        prefix = self.kv.match_prefix(tokens)
        if self.kv.admit(name, length, prefix=prefix):
            self.tokens[name] = tokens
            self.write(name, len(prefix) * BLOCK_SIZE)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), count=st.integers(1, 6))
    def append(self, data: st.DataObject, count: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.tokens)))
        start = len(self.tokens[name])
        copies = self.kv.extend(name, start, count)
        if copies is not None:
            self.memory.copy(copies)
            self.tokens[name] += [1000 + start] * count
            self.write(name, start)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent, child = data.draw(st.sampled_from(sorted(self.tokens))), self.new_id()
        self.kv.fork(parent, child)
        self.tokens[child] = self.tokens[parent][: self.movable(parent)]

    def movable(self, name: str) -> int:
        """Tokens of a sequence that others can go on from."""
        length = len(self.tokens[name])
        return length if self.shares_partial_blocks else length // BLOCK_SIZE * BLOCK_SIZE

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.tokens)))
        num_tokens, free = self.movable(name), self.kv.swap_space.num_free_blocks
        needed = self.kv.blocks_for(num_tokens)
        copies = self.kv.swap_out(name)
        assert (copies is None) == (needed > free or needed == 0)
        if copies is not None:
            assert self.kv.num_computed_tokens(name) == num_tokens
            self.swapped[name] = self.tokens.pop(name)[:num_tokens]
            self.under_way.append((copies, [], None))

    @precondition(lambda self: self.swapped)
    @rule(data=st.data(), more=st.integers(0, 3))
    def swap_in(self, data: st.DataObject, more: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.swapped)))
        tokens = self.swapped[name]
        free = self.kv.num_free_blocks
        prefix = self.kv.match_prefix(tokens)
        copies = self.kv.swap_in(name, len(tokens) + more, prefix=prefix)
        if copies is None:
            assert self.kv.num_free_blocks == free and name in self.kv
            return
        assert self.kv.num_computed_tokens(name) == len(tokens)
        del self.swapped[name]
        if copies:
            self.arriving[name] = tokens
            self.under_way.append(([], copies, name))
        else:
            self.tokens[name] = tokens

    @precondition(lambda self: self.under_way)
    @rule()
    def land(self) -> None:
        swap_outs, swap_ins, name = self.under_way.pop(0)
        self.memory.swap(swap_outs, swap_ins)
        self.kv.land(swap_outs, swap_ins)
        if name in self.arriving:
            self.tokens[name] = self.arriving.pop(name)

    @precondition(lambda self: self.tokens or self.swapped or self.arriving)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.tokens | self.swapped | self.arriving)))
        self.kv.free(name)
        for where in (self.tokens, self.swapped, self.arriving):
            where.pop(name, None)

    @rule()
    def reset(self) -> None:
        self.kv.reset_prefix_cache()

    @invariant()
    def every_sequence_reads_its_own_tokens(self) -> None:
        for name, tokens in self.tokens.items():
            assert self.memory.read(self.kv.block_table(name), len(tokens)) == tokens, name

    @invariant()
    def the_accounting_equation_holds(self) -> None:
        self.kv.check()
        usage = self.kv.usage()
        in_tables = {b for name in self.tokens | self.arriving for b in self.kv.block_table(name)}
        moving = {b for outs, ins, _ in self.under_way for b in [*(s for s, _ in outs), *(d for _, d in ins)]}
        assert usage.num_referenced_blocks == len(in_tables)
        assert usage.num_in_flight_blocks == len(moving - in_tables)

    def teardown(self) -> None:
        while self.under_way:
            self.land()
        for name in [*self.tokens, *self.swapped]:
            self.kv.free(name)
        self.kv.check()
        assert self.kv.usage().num_referenced_blocks == 0 == self.kv.usage().num_in_flight_blocks
        assert self.kv.swap_space.num_free_blocks == 8


class SwappedFullBlocks(SwappedSequences):
    """The same where only full blocks are shared and moved."""

    shares_partial_blocks = False


TestSwappedFullBlocks = SwappedFullBlocks.TestCase
TestSwappedFullBlocks.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestSwappedSequences = SwappedSequences.TestCase
TestSwappedSequences.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class RememberingExecutor(SimulatedExecutor):
    """Keeps each slot's token, and computes only if a request's whole context stands where its table says.

    Steps take effect in order, but swaps at a moment of their own between submission and collection. Now and then a
    step fails, before its swaps or after.
    """

    def __init__(self, rng: random.Random, depth: int, failure_rate: float = 0.0) -> None:
        super().__init__(depth=depth)
        self.rng = rng
        self.failure_rate = failure_rate
        self.memory = Memory()
        self.pending_swaps: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> None:
        if self.rng.random() < self.failure_rate:
            raise RuntimeError("injected: submit")
        self.memory.copy(plan.copies)
        moving = {b for p in [*self.pending_swaps, plan] for b in [*dict(p.swap_outs), *dict(p.swap_ins).values()]}
        self.pending_swaps.append(plan)
        if self.rng.random() < 0.5:
            self.land()
        for request, first, count, table, _ in plan.requests:
            known = request.token_ids[:first]
            read = self.memory.read(table, first)
            assert read[: len(known)] == known, f"{request} reads {read}"
            for position in range(first, first + count):
                assert table[position // BLOCK_SIZE] not in moving, "a block is written while it is copied"
                # A token that the host does not know yet is checked when it is read next: by then it is known.
                token = request.token_ids[position] if position < len(request.token_ids) else self.newest(request)
                self.memory.write(table, position, token)
        super().submit(plan)

    def newest(self, request: Request) -> int:
        """The token that the step under way will bring."""
        return self._next_token(request, 0)

    def land(self) -> None:
        for plan in self.pending_swaps:
            self.memory.swap(plan.swap_outs, plan.swap_ins)
        self.pending_swaps.clear()

    def collect(self) -> StepResult:
        self.land()
        result = super().collect()
        if self.rng.random() < self.failure_rate:
            raise RuntimeError("injected: collect")
        return result

    def reset(self) -> None:
        self.land()
        super().reset()


def random_request(rng: random.Random, number: int) -> Request:
    length = min(59, int(rng.expovariate(1 / 12)) + 1)
    shared = rng.random() < 0.4
    prompt = [i if shared else rng.randrange(1000) for i in range(length)]
    params = SamplingParams(n=rng.choice([1, 1, 1, 2, 3]), max_tokens=rng.randint(1, 40), ignore_eos=True)
    return Request(f"r{number}", prompt, params, seed=number, priority=rng.choice([0, 0, 1]))


@pytest.mark.parametrize("failure_rate", [0.0, 0.01])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("num_host_blocks", "shares_partial_blocks"), [(6, True), (200, True), (200, False)])
def test_soak_with_swap_on_a_tiny_pool(
    num_host_blocks: int, shares_partial_blocks: bool, depth: int, failure_rate: float
):
    rng = random.Random(num_host_blocks + depth)
    kv = KVCacheManager(
        24,
        BLOCK_SIZE,
        num_host_blocks=num_host_blocks,
        enable_prefix_caching=num_host_blocks == 6 or not shares_partial_blocks,
        shares_partial_blocks=shares_partial_blocks,
    )
    config = SchedulerConfig(max_num_seqs=12, max_num_batched_tokens=32, max_model_len=92)
    trace = Trace(24, BLOCK_SIZE)
    engine = Engine(Scheduler(config, kv), RememberingExecutor(rng, depth, failure_rate), trace)
    state, num_seen = BlockTableState(24, BLOCK_SIZE), 0
    ends: Counter[str | None] = Counter()
    num_added = steps = 0
    while num_added < 600 or engine.has_unfinished:
        while num_added < 600 and rng.random() < 0.5:
            engine.add_request(random_request(rng, num_added))
            num_added += 1
        ends.update(r.finish_reason for r in engine.step() if r.finish_reason)
        if rng.random() < 0.03 and engine.has_unfinished:
            victim = rng.choice(engine.scheduler.running + engine.scheduler.waiting)
            engine.abort(victim.parent_id or victim.request_id)
        steps += 1
        kv.check()
        assert steps < 50_000, "no progress"
        if depth == 1 and not engine._events:  # else an abort that the next record will tell of
            for record in trace.steps[num_seen:]:
                state.apply(record)
            num_seen = len(trace)
            usage = kv.usage()
            assert state.num_referenced_blocks == usage.num_referenced_blocks
            assert state.num_in_flight_blocks == usage.num_in_flight_blocks
            assert state.num_cached_free_blocks == usage.num_cached_free_blocks
            assert state.num_live_tokens == usage.num_live_tokens
    kv.check()
    usage = kv.usage()
    assert usage.num_referenced_blocks == usage.num_in_flight_blocks == 0
    assert kv.swap_space.num_free_blocks == num_host_blocks
    assert engine.stats.num_swaps > 20
    assert set(ends) <= {"length", "error"} and ("error" in ends) == (failure_rate > 0)


@pytest.mark.parametrize("depth", [1, 2])
def test_swapping_changes_no_token_and_computes_less(depth: int):
    tokens, computed = [], []
    for num_host_blocks, cost in [(0, PreemptionCost()), (200, PreemptionCost()), (200, PreemptionCost(1.0, 1e-9))]:
        rng = random.Random(0)
        kv = KVCacheManager(24, BLOCK_SIZE, num_host_blocks=num_host_blocks, enable_prefix_caching=False)
        config = SchedulerConfig(max_num_seqs=12, max_num_batched_tokens=32, max_model_len=92)
        engine = Engine(Scheduler(config, kv), RememberingExecutor(rng, depth))
        engine.scheduler.preemption_cost = cost
        requests = [random_request(rng, number) for number in range(60)]
        for request in requests:
            engine.add_request(request)
        ended = []
        while engine.has_unfinished:
            ended += [r for r in engine.step() if r.finish_reason]
            kv.check()
        tokens.append({r.request_id: r.token_ids for r in ended})
        computed.append(engine.stats.num_computed_tokens)
        swaps = num_host_blocks > 0 and cost == PreemptionCost()
        assert engine.stats.num_preemptions > 0
        assert engine.stats.num_swaps == (engine.stats.num_preemptions if swaps else 0) or depth == 2
        assert (engine.stats.num_swaps > 0) == swaps
    assert tokens[0] == tokens[1] == tokens[2]
    assert computed[1] < computed[0]
