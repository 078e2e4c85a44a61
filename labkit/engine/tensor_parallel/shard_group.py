"""What ranks agree on beside the all-reduces of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.distributed as dist

from labkit.kv_math import KVCacheSpec
from labkit.quant import LayerScales, Scales

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

    def own_scales(self, layers: Mapping[int, LayerScales]) -> dict[int, LayerScales]:
        """Of scales [1, head boxes, channel boxes] of the whole model those of this rank's heads.

        A box of all heads is that of every rank; a head that is copied to several ranks keeps its box on each.
        """

        def own(part: torch.Tensor) -> torch.Tensor:
            boxes = part.repeat_interleave(max(1, self.size // part.shape[1]), dim=1)
            return boxes.chunk(self.size, dim=1)[dist.get_rank()]

        def side(whole: Scales | None) -> Scales | None:
            if whole is None:
                return None
            return Scales(own(whole.scales), None if whole.zero_points is None else own(whole.zero_points))

        return {number: LayerScales(side(layer.key), side(layer.value)) for number, layer in layers.items()}

    def all_reduce(self, part: torch.Tensor) -> None:
        """Replace ``part`` by its sum over the ranks. Asynchronous on a GPU."""
        dist.all_reduce(part)

    def share(self, tokens: torch.Tensor) -> None:
        """Overwrite ``tokens`` with what rank 0 sampled. Asynchronous on a GPU."""
        if len(tokens):
            dist.broadcast(tokens, src=0)
