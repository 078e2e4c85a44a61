"""What the front and the ranks say to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from labkit.kv_math import KVCacheSpec
from labkit.scheduling import StepResult

from .plan_codec import PlanUpdate
from .source import WeightsSource

if TYPE_CHECKING:
    from ..memory_plan import MemoryPlan
    from ..options import EngineOptions


@dataclass(frozen=True, slots=True)
class Setup:
    """To each rank, first. ``init_method`` is where torch.distributed's processes find each other."""

    rank: int
    size: int
    init_method: str
    source: WeightsSource
    options: EngineOptions


@dataclass(frozen=True, slots=True)
class Ready:
    """From each rank, when it can run steps. ``kv_bytes`` is what its pages really take.

    ``fusion`` is "fused", "off", or why layers are not fused; ``has_graphs`` whether decode steps are CUDA graphs.
    """

    memory: MemoryPlan
    spec: KVCacheSpec
    backend_name: str
    kv_bytes: int
    model_name: str
    dtype: str
    fusion: str
    has_graphs: bool


@dataclass(frozen=True, slots=True)
class Failed:
    """From a rank that ends: the error if it can travel, and the traceback as text."""

    rank: int
    error: Exception | None
    text: str


@dataclass(frozen=True, slots=True)
class Submit:
    """To every rank: the next step."""

    plan: PlanUpdate


@dataclass(frozen=True, slots=True)
class Collect:
    """To rank 0: the result of the oldest step is wanted. ``number`` comes back with it."""

    number: int


@dataclass(frozen=True, slots=True)
class Result:
    """From rank 0."""

    number: int
    result: StepResult


@dataclass(frozen=True, slots=True)
class Reset:
    """To every rank: forget the steps under way."""


@dataclass(frozen=True, slots=True)
class Close:
    """To every rank: end."""
