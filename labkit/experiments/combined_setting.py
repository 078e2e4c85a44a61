"""One model under one memory cap: what each rung should hold and how fast it should be, before anything runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from labkit.core import Engine
from labkit.engine.decode_graphs import capture_sizes
from labkit.engine.memory_plan import BYTES_PER_GRAPH
from labkit.kv_math import GIB, GPU, CapacityPlan, ModelShape, plan_capacity
from labkit.memory import ContiguousKVManager, KVCacheManager, reserve_max
from labkit.scheduling import Scheduler, SchedulerConfig, StaticScheduler
from labkit.simulation import DeviceCalibration, SimulatedExecutor

from .combined_capacity import expected_concurrency
from .combined_rungs import Rung
from .combined_traffic import Traffic, traffic
from .combined_window import Load, steady_window

GPU_MEMORY_UTILIZATION = 0.9


class Limits(NamedTuple):
    """What the engine is told."""

    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True)
class Setting:
    """What stays the same from rung to rung.

    Attributes:
        shape: the model; its number of KV heads is each rung's own.
        device: "cuda" or "cpu". On a CPU the engine sets nothing aside, and pool and weights fill the cap.
        memory_limit: GiB.
        context: longest request, in tokens.
    """

    shape: ModelShape
    device: str
    memory_limit: float
    context: int

    @property
    def dtype(self) -> str:
        """Of weights and unquantised cache."""
        return "bfloat16" if self.device == "cuda" else "float32"

    def shape_of(self, rung: Rung) -> ModelShape:
        """The model with the rung's KV heads: one for each query head, or as many as divide them and are at most 8."""
        heads = self.shape.num_heads
        few = max(n for n in range(1, min(8, max(1, heads // 2)) + 1) if heads % n == 0)
        return replace(self.shape, num_kv_heads=few if rung.few_kv_heads else heads)

    def traffic(self, rung: Rung, lengths: str) -> Traffic:
        """Who comes."""
        return traffic(lengths, self.context, self.shape.vocab_size, shares_prefix=rung.shares_prefix)

    def plan(self, rung: Rung, limits: Limits) -> CapacityPlan:
        """The closed form, with what the engine sets aside beside weights and pool."""
        shape = self.shape_of(rung)
        kv_dtype = self.dtype if rung.kv_cache_dtype == "auto" else rung.kv_cache_dtype
        tails = shape.kv_spec(kv_dtype, rung.block_size).bytes_for_tails(limits.max_num_seqs, self.dtype)
        on_gpu = self.device == "cuda"
        capped = GPU("capped device", int(self.memory_limit * GIB), 1.0, 1.0, (9, 0), "memory_limit")
        return plan_capacity(
            capped,
            shape,
            dtype=self.dtype,
            kv_dtype=kv_dtype,
            block_size=rung.block_size,
            gpu_memory_utilization=GPU_MEMORY_UTILIZATION if on_gpu else 1.0,
            activation_bytes=tails + (_set_aside(shape, limits) if on_gpu else 0),
            max_model_len=self.context,
        )

    def limits(self, rung: Rung, lengths: str) -> Limits:
        """Wide enough that memory decides: more requests than it holds, and tokens for all their prompts.

        Not much wider, since each request and token that may run takes some memory. A request that leaves after
        E[output] steps brings a new prompt, so a step has (1 + E[prompt] / E[output]) tokens for each that runs.
        """
        who = self.traffic(rung, lengths)
        prompt = max(1.0, float(np.mean(who.prompts - np.minimum(who.shared, who.prompts))))
        tokens_each = 1 + prompt / float(np.mean(who.outputs))
        most, at_least = (2048, 2048) if self.device == "cuda" else (256, 256)
        limits = Limits(16, at_least)
        while limits.max_num_seqs < most:
            expected = expected_concurrency(rung, who, self.plan(rung, limits).num_blocks)
            if 1.15 * expected + 12 <= limits.max_num_seqs:
                break
            wider = min(most, limits.max_num_seqs + limits.max_num_seqs // 16 + 1)
            limits = Limits(wider, max(at_least, int(wider * tokens_each)))
        return limits

    def predict(
        self, rung: Rung, lengths: str, seconds: float, ramp: float, calibration: DeviceCalibration | None
    ) -> dict[str, Any]:
        """Concurrency by the closed form, tokens/s by the simulator; None for the latter without a calibration.

        Concurrency is at most what :meth:`limits` admits, on a device too small to be given as many as memory holds.
        """
        limits = self.limits(rung, lengths)
        plan = self.plan(rung, limits)
        who = self.traffic(rung, lengths)
        concurrency = min(limits.max_num_seqs, round(expected_concurrency(rung, who, plan.num_blocks)))
        predicted: dict[str, Any] = {"predicted_concurrency": concurrency, "predicted_tokens_per_second": None}
        if calibration is not None:
            executor = calibration.executor(self.shape_of(rung), plan.spec)
            figures = serve_window(Engine(self.scheduler(rung, limits), executor), who, concurrency, seconds, ramp)
            predicted["predicted_tokens_per_second"] = figures["tokens_per_second"]
            predicted["predicted_itl_p99_s"] = figures["itl_p99_s"]
        return predicted

    def scheduler(self, rung: Rung, limits: Limits) -> Scheduler:
        """The scheduler and allocator that the engine would have."""
        plan = self.plan(rung, limits)
        config = SchedulerConfig(limits.max_num_seqs, limits.max_num_batched_tokens, self.context)
        if rung.kv_allocator == "paged":
            kv = KVCacheManager(plan.num_blocks, plan.spec.block_size, enable_prefix_caching=rung.shares_prefix)
        else:
            kv = ContiguousKVManager(plan.num_blocks, plan.spec.block_size, reserve_max(self.context))
        return (StaticScheduler if rung.scheduler == "static" else Scheduler)(config, kv)


def serve_window(engine: Engine, who: Traffic, concurrency: int, seconds: float, ramp: float = 0.0) -> dict[str, Any]:
    """Bring ``engine`` into a steady state, then :func:`steady_window`.

    The way there is simulated: the same scheduler and allocator step with an executor that computes nothing, until
    requests are as mixed as after one turnover. Then the engine's own executor takes over in the middle, at block
    tables of a steady state and K and V that are whatever the pool held; how fast it is does not depend on them.
    """
    executor = engine.executor
    executor.submit(engine.scheduler.schedule())  # an empty step: who has ended, so that it keeps nothing for them
    executor.collect()
    engine.executor = SimulatedExecutor(next_token=lambda request, _: request.num_tokens % who.vocab_size)
    load = Load(engine, who, concurrency)
    load.settle()
    engine.executor = executor
    return steady_window(load, seconds, ramp)


def _set_aside(shape: ModelShape, limits: Limits) -> int:
    """Bytes that the engine should set aside on a GPU: its largest step, and CUDA graphs."""
    num_seqs, num_tokens = limits
    sizes = capture_sizes(num_seqs)
    logits = 2 * sum(sizes) * shape.vocab_size
    graphs = _step_bytes(shape, num_seqs, num_seqs) + logits + len(sizes) * BYTES_PER_GRAPH
    return _step_bytes(shape, num_tokens, num_seqs) + graphs


def _step_bytes(shape: ModelShape, num_tokens: int, num_seqs: int) -> int:
    """Bytes alive at once in a step of fused layers in 16 bit.

    Either in a feed-forward block: residual, its norm, gate and up together, their product; or at the end: hidden
    states, logits in 16 and 32 bit, probabilities.
    """
    feed_forward = 2 * num_tokens * (2 * shape.hidden_size + 3 * shape.intermediate_size)
    sampling = 2 * num_tokens * shape.hidden_size + (2 + 4 + 4) * num_seqs * shape.vocab_size
    return max(feed_forward, sampling)
