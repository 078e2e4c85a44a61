"""What ranks agree on beside the all-reduces of the model."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from labkit.kv_math import KVCacheSpec

from ..memory_plan import MemoryPlan


class ShardGroup:
    """The ranks of one model, seen from one of them; torch.distributed is running."""

    def __init__(self, size: int) -> None:
        self.size = size

    def agree(self, memory: MemoryPlan, spec: KVCacheSpec, num_blocks: int | None) -> MemoryPlan:
        """``memory`` with the pool of the smallest rank: a block stands for the same tokens everywhere.

        Ranks on a CPU share its memory, so each takes its part, unless ``num_blocks`` was asked for.
        """
        blocks = memory.num_blocks
        if memory.device == "cpu" and num_blocks is None:
            blocks = max(1, blocks // self.size)
        smallest = torch.tensor([blocks, memory.max_model_len], device=memory.device)
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
        blocks, max_model_len = smallest.tolist()
        return replace(
            memory,
            num_blocks=blocks,
            kv_pool=spec.bytes_for_pool(blocks),
            max_model_len=max_model_len if num_blocks is not None else min(max_model_len, blocks * spec.block_size),
        )

    def all_reduce(self, part: torch.Tensor) -> None:
        """Replace ``part`` by its sum over the ranks. Asynchronous on a GPU."""
        dist.all_reduce(part)

    def share(self, tokens: torch.Tensor) -> None:
        """Overwrite ``tokens`` with what rank 0 sampled. Asynchronous on a GPU."""
        if len(tokens):
            dist.broadcast(tokens, src=0)
