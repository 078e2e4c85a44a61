"""Make it run: the paged engine around a Hugging Face model.

Exports :class:`LLM` (the front door), what it returns (:class:`RequestOutput`, :class:`CompletionOutput`,
:class:`Logprob`), and its parts: :class:`ModelExecutor`, :class:`KVStorage`, :class:`MemoryMonitor`,
:func:`choose_backend` and :func:`cpu_pool_bytes`.
"""

from .backends import choose_backend
from .kv_storage import KVStorage
from .llm import LLM
from .memory_monitor import MemoryMonitor, MemorySnapshot
from .memory_plan import MemoryPlan, cpu_pool_bytes
from .model_executor import ModelExecutor
from .outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput

__all__ = [
    "LLM",
    "CompletionOutput",
    "KVStorage",
    "Logprob",
    "MemoryMonitor",
    "MemoryPlan",
    "MemorySnapshot",
    "ModelExecutor",
    "RequestMetrics",
    "RequestOutput",
    "choose_backend",
    "cpu_pool_bytes",
]
