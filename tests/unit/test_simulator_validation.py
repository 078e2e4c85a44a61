"""The simulator's constants come from recorded results, and meet others that set none of them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from labkit.experiments.simulation_document import PAGE, recorded
from labkit.experiments.simulator_validation import validate
from labkit.kv_math import model_shape
from labkit.paths import data_path
from labkit.scheduling import Request, SamplingParams, ScheduledRequest, StepPlan
from labkit.simulation import DeviceCalibration, StepWork, calibrate, recorded_rows

FIGURES = ("predicted", "measured", "error")


@pytest.fixture(scope="module")
def validated() -> list[dict]:
    return validate()


def test_rates_and_step_times_are_predicted_within_15_percent(validated: list[dict]) -> None:
    checked = [row for row in validated if not row["fitted"]]
    assert {row["model"] for row in checked} == {"llama-2-7b", "llama-3-8b", "smollm2-135m"}
    for row in validated:
        allowed = 0.20 if row["quantity"] == "itl_p99_s" else 0.15  # a tail of few steps, neither rate nor step time
        assert abs(row["error"]) < allowed, row


DEVICE = DeviceCalibration(
    bytes_per_second=2e12,
    flops_per_second=3e14,
    seconds_per_layer=5e-5,
    host_seconds_per_step=1e-4,
    host_seconds_per_request=2e-6,
    host_seconds_per_output=3e-6,
    host_seconds_per_layer=1e-3,
)


def recorded_by(device: DeviceCalibration) -> list[dict]:
    """Rows as a machine with exactly these constants would record them."""
    rows: list[dict] = []
    for model, batch, context in (("llama-2-7b", 1, 512), ("llama-2-7b", 64, 512), ("smollm2-135m", 1, 512)):
        request = ScheduledRequest(Request("", [0], SamplingParams()), context - 1, 1, (), 1)
        seconds = device.step_cost(model_shape(model))(StepPlan(0, (request,) * batch))
        row = {"op": "decode step", "model": model, "batch": batch, "context": context, "step_ms": 1e3 * seconds}
        row |= {"schedule_ms": 0.1 + 0.002 * batch, "submit_ms": 0.0, "update_ms": 0.0, "rest_ms": 0.003 * batch}
        rows.append(row | {"wait_ms": 0.5 * row["step_ms"]})
    rows.append(rows[-1] | {"wait_ms": 0.0, "step_ms": 99.0})  # the host was the slower one: says nothing of the device
    lengths = [(0, 1532)] * 5 + [(0, 532)]
    entries = [ScheduledRequest(Request("", [0], SamplingParams()), a, b, (), b == 1532) for a, b in lengths]
    seconds = 6 * device.step_cost(model_shape("llama-2-7b"))(StepPlan(0, tuple(entries)))
    sharing = {"op": "prefix sharing", "model": "llama-2-7b", "num_requests": 64, "shared_tokens": 1500}
    served = {"system": "labkit", "workload": "256 at once", "model": "smollm2-135m", "num_prompt_tokens": 40_000}
    return [
        *rows,
        sharing | {"prefix_caching": False, "ttft_p50_s": seconds},
        served | {"ttft_p99_s": 5 * 30 * device.host_seconds_per_layer},
    ]


def test_calibration_finds_the_constants_of_a_machine_that_keeps_to_the_model() -> None:
    found = calibrate(recorded_by(DEVICE))
    for name in DeviceCalibration.__slots__:
        assert getattr(found, name) == pytest.approx(getattr(DEVICE, name), rel=0.03), name


def test_h200_constants_are_what_the_machine_can_reach() -> None:
    found = calibrate(recorded_rows())
    assert 3.5e12 < found.bytes_per_second < 4.8e12  # data sheet 4.8e12; one large read reached 4.6e12
    assert 4e14 < found.flops_per_second < 9.9e14


def test_attention_over_codes_is_slower_by_what_kernels_measured() -> None:
    decode = {"system": "labkit", "op": "decode", "heads": [32, 8, 128], "batch": "64x4096"}
    prefill = {"system": "labkit", "op": "prefill", "heads": [32, 8, 128], "batch": "1x8192"}
    kernels = [
        decode | {"kv_format": "bf16", "percent_of_ceiling": 90.0},
        decode | {"kv_format": "int4", "percent_of_ceiling": 45.0},
        prefill | {"kv_format": "int4", "ratio_to_bf16": 3.0},
        decode | {"kv_format": "bf16", "percent_of_ceiling": 1.0, "system": "another"},
        prefill | {"kv_format": "bf16", "tflops": 400.0},
    ]
    found = calibrate(recorded_by(DEVICE) + kernels)
    shape = model_shape("llama-2-7b")
    costs = {name: found.step_cost(shape, shape.kv_spec(name, block_size=32)) for name in ("bfloat16", "int8", "int4")}
    assert {name: tuple(cost.slowdown) for name, cost in costs.items()} == {
        "bfloat16": (1, 1),
        "int8": (1, 1),  # not measured
        "int4": (pytest.approx(2), pytest.approx(3)),
    }
    mixed = shape.kv_spec("int4", block_size=32).with_formats("bfloat16", layers=range(16))
    # Half of the layers have 4 bits a number, half 16: a fifth of the bytes takes twice as long.
    assert found.step_cost(shape, mixed).slowdown == pytest.approx((1.2, 2))
    with pytest.raises(ValueError, match="must hold decode of 64x4096"):
        calibrate(recorded_by(DEVICE) + kernels[1:])
    # A step of nothing but context: twice the time of its bytes.
    bytes_alone = replace(costs["int4"], weight_bytes=0, seconds_per_step=0, attention_flops_per_pair=0)
    work = StepWork(0, 0, num_context=1000, num_pairs=0, num_samples=0)
    assert bytes_alone.seconds(work) == pytest.approx(
        2 * 1000 * bytes_alone.kv_bytes_per_token / found.bytes_per_second
    )


def test_missing_rows_are_named() -> None:
    rows = recorded_by(DEVICE)
    with pytest.raises(ValueError, match="at least 4 with op 'decode step', got 3"):
        calibrate(rows[1:])
    with pytest.raises(ValueError, match='serving requests "at once", got none'):
        calibrate(rows[:-1])


def test_the_shipped_table_and_page_are_what_the_recorded_results_give(validated: list[dict]) -> None:
    # If this fails after new recordings: labkit experiment simulator --out data/results/simulation/simulator.json, then
    # python -m labkit.experiments.simulation_document
    shipped = json.loads(data_path("results/simulation/simulator.json").read_text(encoding="utf-8"))["rows"]
    for row, recomputed in zip(shipped, validated, strict=True):
        assert row == {**recomputed, **{name: pytest.approx(recomputed[name], rel=1e-3, abs=1e-3) for name in FIGURES}}
    assert PAGE.read_text(encoding="utf-8") == recorded()
