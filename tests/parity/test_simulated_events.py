"""A simulated run that replays a real run's tokens does the same, block for block, as the run on a model."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from transformers import PreTrainedModel

from labkit.core import Engine
from labkit.engine import LLM
from labkit.memory import ContiguousKVManager, KVAllocator, KVCacheManager, reserve_max, reserve_nothing, reserve_oracle
from labkit.observe import (
    BlockCopied,
    BlocksShared,
    RequestArrived,
    RequestFinished,
    RequestPreempted,
    StepRecord,
    Trace,
)
from labkit.scheduling import Request, SamplingParams, Scheduler, SchedulerConfig, StaticScheduler
from labkit.simulation import SimulatedExecutor

from .tiny_models import TINY, VOCAB_SIZE

BLOCK_SIZE, MAX_MODEL_LEN, MAX_NUM_SEQS, EOS = 4, 48, 8, 1
CONTIGUOUS = {"reserve_max": reserve_max(MAX_MODEL_LEN), "reserve_oracle": reserve_oracle, "first_fit": reserve_nothing}

Action = Callable[[Engine], object]
Tokens = dict[tuple[str, int], list[int]]
"""Prompt and output by (request id, sample)."""


@dataclass
class Script:
    """What happens before which step: requests arrive, some are aborted. ``failing`` steps raise when submitted."""

    actions: dict[int, list[Action]]
    failing: frozenset[int]


def make_script(seed: int, *, n: tuple[int, ...]) -> Script:
    """24 requests over 30 steps: shared beginnings, salts, priorities, samples, stop tokens, aborts."""
    rng = random.Random(seed)
    actions: dict[int, list[Action]] = {}
    for i in range(24):
        # Few tokens, so that prompts begin alike and stop tokens are met.
        prompt = [2 + rng.randrange(2)] * rng.choice([3, 9, 17]) + [
            rng.randrange(2, 30) for _ in range(rng.randrange(9))
        ]
        options = dict(
            n=rng.choice(n),
            temperature=rng.choice([0.0, 1.0, 2.0]),
            max_tokens=rng.choice([1, 4, 9, 20]),
            stop_token_ids=[rng.randrange(2, VOCAB_SIZE) for _ in range(6)],
            ignore_eos=rng.random() < 0.5,
            min_tokens=rng.choice([0, 0, 1]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
        )
        placing = dict(priority=rng.choice([0, 0, 1]), cache_salt=rng.choice([None, None, "tenant"]), seed=i)

        def arrive(engine: Engine, i: int = i, prompt=prompt, options=options, placing=placing) -> None:
            params = SamplingParams(**options)
            engine.add_request(Request(f"r{i}", prompt, params, eos_token_ids=(EOS,), **placing))

        tick = rng.randrange(30)
        actions.setdefault(tick, []).append(arrive)
        if i % 6 == 0:
            actions.setdefault(tick + 1 + i // 6, []).append(lambda engine, i=i: engine.abort(f"r{i}"))
    return Script(actions, frozenset({rng.randrange(8, 14)}))


def play(engine: Engine, script: Script) -> Tokens:
    """Run a script to its end; returns the tokens of every sequence, however it ended."""
    sequences: dict[tuple[str, int], Request] = {}
    submit = engine.executor.submit

    def failing_submit(plan):
        if plan.step in script.failing:
            raise RuntimeError("injected")
        submit(plan)

    engine.executor.submit = failing_submit  # type: ignore[method-assign]
    tick = 0
    while tick <= max(script.actions) or engine.has_unfinished:
        for action in script.actions.get(tick, ()):
            action(engine)
        if engine.has_unfinished:
            for request in engine.step():
                sequences[request.parent_id or request.request_id, request.sample_index] = request
        engine.scheduler.kv.check()
        tick += 1
        assert tick < 2000, "no progress"
    assert engine.scheduler.kv.usage().num_referenced_blocks == 0
    return {key: request.token_ids for key, request in sequences.items()}


def without_times(trace: Trace | None) -> list[StepRecord]:
    """The steps of a trace, with every time set to 0."""
    assert trace is not None
    return [
        step._replace(
            start=0.0,
            end=0.0,
            events=tuple(e._replace(time=0.0) if isinstance(e, RequestArrived) else e for e in step.events),
        )
        for step in trace
    ]


def simulate(script: Script, tokens: Tokens, kv: KVAllocator, depth: int, options: dict[str, Any]) -> Trace:
    """The same script without a model; each sequence gets the tokens it got in the real run."""

    def next_token(request: Request, sample_index: int) -> int:
        replayed = tokens.get((request.parent_id or request.request_id, request.sample_index + sample_index), [])
        # A step that ran ahead of an end samples tokens that nobody takes.
        return replayed[request.num_tokens] if request.num_tokens < len(replayed) else 0

    kind = StaticScheduler if options["scheduler"] == "static" else Scheduler
    config = SchedulerConfig(MAX_NUM_SEQS, options["max_num_batched_tokens"], MAX_MODEL_LEN)
    trace = Trace(kv.num_blocks, kv.block_size)
    play(Engine(kind(config, kv), SimulatedExecutor(next_token=next_token, depth=depth), trace), script)
    return trace


CASES: dict[str, dict[str, Any]] = {
    "paged": {},
    "paged, tiny pool": {"num_gpu_blocks_override": 14},
    "paged, tiny pool, chunks": {"num_gpu_blocks_override": 14, "max_num_batched_tokens": 9},
    "paged, no prefix cache": {"num_gpu_blocks_override": 20, "enable_prefix_caching": False},
    "paged, static": {"num_gpu_blocks_override": 24, "scheduler": "static"},
    "reserve_max": {"kv_allocator": "reserve_max", "num_gpu_blocks_override": 30},
    "reserve_oracle, static": {"kv_allocator": "reserve_oracle", "scheduler": "static", "num_gpu_blocks_override": 30},
    "first_fit": {"kv_allocator": "first_fit", "num_gpu_blocks_override": 20},
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return TINY["llama"]()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_same_events_from_simulator_and_model(model, case, depth):
    options: dict[str, Any] = {
        "kv_allocator": "paged",
        "scheduler": "continuous",
        "max_num_batched_tokens": 32,
        "num_gpu_blocks_override": 64,
        "enable_prefix_caching": True,
    }
    options |= CASES[case]
    paged = options["kv_allocator"] == "paged"
    script = make_script(seed=len(case), n=(1, 1, 2, 3) if paged else (1,))
    with LLM(
        model, block_size=BLOCK_SIZE, max_model_len=MAX_MODEL_LEN, max_num_seqs=MAX_NUM_SEQS, seed=1, **options
    ) as llm:
        llm.engine.executor.depth = depth
        tokens = play(llm.engine, script)
        real = without_times(llm.trace)

    num_blocks = options["num_gpu_blocks_override"]
    kv: KVAllocator
    if paged:
        kv = KVCacheManager(num_blocks, BLOCK_SIZE, enable_prefix_caching=options["enable_prefix_caching"])
    else:
        kv = ContiguousKVManager(num_blocks, BLOCK_SIZE, CONTIGUOUS[options["kv_allocator"]])
    simulated = without_times(simulate(script, tokens, kv, depth, options))
    for got, want in zip(simulated, real, strict=False):
        assert got == want
    assert len(simulated) == len(real)

    kinds = Counter(type(event) for step in real for event in step.events)
    ends = Counter(event.reason for step in real for event in step.events if isinstance(event, RequestFinished))
    assert {"stop", "length", "abort", "error"} <= ends.keys(), ends
    assert kinds[RequestPreempted] > 0 or "tiny" not in case
    assert not paged or (kinds[BlocksShared] > 0 and kinds[BlockCopied] > 0)
