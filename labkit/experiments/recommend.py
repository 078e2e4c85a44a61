"""Which KV format for this GPU and model, from what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pandas as pd

from labkit.kv_math import GPU, CapacityPlan, ModelShape, plan_capacity, usual_block_size
from labkit.kv_math import gpu as gpu_named
from labkit.quant import KVPolicy

from .kv_quality import Row
from .quality_policies import quality_policies
from .recorded import results
from .recorded_quality import recorded_quality


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The cheapest policy within a quality budget.

    Attributes:
        name, policy: what to use: ``LLM(kv_cache_dtype=recommendation.policy)``; one with scales fixed before a run
            needs them from :func:`~labkit.experiments.calibration.calibrate`.
        plan, unquantised: what the GPU holds with it, and with a 16-bit cache.
        evidence: every measured policy with its loss, bytes of a request of ``max_model_len`` tokens, and why it was
            passed over ("" for those that could have been chosen).
        measured_on: the model that the evidence comes from.
    """

    name: str
    policy: KVPolicy
    plan: CapacityPlan
    unquantised: CapacityPlan
    evidence: pd.DataFrame
    measured_on: str

    @property
    def bytes_saved_per_request(self) -> int:
        """Bytes that a request of ``max_model_len`` tokens takes less than in 16 bit, tails included."""
        return _request_bytes(self.unquantised) - _request_bytes(self.plan)

    @property
    def max_batch(self) -> tuple[int, int]:
        """Requests of ``max_model_len`` tokens that fit: with the policy, and in 16 bit."""
        return self.plan.max_concurrency(), self.unquantised.max_concurrency()

    def __str__(self) -> str:
        row = self.evidence[self.evidence["policy"] == self.name].iloc[0]
        batch, before = self.max_batch
        share = self.bytes_saved_per_request / _request_bytes(self.unquantised)
        loss = f"{row['delta_ppl_percent']:+.2f} % perplexity (dNLL {row['dnll']:.4f} ± {row['dnll_se']:.4f})"
        return (
            f"{self.name}: {loss} on {row['tokens']:,} tokens of {row['text']} ({self.measured_on}), "
            f"{share:.0%} fewer bytes a request, "
            f"{batch:,} requests of {self.plan.max_model_len:,} tokens on {self.plan.gpu.name} instead of {before:,}"
        )


def recommend(
    gpu: str | GPU,
    model: str | ModelShape,
    quality_budget: float,
    *,
    rows: Sequence[Row] | None = None,
    policies: Mapping[str, KVPolicy] | None = None,
    max_model_len: int | None = None,
    num_gpus: int = 1,
    gpu_memory_utilization: float = 0.9,
) -> Recommendation:
    """The policy with the fewest bytes a request whose measured loss is within ``quality_budget`` percent perplexity.

    ``rows`` are the evidence: those of :func:`~labkit.experiments.kv_quality.kv_quality` on your model, for
    ``policies`` by name. Without them it is the recorded ones of the embedded model, which is small and loses more or
    less than yours: measure before you rely on it. Equal bytes: the smaller loss. Raises ValueError if no measured
    policy is within the budget and runs on this GPU, naming the nearest, and as :func:`plan_capacity` does.
    """
    if not quality_budget > 0:
        raise ValueError(f"quality_budget must be > 0 percent of perplexity, got {quality_budget}")
    the_gpu = gpu_named(gpu) if isinstance(gpu, str) else gpu
    known = quality_policies() if policies is None else policies
    options = {"max_model_len": max_model_len, "num_gpus": num_gpus, "gpu_memory_utilization": gpu_memory_utilization}
    unquantised = plan_capacity(the_gpu, model, **options)
    evidence, plans = [], {}
    for row in recorded_quality() if rows is None else rows:
        policy = known.get(row["policy"])
        if policy is None:  # the unquantised row, or one whose policy nobody named
            continue
        plans[row["policy"]] = plan = _plan_for(policy, unquantised)
        evidence.append(row | {"request_bytes": _request_bytes(plan), "passed_over": ""})
        if reason := _why_it_cannot_run(plan):
            evidence[-1]["passed_over"] = reason
        elif row["delta_ppl_percent"] > quality_budget:
            evidence[-1]["passed_over"] = f"loses more than {quality_budget:g} %"
        elif _request_bytes(plan) >= _request_bytes(unquantised):
            evidence[-1]["passed_over"] = "saves nothing"
    fitting = [row for row in evidence if not row["passed_over"]]
    if not fitting:
        runs = [row for row in evidence if row["passed_over"].startswith("loses")]
        best = min(runs, key=lambda row: row["delta_ppl_percent"], default=None)
        nearest = f"{best['policy']!r} loses {best['delta_ppl_percent']:.3f} %" if best else "none, saves bytes"
        raise ValueError(
            f"quality_budget must be what some measured policy keeps on {the_gpu.name}, got {quality_budget:g} %: "
            f"the nearest, {nearest}"
        )
    measured_on = results("quality.json")["provenance"]["model"] if rows is None else "the given rows"
    chosen = min(fitting, key=lambda row: (row["request_bytes"], row["delta_ppl_percent"]))["policy"]
    return Recommendation(chosen, known[chosen], plans[chosen], unquantised, pd.DataFrame(evidence), measured_on)


def _plan_for(policy: KVPolicy, unquantised: CapacityPlan) -> CapacityPlan:
    """The same plan with the cache in ``policy``, in blocks of the usual size."""
    layers = range(unquantised.spec.num_layers)
    formats = [format for layer in layers for format in policy.formats(layer, len(layers))]
    spec = type(unquantised.spec).from_layers(unquantised.spec.layers, usual_block_size(formats))
    return replace(unquantised, spec=policy.apply_to(spec))


def _request_bytes(plan: CapacityPlan) -> int:
    return plan.spec.bytes_for_request(plan.max_model_len) + plan.tail_bytes


def _why_it_cannot_run(plan: CapacityPlan) -> str:
    """The reason as words, "" if the GPU can."""
    dtypes = {format.dtype for layer in plan.spec.layers for format in (layer.key, layer.value)}
    if any(dtype.startswith("fp8") for dtype in dtypes) and not plan.gpu.supports_fp8:
        return f"fp8 needs sm_89 or newer, {plan.gpu.name} is older"
    if "bfloat16" in dtypes and not plan.gpu.supports_bf16:
        return f"bfloat16 needs sm_80 or newer, {plan.gpu.name} is older"
    return ""
