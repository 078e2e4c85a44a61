"""The arguments that shape an engine, checked before anything is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from labkit.quant import KVPolicy
from labkit.scheduling import Scheduler, StaticScheduler

from .kv_policy import resolve_policy

KV_ALLOCATORS = ("paged", "reserve_max", "reserve_power_of_two", "reserve_oracle", "first_fit")
SCHEDULERS = {"continuous": Scheduler, "static": StaticScheduler}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The arguments of :class:`LLM` that shape the engine, checked."""

    max_model_len: int | None
    block_size: int | None
    gpu_memory_utilization: float
    num_gpu_blocks_override: int | None
    max_num_seqs: int
    max_num_batched_tokens: int | None
    enable_prefix_caching: bool
    kv_cache_dtype: str | KVPolicy
    kv_scales: str | Path | None
    memory_limit: float | None
    swap_space: float
    tensor_parallel_size: int
    enforce_eager: bool
    seed: int
    attention_backend: str
    kv_allocator: str
    scheduler: str

    def __post_init__(self) -> None:
        for name in ("max_model_len", "block_size", "num_gpu_blocks_override", "max_num_batched_tokens"):
            if getattr(self, name) is not None:
                _require_positive_int(name, getattr(self, name))
        for name in ("max_num_seqs", "tensor_parallel_size"):
            _require_positive_int(name, getattr(self, name))
        if self.block_size is not None and self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size must be a power of two >= 1, got {self.block_size}")
        if not isinstance(self.gpu_memory_utilization, int | float) or not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization!r}")
        for name, lowest in (("memory_limit", "> 0 GiB or None"), ("swap_space", ">= 0 GiB")):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float | None):
                raise TypeError(f"{name} must be a number {lowest}, got {value!r}")
        if self.memory_limit is not None and not 0 < self.memory_limit < math.inf:
            raise ValueError(f"memory_limit must be > 0 GiB or None, got {self.memory_limit}")
        if not 0 <= self.swap_space < math.inf:
            raise ValueError(f"swap_space must be >= 0 GiB, got {self.swap_space}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise TypeError(f"seed must be an integer, got {self.seed!r}")
        _require_one_of("kv_allocator", self.kv_allocator, KV_ALLOCATORS)
        _require_one_of("scheduler", self.scheduler, SCHEDULERS)
        _require_one_of("attention_backend", self.attention_backend, ("auto", "torch", "triton", "unfused"))
        if self.swap_space and self.kv_allocator != "paged":
            raise ValueError(
                f"swap_space must be 0 with kv_allocator={self.kv_allocator!r}, got {self.swap_space}: only the paged "
                "allocator swaps"
            )
        resolve_policy(self.kv_cache_dtype)


def _require_positive_int(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer >= 1, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be >= 1, got {value}")


def _require_one_of(name: str, value: object, allowed: object) -> None:
    names = tuple(allowed)  # type: ignore[arg-type]
    if value not in names:
        raise ValueError(f"{name} must be one of {', '.join(names)}, got {value!r}")
