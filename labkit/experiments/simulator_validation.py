"""Does the simulator tell the truth? Its predictions beside what was recorded on an H200.

``labkit experiment simulator`` prints them; docs/simulation.md shows them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from labkit.kv_math import ModelShape, model_shape
from labkit.memory import KVCacheManager
from labkit.observe import BlocksShared, BlocksSwappedIn, RequestPreempted, StepRecord, Trace
from labkit.paths import data_path
from labkit.scheduling import Request, SamplingParams, ScheduledRequest, Scheduler, SchedulerConfig, StepPlan
from labkit.simulation import DeviceCalibration, SimulatedExecutor, calibrate, recorded_rows, served_at_once, simulate
from labkit.simulation.calibration import OWN_TOKENS, TOKEN_BUDGET

from .serving_workload import standard_workload

TRACE, TRACE_MODEL = "results/h200/azure_conv_smollm2.trace", "smollm2-135m"
STALL_SECONDS = 1.0
"""A recorded step longer than this is left out: something else than the step was waited for."""

Row = dict[str, Any]
Recorded = Mapping[str, Any]


def validate() -> list[Row]:
    """One row for each predicted quantity: source, model, quantity, predicted, measured, error, fitted.

    ``error`` is predicted / measured - 1, times are in seconds. ``fitted`` rows are those that the constants were
    chosen to meet. The others, among them a whole model (llama-3-8b) and a whole run (the trace), set no constant; but
    they are no blind test, as the form of the cost model was chosen with them in view.
    """
    rows = recorded_rows()
    device = calibrate(rows)
    checked = [_decode_row(row, device) for row in rows if row.get("op") == "decode step"]
    fitted_launch = min(served_at_once(rows), key=lambda row: row["ttft_p99_s"])
    for row in served_at_once(rows):
        checked += _serve_rows(row, device, fitted=("ttft_p99_s",) if row is fitted_launch else ())
    checked += [_shared_row(row, device) for row in rows if row.get("op") == "prefix sharing" and row["prefix_caching"]]
    return checked + _trace_rows(Trace.load(data_path(TRACE)), device, model_shape(TRACE_MODEL))


def _decode_row(row: Recorded, device: DeviceCalibration) -> Row:
    """A steady decode step, streamed as it was recorded."""
    shape, batch = model_shape(row["model"]), row["batch"]
    executor = device.executor(shape, streaming=True)
    request = Request("", [0], SamplingParams())
    plan = StepPlan(0, (ScheduledRequest(request, row["context"] - 1, 1, (), 1),) * batch)
    predicted = _step_seconds([plan] * 4, executor)[-1]
    return _row(f"decode, {batch} × {row['context']:,}", row["model"], "step", predicted, row["step_ms"] / 1e3, True)


def _serve_rows(row: Recorded, device: DeviceCalibration, fitted: Sequence[str]) -> list[Row]:
    """The serving benchmark, request by request, through the real scheduler and allocator."""
    shape = model_shape(row["model"])
    requests = [
        Request(
            str(number),
            request.prompt_token_ids,
            SamplingParams(max_tokens=request.num_output_tokens, ignore_eos=True),
            arrival_time=0.0,
        )
        for number, request in enumerate(standard_workload(shape.vocab_size, row["num_requests"]))
    ]
    config = SchedulerConfig(256, TOKEN_BUDGET, 2048)
    kv = KVCacheManager(config.max_num_seqs * 128, 16, enable_prefix_caching=False)
    executor = device.executor(shape)
    stats = simulate(requests, Scheduler(config, kv), executor).stats
    predicted = {
        "tokens_per_second": row["num_output_tokens"] / executor.now(),
        "ttft_p50_s": stats.time_to_first_token(50),
        "ttft_p99_s": stats.time_to_first_token(99),
        "itl_p50_s": stats.inter_token_latency(50),
        "itl_p99_s": stats.inter_token_latency(99),
    }
    name = f"serve, {row['workload']}"
    return [
        _row(name, row["model"], quantity, value, row[quantity], quantity in fitted)
        for quantity, value in predicted.items()
    ]


def _shared_row(row: Recorded, device: DeviceCalibration) -> Row:
    """Prompts whose beginning is in the prefix cache when they come, all at once."""
    shape, num_shared = model_shape(row["model"]), row["shared_tokens"]
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    first = Request("first", [*range(num_shared), -1], params, arrival_time=0.0)
    requests = [
        Request(str(i), [*range(num_shared), *range(1000 * i, 1000 * i + OWN_TOKENS)], params, arrival_time=60.0)
        for i in range(1, row["num_requests"] + 1)
    ]
    config = SchedulerConfig(256, TOKEN_BUDGET, 2048)
    executor = device.executor(shape)
    engine = simulate([first, *requests], Scheduler(config, KVCacheManager(128 * 256, 16)), executor)
    predicted = engine.stats.time_to_first_token(50)
    return _row("shared prefix", row["model"], "ttft_p50_s", predicted, row["ttft_p50_s"], False)


def _trace_rows(trace: Trace, device: DeviceCalibration, shape: ModelShape) -> list[Row]:
    """The recorded steps one by one: how long would each have taken?"""
    executor = device.executor(shape, streaming=True)
    predicted = _step_seconds(list(recorded_plans(trace)), executor)
    measured = [step.end - before.end for before, step in zip(trace.steps, trace.steps[1:], strict=False)]
    # With depth 2 a step's prompts are launched in the interval of the step before it.
    launches = [max(step.num_scheduled_tokens, default=0) > 1 for step in trace.steps[2:]]
    times = [
        (*seconds, launch)
        for *seconds, launch in zip(predicted[1:], measured, launches, strict=False)
        if seconds[1] < STALL_SECONDS
    ]
    decode, prompts = ([t for t in times if t[2] is launch] for launch in (False, True))
    name = f"recorded run, {len(times):,} steps"
    return [
        _row(name, shape.name, quantity, summary(t[0] for t in chosen), summary(t[1] for t in chosen), False)
        for quantity, summary, chosen in (
            ("decode step, median", median, decode),
            ("step with prompts, median", median, prompts),
            ("all steps", sum, times),
        )
    ]


def recorded_plans(trace: Trace) -> Iterator[StepPlan]:
    """The steps of ``trace`` as plans for a simulated executor: who ran, from which token on, for how many."""
    num_computed: dict[str, int] = {}
    num_given: dict[str, int] = {}  # by the prefix cache or from host memory
    for record in trace:
        for event in record.events:
            if isinstance(event, BlocksShared | BlocksSwappedIn):
                num_given[event.request_id] = event.num_tokens
        yield _plan(record, num_computed, num_given)
        for event in record.events:
            if isinstance(event, RequestPreempted):
                num_computed.pop(event.request_id, None)


def _plan(record: StepRecord, num_computed: dict[str, int], num_given: dict[str, int]) -> StepPlan:
    entries = []
    for request_id, num_tokens in zip(record.scheduled_ids, record.num_scheduled_tokens, strict=True):
        first = num_computed.get(request_id, num_given.pop(request_id, 0))
        num_computed[request_id] = first + num_tokens
        request = Request(request_id, [0], SamplingParams())
        entries.append(ScheduledRequest(request, first, num_tokens, (), int(request_id in record.sampled_ids)))
    return StepPlan(record.step, tuple(entries))


def _step_seconds(plans: Sequence[StepPlan], executor: SimulatedExecutor) -> list[float]:
    """Seconds between the ends of successive steps, when each is submitted before the one before is collected."""
    ends = []
    executor.submit(plans[0])
    for plan in plans[1:]:
        executor.submit(plan)
        executor.collect()
        ends.append(executor.now())
    return [end - before for before, end in zip([0.0, *ends], ends, strict=False)]


def _row(source: str, model: str, quantity: str, predicted: float, measured: float, fitted: bool) -> Row:
    return {
        "source": source,
        "model": model,
        "quantity": quantity,
        "predicted": predicted,
        "measured": measured,
        "error": predicted / measured - 1,
        "fitted": fitted,
    }
