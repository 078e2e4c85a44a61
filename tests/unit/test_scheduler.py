"""The scheduler: who runs, for how many tokens, who is preempted, and how requests end."""

import pytest

from labkit.core import Engine
from labkit.memory import KVCacheManager
from labkit.scheduling import Request, SamplingParams, Scheduler, SchedulerConfig, StepPlan
from labkit.simulation import SimulatedExecutor


def engine(num_blocks: int = 64, block_size: int = 4, prefix_caching: bool = True, next_token=None, **limits) -> Engine:
    kv = KVCacheManager(num_blocks, block_size, enable_prefix_caching=prefix_caching)
    config = SchedulerConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 64} | limits)
    executor = SimulatedExecutor() if next_token is None else SimulatedExecutor(next_token=next_token)
    return Engine(Scheduler(config, kv), executor)


def request(name: str, num_prompt: int, max_tokens: int = 4, **options) -> Request:
    params = {key: options.pop(key) for key in ("n", "stop_token_ids", "min_tokens", "ignore_eos") if key in options}
    prompt = options.pop("prompt", [hash((name, i)) % 1000 for i in range(num_prompt)])
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens, **params), **options)


def shape(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [(e.request.request_id, e.num_computed_tokens, e.num_scheduled_tokens) for e in plan.requests]


def step(e: Engine) -> StepPlan:
    plan = e.scheduler.schedule()
    e.executor.submit(plan)
    e.scheduler.update(plan, e.executor.collect())
    e.scheduler.kv.check()
    return plan


def run(e: Engine, limit: int = 10_000) -> list[Request]:
    ended = []
    for _ in range(limit):
        if not e.has_unfinished:
            break
        ended += [r for r in e.step() if r.finish_reason]
        e.scheduler.kv.check()
    assert not e.has_unfinished, "the engine makes no progress"
    assert e.scheduler.kv.usage().num_referenced_blocks == 0
    return ended


def test_prompts_and_decodes_share_one_step():
    e = engine()
    e.add_request(request("a", 10))
    assert shape(step(e)) == [("a", 0, 10)]
    e.add_request(request("b", 7))
    assert shape(step(e)) == [("a", 10, 1), ("b", 0, 7)]
    assert shape(step(e)) == [("a", 11, 1), ("b", 7, 1)]


def test_a_long_prompt_is_computed_in_chunks_beside_running_decodes():
    e = engine(max_num_batched_tokens=16)
    e.add_request(request("a", 4))
    step(e)
    e.add_request(request("long", 40))
    assert shape(step(e)) == [("a", 4, 1), ("long", 0, 15)]
    assert shape(step(e)) == [("a", 5, 1), ("long", 15, 15)]
    plan = step(e)
    assert shape(plan) == [("a", 6, 1), ("long", 30, 10)]
    assert [entry.num_samples for entry in plan.requests] == [1, 1]


def test_a_chunk_in_the_middle_of_a_prompt_samples_nothing():
    e = engine(max_num_batched_tokens=16)
    e.add_request(request("long", 40))
    assert step(e).requests[0].num_samples == 0


def test_admission_keeps_arrival_order_even_if_a_later_request_would_fit():
    e = engine(num_blocks=16, max_model_len=60)
    e.add_request(request("a", 40))
    step(e)
    e.add_request(request("big", 30))
    e.add_request(request("small", 2))
    assert shape(step(e)) == [("a", 40, 1)]


def test_smaller_priority_numbers_run_first():
    e = engine(max_num_seqs=1)
    for name, priority in [("late", 5), ("soon", 1), ("soon2", 1), ("now", -3)]:
        e.add_request(request(name, 3, priority=priority))
    assert [r.request_id for r in run(e)] == ["now", "soon", "soon2", "late"]


def test_preemption_takes_the_last_in_order_and_the_first_is_never_preempted():
    e = engine(num_blocks=8, max_model_len=32, watermark=0.0)
    requests = [request(name, 7, max_tokens=20) for name in "abcd"]
    for r in requests:
        e.add_request(r)
    run(e)
    assert requests[0].num_preemptions == 0
    assert sum(r.num_preemptions for r in requests) > 0
    assert all(r.finish_reason == "length" and r.num_output_tokens == 20 for r in requests)


def test_preemptions_of_a_request_are_bounded_on_a_tiny_pool():
    e = engine(num_blocks=12, block_size=2, max_model_len=24, watermark=0.0)
    requests = [request(f"r{i}", 3, max_tokens=18) for i in range(30)]
    for r in requests:
        e.add_request(r)
    run(e)
    assert max(r.num_preemptions for r in requests) <= 4


def test_a_preempted_request_keeps_its_tokens():
    e = engine(num_blocks=8, max_model_len=32, watermark=0.0, prefix_caching=False)
    requests = [request(name, 7, max_tokens=20, seed=i) for i, name in enumerate("abcd")]
    for r in requests:
        e.add_request(r)
    run(e)
    alone = engine()
    twins = [request(name, 7, max_tokens=20, seed=i) for i, name in enumerate("abcd")]
    for twin in twins:
        alone.add_request(twin)
        run(alone)
    assert [r.token_ids for r in requests] == [t.token_ids for t in twins]


def test_a_shared_prompt_is_computed_once():
    e = engine()
    prompt = list(range(20))
    first, second = request("a", 20, prompt=prompt), request("b", 20, prompt=prompt)
    e.add_request(first)
    step(e)
    e.add_request(second)
    assert shape(step(e)) == [("a", 20, 1), ("b", 16, 4)]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 16)


def test_prompt_logprobs_are_never_served_from_the_prefix_cache():
    e = engine()
    prompt = list(range(20))
    e.add_request(request("a", 20, prompt=prompt))
    run(e)
    e.add_request(Request("b", prompt, SamplingParams(prompt_logprobs=1)))
    assert shape(step(e)) == [("b", 0, 20)]


def test_n_sequences_share_the_prompt_and_end_one_by_one():
    e = engine(num_blocks=64)
    e.add_request(request("a", 10, n=3, max_tokens=6))
    step(e)
    assert [r.request_id for r in e.scheduler.running] == ["a", "a#1", "a#2"]
    assert e.scheduler.kv.usage().num_referenced_blocks == 3
    plan = step(e)
    assert len(plan.copies) == 2  # the last to write keeps the block
    ended = run(e)
    assert sorted(r.request_id for r in ended) == ["a", "a#1", "a#2"]
    assert len({tuple(r.output_token_ids) for r in ended}) == 3


def test_forks_survive_a_pool_too_small_for_all_of_them():
    e = engine(num_blocks=8, max_model_len=32, watermark=0.0)
    e.add_request(request("a", 14, n=6, max_tokens=18))
    ended = run(e)
    assert len(ended) == 6 and all(r.num_output_tokens == 18 for r in ended)


def test_room_for_forks_is_kept_while_their_prompt_is_computed():
    e = engine(max_num_seqs=4, max_num_batched_tokens=8)
    e.add_request(request("a", 20, n=3))
    for i in range(4):
        e.add_request(request(f"b{i}", 2))
    while e.has_unfinished:
        e.step()
        assert len(e.scheduler.running) <= 4


def test_stop_tokens_end_a_request_after_min_tokens():
    e = engine(next_token=lambda r, i: 7)
    eos = request("eos", 3, max_tokens=9, eos_token_ids=[7])
    ignoring = request("ignoring", 3, max_tokens=9, eos_token_ids=[7], ignore_eos=True)
    own = request("own", 3, max_tokens=9, stop_token_ids=[7], min_tokens=4)
    for r in (eos, ignoring, own):
        e.add_request(r)
    run(e)
    assert (eos.finish_reason, eos.stop_reason, eos.num_output_tokens) == ("stop", None, 1)
    assert (ignoring.finish_reason, ignoring.num_output_tokens) == ("length", 9)
    assert (own.finish_reason, own.stop_reason, own.num_output_tokens) == ("stop", 7, 4)


def test_a_sequence_ends_at_max_model_len():
    e = engine(max_model_len=16)
    r = request("a", 10, max_tokens=100)
    e.add_request(r)
    run(e)
    assert (r.finish_reason, r.num_tokens) == ("length", 16)


def test_abort_frees_waiting_and_running_sequences_and_their_ids():
    e = engine(max_num_seqs=3)
    e.add_request(request("a", 5, n=3, max_tokens=50))
    e.add_request(request("b", 5))
    e.step()
    assert e.abort("a") and not e.abort("a") and e.abort("b")
    assert not e.has_unfinished and e.scheduler.kv.usage().num_referenced_blocks == 0
    e.add_request(request("a", 5))
    assert [r.finish_reason for r in run(e)] == ["length"]


def mixed_requests() -> list[Request]:
    options = [{"n": 3}, {"min_tokens": 3}, {"max_tokens": 1}, {"ignore_eos": True}, {}, {}]
    return [
        request(f"r{i}", 3 + 5 * i, **{"max_tokens": 12} | options[i % 6], seed=i, eos_token_ids=range(1000, 4000))
        for i in range(24)
    ]


@pytest.mark.parametrize("num_blocks", [200, 24])
def test_running_a_step_ahead_changes_no_token(num_blocks: int):
    results = []
    for depth in (1, 2):
        kv = KVCacheManager(num_blocks, 4)
        config = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=40, max_model_len=96)
        e = Engine(Scheduler(config, kv), SimulatedExecutor(depth=depth))
        prompts = [r for r in mixed_requests() if r.num_tokens < 80]
        for r in prompts:
            e.add_request(r)
        ended = run(e)
        results.append({r.request_id: (r.token_ids, r.finish_reason) for r in ended})
    assert results[0] == results[1]
    assert {reason for _, reason in results[0].values()} == {"stop", "length"}


def test_a_step_ahead_is_under_way_when_the_first_result_comes_in():
    kv = KVCacheManager(64, 4)
    executor = SimulatedExecutor(depth=2)
    e = Engine(Scheduler(SchedulerConfig(max_model_len=64), kv), executor)
    r = request("a", 5, max_tokens=3)
    e.add_request(r)
    assert e.step() == [] and r.num_output_tokens == 0
    assert e.step() == [r] and r.num_output_tokens == 1
    assert len(executor._submitted) == 1
    run(e)
    assert len(executor._submitted) == 0 and r.num_output_tokens == 3


class FailsOnce(SimulatedExecutor):
    def collect(self):
        result = super().collect()
        if self.broken:
            self.broken = False
            raise RuntimeError("boom")
        return result

    broken = False


@pytest.mark.parametrize("depth", [1, 2])
def test_a_failing_step_fails_its_requests_and_no_others(depth: int):
    kv = KVCacheManager(64, 4)
    executor = FailsOnce(depth=depth)
    e = Engine(Scheduler(SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=64), kv), executor)
    requests = [request(name, 5) for name in "abc"]
    for r in requests:
        e.add_request(r)
    executor.broken = True
    assert {r.request_id for r in e.step() or e.step()} == {"a", "b"}
    kv.check()
    assert run(e) == [requests[2]]
    assert [r.finish_reason for r in requests] == ["error", "error", "length"]
    assert requests[0].stop_reason == "boom"


def test_an_interrupt_aborts_the_step_and_leaves_the_engine_usable():
    def interrupt(plan):
        raise KeyboardInterrupt

    kv = KVCacheManager(64, 4)
    executor = SimulatedExecutor(step_cost=interrupt)
    e = Engine(Scheduler(SchedulerConfig(max_model_len=64), kv), executor)
    e.add_request(request("a", 5))
    with pytest.raises(KeyboardInterrupt):
        e.step()
    assert not e.has_unfinished and kv.usage().num_referenced_blocks == 0
    executor._step_cost = lambda plan: 0.0
    e.add_request(request("a", 5))
    run(e)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": []}, "prompt must hold at least one token"),
        ({"num_prompt": 64}, "prompt of 64 tokens .* max_model_len=64"),
        ({"n": 9}, r"n must be <= max_num_seqs \(8\), got 9"),
        ({"name": "busy"}, "'busy' is already in use"),
        ({"name": "busy#1"}, "'busy#1' is already in use"),
    ],
)
def test_bad_requests_are_refused_and_take_nothing(options, message):
    e = engine()
    e.add_request(request("busy", 5, n=2))
    options = {"name": "new", "num_prompt": 5} | options
    with pytest.raises(ValueError, match=message):
        e.add_request(request(**options))
    assert len(run(e)) == 2


def test_a_pool_too_small_for_max_model_len_names_both_numbers_and_the_knobs():
    with pytest.raises(ValueError, match=r"max_model_len=64 needs 16 blocks of 4 tokens, the pool has 8: .*override"):
        engine(num_blocks=8)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be >= 1, got 0"),
        ({"max_num_batched_tokens": 4}, r"max_num_batched_tokens must be >= max_num_seqs \(8\), got 4"),
        ({"watermark": 1.0}, r"watermark must be in \[0, 1\), got 1.0"),
    ],
)
def test_bad_limits_are_refused(limits, message):
    with pytest.raises(ValueError, match=message):
        engine(**limits)
