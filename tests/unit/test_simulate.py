"""Simulation: arrivals enter on the simulated clock, and a step costs what the roofline says."""

import math
import random
from dataclasses import replace

import pytest

from labkit.memory import KVCacheManager
from labkit.observe import Trace
from labkit.scheduling import Request, SamplingParams, ScheduledRequest, Scheduler, SchedulerConfig, StepPlan
from labkit.simulation import HostCost, RooflineCost, SimulatedExecutor, StepWork, simulate

COST = RooflineCost(
    weight_bytes=1000,
    num_parameters=500,
    kv_bytes_per_token=10,
    attention_flops_per_pair=4,
    bytes_per_second=100.0,
    flops_per_second=1000.0,
    seconds_per_step=0.5,
    seconds_per_request=0.25,
)


def entry(num_computed: int, num_scheduled: int) -> ScheduledRequest:
    request = Request("a", [1] * (num_computed + num_scheduled), SamplingParams())
    return ScheduledRequest(request, num_computed, num_scheduled, [], 1)


def test_a_decode_step_costs_the_bytes_it_reads():
    # matrices: 1000 bytes at 100/s, 2 x 500 x 2 FLOP at 1000/s; attention: (20 + 30) x 10 bytes, 4 x 50 FLOP
    expected = math.hypot(10, 2) + math.hypot(5, 0.2) + 0.5 + 2 * 0.25
    assert COST(StepPlan(0, (entry(19, 1), entry(29, 1)))) == pytest.approx(expected)


def test_a_prefill_step_costs_its_arithmetic():
    # 2 x 500 x 100 FLOP of matrices, 4 x (1 + 2 + ... + 100) of causal attention
    expected = math.hypot(10, 100) + math.hypot(10, 20.2) + 0.75
    assert COST(StepPlan(0, (entry(0, 100),))) == pytest.approx(expected)


def test_only_sampled_positions_pay_for_the_output_projection():
    cost = replace(COST, num_head_parameters=700)
    decode, prefill = StepWork(4, 4, 4, 4, 4), StepWork(1, 4, 4, 10, 1)
    assert cost.flops(decode)[0] == 2 * 4 * (500 + 700)
    assert cost.flops(prefill)[0] == 2 * (4 * 500 + 700)


def test_the_host_works_beside_the_device_only_with_depth_2():
    # 10 steps of 3 s on the device and 2 s on the host; with a prompt the host takes 7 s
    host = HostCost(seconds_per_step=1.0, seconds_per_request=1.0, seconds_per_launch=5.0)
    for depth, seconds in ((1, 7 + 3 + 9 * (2 + 3)), (2, 7 + 3 + 9 * 3)):
        executor = SimulatedExecutor(lambda plan: 3.0, depth=depth, host_cost=host)
        request = Request("a", [1] * 10, SamplingParams(max_tokens=10, ignore_eos=True), arrival_time=0.0)
        simulate([request], scheduler(), executor)
        assert executor.now() == seconds
    slow_host = SimulatedExecutor(lambda plan: 1.0, depth=2, host_cost=host)
    simulate([Request("a", [1] * 10, SamplingParams(max_tokens=10, ignore_eos=True))], scheduler(), slow_host)
    assert slow_host.now() == 7 + 9 * 2 + 1  # the device waits for the host


def test_a_machine_without_speed_is_refused():
    with pytest.raises(ValueError, match="bytes_per_second must be > 0, got 0"):
        RooflineCost(1, 1, 1, 1, bytes_per_second=0, flops_per_second=1)


def scheduler() -> Scheduler:
    return Scheduler(
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=128), KVCacheManager(64, 4)
    )


def timed_requests(times: list[float]) -> list[Request]:
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    return [Request(f"r{i}", [i] * 10, params, arrival_time=t) for i, t in enumerate(times)]


def test_the_clock_waits_for_arrivals_and_steps_move_it():
    trace = Trace(64, 4)
    executor = SimulatedExecutor(step_cost=lambda plan: 1.0)
    engine = simulate(timed_requests([5.0, 6.5, 100.0]), scheduler(), executor, trace=trace)
    assert [(s.start, s.scheduled_ids) for s in trace][:3] == [(5.0, ("r0",)), (6.0, ("r0",)), (7.0, ("r0", "r1"))]
    assert executor.now() == 104.0
    assert engine.stats.num_finished == {"length": 3}
    assert engine.stats.time_to_first_token(0) == 1.0 and engine.stats.time_to_first_token(100) == 1.5


def test_arrivals_out_of_order_are_refused():
    with pytest.raises(ValueError, match=r"in order of arrival_time, got 'r1' at 1\.0 after 2\.0"):
        simulate(timed_requests([2.0, 1.0]), scheduler(), SimulatedExecutor())


def test_an_overload_queues_and_drains():
    rng, time, requests = random.Random(0), 0.0, []
    for i in range(300):
        time += rng.expovariate(1.0)
        params = SamplingParams(max_tokens=rng.randint(1, 20), ignore_eos=True)
        requests.append(
            Request(f"r{i}", [rng.randrange(9) for _ in range(rng.randint(1, 60))], params, arrival_time=time)
        )
    most_waiting = 0

    def watch(engine):
        nonlocal most_waiting
        most_waiting = max(most_waiting, len(engine.scheduler.waiting))

    engine = simulate(requests, scheduler(), SimulatedExecutor(step_cost=lambda plan: 0.4), on_step=watch)
    assert engine.stats.num_finished == {"length": 300}
    assert most_waiting > 10
    assert all(r.num_output_tokens == r.sampling_params.max_tokens for r in requests)
