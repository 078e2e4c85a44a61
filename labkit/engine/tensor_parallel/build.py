"""Putting an engine on several ranks together, from the front."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from labkit.core import Engine
from labkit.observe import Trace

from ..attention import attach, detach
from ..build import make_scheduler
from ..memory_plan import MemoryPlan
from ..options import EngineOptions
from .executor import RanksExecutor
from .messages import Ready, Setup
from .ranks import Ranks
from .source import WeightsSource


@dataclass(slots=True)
class ShardedEngine:
    """The engine, its ranks, and what an :class:`LLM` needs to know of its making.

    ``memory`` is rank 0's plan, with the pool that all ranks agreed on; ``ready`` what each rank said.
    """

    engine: Engine
    ranks: Ranks
    ready: list[Ready]
    memory: MemoryPlan
    backend_name: str

    def release(self, model: PreTrainedModel) -> None:
        """End the ranks and give ``model`` its own attention back."""
        self.ranks.close()
        detach(model)


def build_sharded_engine(model: PreTrainedModel, source: WeightsSource, options: EngineOptions) -> ShardedEngine:
    """Start the ranks, have each build its executor, and connect the scheduler to them.

    ``model`` is without weights. On any error no process is left.
    """
    size = options.tensor_parallel_size
    try:
        attach(model)
        ranks = None
        try:
            ranks = Ranks(size, source.device_type)
            for rank in range(size):
                ranks.send(rank, Setup(rank, size, ranks.init_method, source, options))
            ready: list[Ready] = ranks.receive_all()
            ranks.forget_rendezvous()
            first = ready[0]
            scheduler = make_scheduler(options, first.memory, first.spec)
            executor = RanksExecutor(ranks, depth=2 if source.device_type == "cuda" else 1)
            trace = Trace(
                first.memory.num_blocks,
                first.memory.block_size,
                model=first.model_name,
                device=f"{size} x {source.device_type}",
                dtype=first.dtype,
                attention_backend=first.backend_name,
                kv_cache_dtype=str(options.kv_cache_dtype),
            )
            return ShardedEngine(Engine(scheduler, executor, trace), ranks, ready, first.memory, first.backend_name)
        except BaseException:
            if ranks is not None:
                ranks.kill()
            detach(model)
            raise
    finally:
        source.discard()
