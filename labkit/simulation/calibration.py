"""What a device reaches, fitted to recorded steps, so that the simulator can speak of models that did not run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, hypot
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.kv_math import GPU, KVCacheSpec, ModelShape, gpu, model_shape
from labkit.paths import data_path

from .cost_model import HostCost, RooflineCost, StepWork
from .executor import SimulatedExecutor
from .quantised_attention import Slowdown, measured_slowdowns, slowdown_of

Row = Mapping[str, Any]
"""A recorded result."""

TOKEN_BUDGET = 8192
"""Tokens of a step in the recorded runs: the engine's default on a GPU."""

OWN_TOKENS = 32
"""Tokens that each prompt of the prefix-sharing run has behind the shared ones."""


@dataclass(frozen=True, slots=True)
class DeviceCalibration:
    """The constants of a device and its host under this engine; a model's shape turns them into costs.

    Attributes:
        bytes_per_second, flops_per_second: what kernels reach, not the data sheet's.
        seconds_per_layer: device time of a layer that neither moves nor computes.
        host_seconds_per_step, host_seconds_per_request: host work of a step that only decodes.
        host_seconds_per_output: host time to hand a request's newest token out, as ``LLM.step`` does each step and
            ``LLM.generate`` does not.
        host_seconds_per_layer: host time to launch a layer's kernels one by one, in a step with prompt tokens.
        slowdowns: of attention over a quantised KV cache, by dtype name.
    """

    bytes_per_second: float
    flops_per_second: float
    seconds_per_layer: float
    host_seconds_per_step: float
    host_seconds_per_request: float
    host_seconds_per_output: float
    host_seconds_per_layer: float
    slowdowns: Mapping[str, Slowdown] = field(default_factory=dict)

    def step_cost(self, model: ModelShape, spec: KVCacheSpec | None = None) -> RooflineCost:
        """Device seconds of a step of ``model`` in 16 bit, with the KV cache of ``spec`` (16 bit if None)."""
        cost = _roofline(model, self.bytes_per_second, self.flops_per_second, self.seconds_per_layer, spec)
        return replace(cost, slowdown=slowdown_of(spec, self.slowdowns))

    def host_cost(self, model: ModelShape, *, streaming: bool = False) -> HostCost:
        """Host seconds of a step of ``model``; ``streaming`` hands each token out as it comes."""
        per_request = self.host_seconds_per_request + streaming * self.host_seconds_per_output
        return HostCost(self.host_seconds_per_step, per_request, self.host_seconds_per_layer * model.num_layers)

    def executor(
        self, model: ModelShape, spec: KVCacheSpec | None = None, *, streaming: bool = False
    ) -> SimulatedExecutor:
        """An executor that takes as long as ``model`` would; host and device overlap, as in the engine."""
        return SimulatedExecutor(
            self.step_cost(model, spec), depth=2, host_cost=self.host_cost(model, streaming=streaming)
        )


def recorded_rows() -> list[Row]:
    """H200 results for :func:`calibrate`: of the run in which the trace that ships was recorded, and of kernels."""
    files = (data_path(f"results/h200/{name}.json") for name in ("calibration", "quant"))
    return [row for file in files for row in json.loads(file.read_text(encoding="utf-8"))["rows"]]


def calibrate(rows: Iterable[Row], device: str | GPU = "h200") -> DeviceCalibration:
    """Fit a device's constants to recorded ``rows``; other rows are passed over.

    ======================  ============================================================================================
    op "decode step"        host parts of all, and the step time of those in which the host waited for the device
    op "prefix sharing"     without caching: the median time to first token, which is steps full of prompt tokens
    served all at once      the 99th percentile of the time to first token, of the model where it is shortest: there
                            the host, which launches kernels one by one, is what the prompts wait for
    op "decode", "prefill"  attention over quantised pages beside the same in 16 bit (may be missing)
    ======================  ============================================================================================

    Step time is linear in the constants once it is known what share of it memory and arithmetic have: so begin with
    the data sheet of ``device``, solve, look at the shares again, and so on until nothing changes. What is made small
    is the sum of squared relative errors. Raises ValueError if rows are missing.
    """
    rows = list(rows)
    decode = _of(rows, "decode step", at_least=4)
    batches = [[1.0, row["batch"]] for row in decode]
    work = [(row["schedule_ms"] + row["submit_ms"] + row["update_ms"]) / 1e3 for row in decode]
    host_per_step, host_per_request = _least_squares(batches, work).tolist()
    outputs = _least_squares([batch[1:] for batch in batches], [row["rest_ms"] / 1e3 for row in decode])

    waited = [_decode_step(row) for row in decode if row["wait_ms"] > 0.05 * row["step_ms"]]
    prefill = [_prefill_step(row) for row in _of(rows, "prefix sharing", at_least=1) if not row["prefix_caching"]]
    per_byte, per_flop, per_layer = _fit_roofline([*waited, *prefill], device)
    return DeviceCalibration(
        bytes_per_second=1 / per_byte,
        flops_per_second=1 / per_flop,
        seconds_per_layer=per_layer,
        host_seconds_per_step=host_per_step,
        host_seconds_per_request=host_per_request,
        host_seconds_per_output=float(outputs[0]),
        host_seconds_per_layer=min(map(_launch_seconds_per_layer, served_at_once(rows))),
        slowdowns=measured_slowdowns(rows),
    )


def served_at_once(rows: Iterable[Row]) -> list[Row]:
    """The rows of labkit serving requests that were all there at the start; ValueError if there are none."""
    served = [row for row in rows if row.get("system") == "labkit" and row.get("workload", "").endswith("at once")]
    if not served:
        raise ValueError('rows must hold at least one of labkit serving requests "at once", got none')
    return served


def _of(rows: Sequence[Row], op: str, *, at_least: int) -> list[Row]:
    found = [row for row in rows if row.get("op") == op]
    if len(found) < at_least:
        raise ValueError(f"rows must hold at least {at_least} with op {op!r}, got {len(found)}")
    return found


def _launch_seconds_per_layer(row: Row) -> float:
    num_steps = ceil(row["num_prompt_tokens"] / TOKEN_BUDGET)
    return row["ttft_p99_s"] / num_steps / model_shape(row["model"]).num_layers


def _decode_step(row: Row) -> tuple[ModelShape, StepWork, float]:
    batch, num_context = row["batch"], row["batch"] * row["context"]
    return model_shape(row["model"]), StepWork(batch, batch, num_context, num_context, batch), row["step_ms"] / 1e3


def _prefill_step(row: Row) -> tuple[ModelShape, StepWork, float]:
    """A step full of prompts that share nothing: the median request has its token after so many of them."""
    length = row["shared_tokens"] + OWN_TOKENS
    num_steps = ceil(row["num_requests"] / 2 * length / TOKEN_BUDGET)
    num_requests = TOKEN_BUDGET // length
    work = StepWork(num_requests, TOKEN_BUDGET, TOKEN_BUDGET, TOKEN_BUDGET * length // 2, num_requests)
    return model_shape(row["model"]), work, row["ttft_p50_s"] / num_steps


def _fit_roofline(steps: Sequence[tuple[ModelShape, StepWork, float]], device: str | GPU) -> tuple[float, float, float]:
    """Seconds a byte, a FLOP and a layer, from steps with their measured seconds."""
    start = device if isinstance(device, GPU) else gpu(device)
    constants = np.array([1 / start.bandwidth, 1 / start.flops_16bit, 0.0])
    for _ in range(50):
        terms = [_terms(shape, work, *constants[:2].tolist()) for shape, work, _ in steps]
        before, constants = constants, _least_squares(terms, [seconds for _, _, seconds in steps])
        if np.allclose(before, constants, rtol=1e-6, atol=0):
            break
    per_byte, per_flop, per_layer = constants.tolist()
    if min(per_byte, per_flop, per_layer) <= 0:
        raise ValueError("rows do not tell memory, arithmetic and fixed time apart: more kinds of steps are needed")
    return per_byte, per_flop, per_layer


def _terms(shape: ModelShape, work: StepWork, per_byte: float, per_flop: float) -> list[float]:
    """What seconds a byte, a FLOP and a layer are multiplied with, near these values.

    hypot(memory, arithmetic) = memory x (memory / hypot) + arithmetic x (arithmetic / hypot).
    """
    cost = _roofline(shape, 1 / per_byte, 1 / per_flop)
    reads = (cost.weight_bytes, work.num_context * cost.kv_bytes_per_token)
    num_bytes = num_flops = 0.0
    for read, computed in zip(reads, cost.flops(work), strict=True):
        memory, arithmetic = read * per_byte, computed * per_flop
        num_bytes += read * memory / hypot(memory, arithmetic)
        num_flops += computed * arithmetic / hypot(memory, arithmetic)
    return [num_bytes, num_flops, shape.num_layers]


def _roofline(
    shape: ModelShape,
    bytes_per_second: float,
    flops_per_second: float,
    seconds_per_layer: float = 0.0,
    spec: KVCacheSpec | None = None,
) -> RooflineCost:
    head = shape.vocab_size * shape.hidden_size
    num_used = shape.num_params_used(1)
    return RooflineCost(
        weight_bytes=2 * num_used,
        num_parameters=num_used - head,
        num_head_parameters=head,
        kv_bytes_per_token=(spec or shape.kv_spec()).bytes_per_token,
        attention_flops_per_pair=4 * shape.num_layers * shape.num_heads * shape.head_dim,
        bytes_per_second=bytes_per_second,
        flops_per_second=flops_per_second,
        seconds_per_step=seconds_per_layer * shape.num_layers,
    )


def _least_squares(terms: Sequence[Sequence[float]], seconds: Sequence[float]) -> NDArray[np.float64]:
    """Constants for which ``terms @ constants`` is nearest to ``seconds``, in relative terms."""
    relative = np.array(terms, dtype=np.float64) / np.array(seconds)[:, None]
    scale = np.abs(relative).max(axis=0)  # FLOP and layers are ten powers of ten apart
    return np.linalg.lstsq(relative / scale, np.ones(len(seconds)), rcond=None)[0] / scale
