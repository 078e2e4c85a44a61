"""A roofline for engine steps: what a step must move and compute, over what the machine can move and compute."""

from __future__ import annotations

from dataclasses import dataclass
from math import hypot
from typing import NamedTuple

from labkit.scheduling import StepPlan

from .quantised_attention import AS_IN_16_BIT, Slowdown


class StepWork(NamedTuple):
    """What a step has to do, counted.

    ``num_context`` is the tokens whose K and V are read, over all requests; ``num_pairs`` the (query token, context
    token) pairs of causal attention; ``num_samples`` the positions whose logits are wanted.
    """

    num_requests: int
    num_tokens: int
    num_context: int
    num_pairs: int
    num_samples: int

    @classmethod
    def of(cls, plan: StepPlan) -> StepWork:
        """Count what ``plan`` asks for."""
        num_tokens = num_context = num_pairs = num_samples = 0
        for _, num_computed, new, _, samples in plan.requests:
            context = num_computed + new
            num_tokens += new
            num_context += context
            num_pairs += new * context - new * (new - 1) // 2  # causal: the first new token sees new - 1 fewer
            num_samples += samples
        return cls(len(plan.requests), num_tokens, num_context, num_pairs, num_samples)


@dataclass(frozen=True, slots=True)
class RooflineCost:
    """Seconds that a step takes on the device: matrices, then attention, each bound by memory and by arithmetic.

    ::

        seconds = weight_bytes / bandwidth  ⊕  2 FLOP a parameter and token / rate      matrices
                + K and V of the context / bandwidth  ⊕  FLOP of the pairs / rate       attention
                + a fixed time for each step, and one for each request

    Over a quantised cache, bytes and FLOP of attention take longer each: times its slowdown.

    Where one bound is far above the other, that is what it takes; where they meet, they overlap only in part. So ⊕ is
    the square root of the sum of squares: between max (they overlap fully) and + (not at all).

    Swaps run beside that; a step that swaps for longer takes as long as they do.
    Source: Williams et al. 2009 (roofline); Pope et al. 2022, section 2 (inference costs).

    Attributes:
        weight_bytes: bytes of the weights that a step reads.
        num_parameters: parameters that each scheduled token is multiplied with.
        kv_bytes_per_token: K and V of one token, all layers.
        attention_flops_per_pair: FLOP for one (query token, context token) pair, all layers and heads.
        bytes_per_second, flops_per_second: what the machine reaches, measured rather than from a data sheet.
        seconds_per_step: time of a step that neither moves nor computes: starting kernels one after the other.
        seconds_per_request: sampling and other work for each request in the step.
        seconds_per_swapped_block: copying one block to host memory or back, beside the step.
        num_head_parameters: those of the output projection, which only sampled positions are multiplied with.
        slowdown: of attention, where the KV cache is quantised.
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
    num_head_parameters: int = 0
    slowdown: Slowdown = AS_IN_16_BIT

    def __post_init__(self) -> None:
        for name in ("bytes_per_second", "flops_per_second"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)}")

    def __call__(self, plan: StepPlan) -> float:
        """Seconds for one step."""
        computing = self.seconds(StepWork.of(plan)) if plan.requests else 0.0
        return max(computing, (len(plan.swap_outs) + len(plan.swap_ins)) * self.seconds_per_swapped_block)

    def seconds(self, work: StepWork) -> float:
        """Seconds for a step that does ``work`` and swaps nothing."""
        matrix_flops, attention_flops = self.flops(work)
        matrices = hypot(self.weight_bytes / self.bytes_per_second, matrix_flops / self.flops_per_second)
        kv_bytes = work.num_context * self.kv_bytes_per_token
        reading = self.slowdown.read * kv_bytes / self.bytes_per_second
        attention = hypot(reading, self.slowdown.compute * attention_flops / self.flops_per_second)
        return matrices + attention + self.seconds_per_step + self.seconds_per_request * work.num_requests

    def flops(self, work: StepWork) -> tuple[int, int]:
        """FLOP of the matrices and of attention."""
        matrices = self.num_parameters * work.num_tokens + self.num_head_parameters * work.num_samples
        return 2 * matrices, self.attention_flops_per_pair * work.num_pairs


@dataclass(frozen=True, slots=True)
class HostCost:
    """Seconds of host work for a step: schedule it, stage it, launch it, take its result in.

    With an executor of depth 2 that runs beside the device, which hides it unless it is the longer of the two.

    Attributes:
        seconds_per_step, seconds_per_request: of a step that only decodes, which is launched as one graph.
        seconds_per_launch: added for a step with prompt tokens, whose kernels are launched one by one.
    """

    seconds_per_step: float = 0.0
    seconds_per_request: float = 0.0
    seconds_per_launch: float = 0.0

    def __call__(self, plan: StepPlan) -> float:
        """Seconds for one step."""
        seconds = self.seconds_per_step + self.seconds_per_request * len(plan.requests)
        for _, _, num_tokens, _, _ in plan.requests:
            if num_tokens > 1:
                return seconds + self.seconds_per_launch
        return seconds
