"""A roofline for engine steps: what a step must move and compute, over what the machine can move and compute."""

from __future__ import annotations

from dataclasses import dataclass

from labkit.scheduling import StepPlan


@dataclass(frozen=True, slots=True)
class RooflineCost:
    """Seconds that a step takes: the larger of its memory time and its compute time, plus a fixed overhead.

    Swaps run beside that; a step that swaps for longer takes as long as they do.

    A step reads the weights once and, for each request, the K and V of its context; it multiplies each scheduled
    token with all weights (2 FLOP a parameter) and with its context (4 FLOP a context token, head and channel).
    Source: Williams et al. 2009 (roofline); Pope et al. 2022, section 2 (inference costs).

    Attributes:
        weight_bytes: bytes of the weights that a step reads.
        num_parameters: parameters that a token is multiplied with.
        kv_bytes_per_token: K and V of one token, all layers.
        attention_flops_per_pair: FLOP for one (query token, context token) pair, all layers and heads.
        bytes_per_second, flops_per_second: what the machine reaches, measured rather than from a data sheet.
        seconds_per_step: time of a step that neither moves nor computes: launches, sampling, host work.
        seconds_per_request: host and sampling time for each request in the step.
        seconds_per_swapped_block: copying one block to host memory or back, beside the step.
    """

    weight_bytes: int
    num_parameters: int
    kv_bytes_per_token: int
    attention_flops_per_pair: int
    bytes_per_second: float
    flops_per_second: float
    seconds_per_step: float = 0.0
    seconds_per_request: float = 0.0
    seconds_per_swapped_block: float = 0.0

    def __post_init__(self) -> None:
        for name in ("bytes_per_second", "flops_per_second"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)}")

    def __call__(self, plan: StepPlan) -> float:
        """Seconds for one step."""
        num_tokens = num_context = num_pairs = 0
        for _, num_computed, new, _, _ in plan.requests:
            context = num_computed + new
            num_tokens += new
            num_context += context
            num_pairs += new * context - new * (new - 1) // 2  # causal: the first new token sees new - 1 fewer
        swapping = (len(plan.swap_outs) + len(plan.swap_ins)) * self.seconds_per_swapped_block
        if not plan.requests:
            return swapping
        memory = (self.weight_bytes + num_context * self.kv_bytes_per_token) / self.bytes_per_second
        flops = 2 * self.num_parameters * num_tokens + self.attention_flops_per_pair * num_pairs
        compute = flops / self.flops_per_second
        computing = max(memory, compute) + self.seconds_per_step + self.seconds_per_request * len(plan.requests)
        return max(computing, swapping)
