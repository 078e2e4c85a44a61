"""The limits that a scheduler keeps to, and the prices that it compares."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step.

    Attributes:
        max_num_seqs: most requests that run at once.
        max_num_batched_tokens: token budget of a step; at least ``max_num_seqs``, so that all can decode.
        max_model_len: longest sequence, prompt and output.
        watermark: share of the pool that an admission leaves free, so that those who run can grow.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int = 4096
    watermark: float = 0.01

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens must be >= max_num_seqs ({self.max_num_seqs}), "
                f"got {self.max_num_batched_tokens}"
            )
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark must be in [0, 1), got {self.watermark}")


@dataclass(frozen=True, slots=True)
class PreemptionCost:
    """What the two ways cost to bring a preempted request back, as measured on the device; free unless measured.

    Attributes:
        seconds_per_swapped_block: copying one block to host memory or back.
        seconds_per_computed_token: computing one token of a long prompt.
    """

    seconds_per_swapped_block: float = 0.0
    seconds_per_computed_token: float = 0.0

    def prefers_swap(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether moving ``num_blocks`` out and in again is no dearer than computing their ``num_tokens`` anew."""
        return 2 * num_blocks * self.seconds_per_swapped_block <= num_tokens * self.seconds_per_computed_token
