"""A lab about the memory of LLM inference, with parts good enough to use in scripts.

Names below are loaded on first use, so that `import labkit.memory` costs milliseconds and never loads torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labkit.engine import LLM, RequestOutput
    from labkit.environment import env_report, prepare_kernels
    from labkit.kv_math import KVCacheSpec, KVFormat, plan_capacity
    from labkit.models import load_model
    from labkit.observe import EngineStats, Trace
    from labkit.scheduling import SamplingParams

__version__ = "0.1.0"

_HOME_OF = {
    "LLM": "labkit.engine",
    "RequestOutput": "labkit.engine",
    "SamplingParams": "labkit.scheduling",
    "load_model": "labkit.models",
    "EngineStats": "labkit.observe",
    "Trace": "labkit.observe",
    "KVCacheSpec": "labkit.kv_math",
    "KVFormat": "labkit.kv_math",
    "plan_capacity": "labkit.kv_math",
    "env_report": "labkit.environment",
    "prepare_kernels": "labkit.environment",
}

__all__ = [
    "LLM",
    "EngineStats",
    "KVCacheSpec",
    "KVFormat",
    "RequestOutput",
    "SamplingParams",
    "Trace",
    "env_report",
    "load_model",
    "plan_capacity",
    "prepare_kernels",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'labkit' has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value  # later look-ups do not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
