"""Random use of the control plane against a model of what it should hold, and long runs on tiny pools."""

import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from labkit.core import Engine
from labkit.memory import KVCacheManager
from labkit.scheduling import Request, SamplingParams, Scheduler, SchedulerConfig, StepPlan, StepResult
from labkit.simulation import SimulatedExecutor

BLOCK_SIZE = 4


class BlockTables(RuleBasedStateMachine):
    """Admits, extends, commits, forks and frees sequences; a naive copy remembers which token each slot holds.

    Whatever sharing, copying, caching and eviction happen, reading a sequence through its block table must give its
    own tokens back.
    """

    shares_partial_blocks = True

    def __init__(self) -> None:
        super().__init__()
        self.kv = KVCacheManager(12, BLOCK_SIZE, shares_partial_blocks=self.shares_partial_blocks)
        self.tokens: dict[str, list[int]] = {}
        self.salts: dict[str, str | None] = {}
        self.slots: dict[tuple[int, int], int] = {}
        self.num_ids = 0

    def new_id(self) -> str:
        self.num_ids += 1
        return f"s{self.num_ids}"

    def write(self, name: str, start: int) -> None:
        table = self.kv.block_table(name)
        for position in range(start, len(self.tokens[name])):
            self.slots[table[position // BLOCK_SIZE], position % BLOCK_SIZE] = self.tokens[name][position]
        self.kv.commit(name, self.tokens[name], len(self.tokens[name]))

    @rule(length=st.integers(1, 20), start=st.integers(0, 1), salt=st.sampled_from([None, "x"]))
    def admit(self, length: int, start: int, salt: str | None) -> None:
        """Few different beginnings, so that prefixes are often shared."""
        name, tokens = self.new_id(), [start * 100 + i for i in range(length)]
        prefix = self.kv.match_prefix(tokens, salt)
        free, needed = self.kv.num_free_blocks, self.kv.blocks_for(length)
        if self.kv.admit(name, length, prefix=prefix, salt=salt):
            self.tokens[name], self.salts[name] = tokens, salt
            self.write(name, len(prefix) * BLOCK_SIZE)
        else:
            assert needed > free - len(prefix) or needed > free

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), count=st.integers(1, 6), token=st.integers(1000, 1001))
    def append(self, data: st.DataObject, count: int, token: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.tokens)))
        start = len(self.tokens[name])
        free = self.kv.num_free_blocks
        copies = self.kv.extend(name, start, count)
        if copies is None:
            assert free < self.kv.blocks_for(start + count)
            assert self.kv.num_free_blocks == free
            return
        assert self.shares_partial_blocks or not copies
        for src, dst in copies:
            for offset in range(BLOCK_SIZE):
                if (src, offset) in self.slots:
                    self.slots[dst, offset] = self.slots[src, offset]
        self.tokens[name] += [token] * count
        self.write(name, start)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent, child = data.draw(st.sampled_from(sorted(self.tokens))), self.new_id()
        free = self.kv.num_free_blocks
        self.kv.fork(parent, child)
        assert self.kv.num_free_blocks == free
        shared = len(self.tokens[parent])
        if not self.shares_partial_blocks:
            shared -= shared % BLOCK_SIZE
        assert self.kv.num_computed_tokens(child) == shared
        self.tokens[child], self.salts[child] = self.tokens[parent][:shared], self.salts[parent]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.tokens)))
        self.kv.free(name)
        del self.tokens[name], self.salts[name]

    @rule()
    def reset(self) -> None:
        self.kv.reset_prefix_cache()
        assert self.kv.usage().num_cached_free_blocks == 0

    @invariant()
    def every_sequence_reads_its_own_tokens(self) -> None:
        for name, tokens in self.tokens.items():
            table = self.kv.block_table(name)
            read = [self.slots[table[p // BLOCK_SIZE], p % BLOCK_SIZE] for p in range(len(tokens))]
            assert read == tokens, name

    @invariant()
    def the_accounting_equation_holds(self) -> None:
        self.kv.check()
        used = {b for name in self.tokens for b in self.kv.block_table(name)}
        assert self.kv.num_free_blocks == self.kv.num_blocks - len(used)

    @invariant()
    def tenants_share_nothing(self) -> None:
        owners = {b: self.salts[name] for name in self.tokens for b in self.kv.block_table(name)}
        for name, salt in self.salts.items():
            assert all(owners[b] == salt for b in self.kv.block_table(name))


class FullBlockTables(BlockTables):
    """The same where unfinished blocks are nobody else's."""

    shares_partial_blocks = False


TestBlockTables = BlockTables.TestCase
TestBlockTables.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestFullBlockTables = FullBlockTables.TestCase
TestFullBlockTables.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


class FaultyExecutor(SimulatedExecutor):
    """Fails whole steps and single requests now and then, as a broken kernel or a bad request would."""

    def __init__(self, rng: random.Random, depth: int) -> None:
        super().__init__(depth=depth)
        self.rng = rng

    def submit(self, plan: StepPlan) -> None:
        if self.rng.random() < 0.002:
            raise RuntimeError("injected: step")
        super().submit(plan)

    def collect(self) -> StepResult:
        result = super().collect()
        if result.token_ids and self.rng.random() < 0.01:
            victim = self.rng.choice(sorted(result.token_ids))
            return StepResult(result.token_ids, failed={victim: RuntimeError("injected: request")})
        return result


@pytest.mark.parametrize("seed", range(5))
def test_soak_5000_random_requests_on_a_tiny_pool(seed: int):
    rng = random.Random(seed)
    num_blocks = rng.choice([24, 48])
    kv = KVCacheManager(num_blocks, 4, enable_prefix_caching=seed != 3, shares_partial_blocks=seed != 4)
    config = SchedulerConfig(max_num_seqs=12, max_num_batched_tokens=rng.choice([12, 48]), max_model_len=80)
    engine = Engine(Scheduler(config, kv), FaultyExecutor(rng, depth=1 + seed % 2))
    ends: Counter[str | None] = Counter()
    num_admitted, num_sequences, steps = 0, 0, 0
    while num_admitted < 5000 or engine.has_unfinished:
        while num_admitted < 5000 and rng.random() < 0.5:
            length = min(79, int(rng.expovariate(1 / 12)) + 1)
            shared = rng.random() < 0.4
            prompt = [i if shared else rng.randrange(1000) for i in range(length)]
            n = rng.choice([1, 1, 1, 1, 2, 4])
            params = SamplingParams(n=n, max_tokens=min(80, int(rng.expovariate(1 / 15)) + 1), ignore_eos=True)
            salt = rng.choice([None, "a"])
            engine.add_request(
                Request(f"r{num_admitted}", prompt, params, priority=rng.choice([0, 0, 1]), cache_salt=salt)
            )
            num_admitted += 1
        ended = {r.request_id: r for r in engine.step() if r.finish_reason}
        if rng.random() < 0.02 and engine.has_unfinished:
            everyone = engine.scheduler.running + engine.scheduler.waiting
            victim = rng.choice(everyone)
            family = engine.scheduler.unfinished(victim.parent_id or victim.request_id)
            engine.abort(victim.parent_id or victim.request_id)
            ended |= {r.request_id: r for r in family}
        ends.update(r.finish_reason for r in ended.values())
        num_sequences += len(ended)
        steps += 1
        kv.check()
        assert steps < 200_000, "no progress"
    kv.check()
    assert kv.usage().num_referenced_blocks == 0
    assert set(ends) == {"length", "error", "abort"}
    assert num_sequences >= 5000
