"""How long a request may be and how many blocks there are, from what the device has; and a report of where it went."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import psutil
import torch
from transformers import PreTrainedModel

from labkit.models import FusedAttentionInfo

from .forward_context import attention_handled_by
from .kv_storage import LayerShape, bytes_per_block
from .memory_monitor import unique_storage_bytes

logger = logging.getLogger(__name__)

GIB = 1 << 30
_CPU_POOL_LIMIT = 4 * GIB
_CPU_POOL_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What memory goes where, in bytes.

    Attributes:
        weights: parameters and buffers, each storage once.
        kv_pool: K and V of all blocks; on a CPU the system hands pages out only as blocks are first used.
        activations: peak of the largest step, measured before the pool was sized (GPU only; 0 on a CPU).
        total: memory of the device.
    """

    device: str
    weights: int
    kv_pool: int
    activations: int
    total: int
    num_blocks: int
    block_size: int
    bytes_per_token: int
    max_model_len: int

    def __repr__(self) -> str:
        rows = [
            ("weights", f"{self.weights / GIB:8.3f} GiB"),
            (
                "KV pool",
                f"{self.kv_pool / GIB:8.3f} GiB = {self.num_blocks} blocks x {self.block_size} tokens x "
                f"{self.bytes_per_token} bytes",
            ),
            ("activations", f"{self.activations / GIB:8.3f} GiB" if self.activations else "     not measured"),
            ("device", f"{self.total / GIB:8.3f} GiB on {self.device}"),
        ]
        tokens = self.num_blocks * self.block_size
        lines = [f"{label:<12}{text}" for label, text in rows]
        lines.append(f"{tokens} tokens fit: {tokens / self.max_model_len:.1f} requests of {self.max_model_len} tokens")
        return "\n".join(lines)


def cpu_pool_bytes(available: int) -> int:
    """Bytes that a KV pool may take on a CPU of whose memory ``available`` bytes are left: a share, up to a limit."""
    return min(_CPU_POOL_LIMIT, int(available * _CPU_POOL_SHARE))


def plan_memory(
    model: PreTrainedModel,
    shapes: dict[int, LayerShape],
    *,
    block_size: int,
    max_model_len: int | None,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    num_blocks: int | None,
    gpu_memory_utilization: float,
) -> MemoryPlan:
    """Choose the number of blocks (unless given) and the effective ``max_model_len``.

    A ``max_model_len`` that the caller chose, or one that fits, is kept. If the model's own is longer than an
    automatically sized pool, it is lowered to the pool and a warning says so. Raises ValueError naming numbers and
    knobs if there is no room for a pool at all.
    """
    device = model.device
    weights = unique_storage_bytes([*model.parameters(), *model.buffers()])
    block_bytes = bytes_per_block(shapes, block_size)
    limit = _model_limit(model)
    if max_model_len is not None and limit is not None and max_model_len > limit:
        raise ValueError(f"max_model_len must be <= {limit}, the positions that this model has, got {max_model_len}")
    wanted_len = max_model_len or limit
    activations = 0
    if device.type == "cuda":
        activations = _peak_activations(model, max_num_batched_tokens, max_num_seqs)
        free, total = torch.cuda.mem_get_info(device)
        room = int(total * gpu_memory_utilization) - (total - free) - activations
        knobs = "raise gpu_memory_utilization or lower max_num_batched_tokens"
    else:
        memory = psutil.virtual_memory()
        total, room = memory.total, cpu_pool_bytes(memory.available)
        knobs = "free some memory"
    if num_blocks is None:
        num_blocks = max(0, room) // block_bytes
        if num_blocks == 0:
            raise ValueError(
                f"no room for the KV pool: {room / GIB:.2f} GiB are left for it and one block of {block_size} tokens "
                f"takes {block_bytes / GIB:.6f} GiB; {knobs}"
            )
        if wanted_len is not None:
            num_blocks = min(num_blocks, max_num_seqs * -(-wanted_len // block_size))
        if max_model_len is None and (wanted_len is None or wanted_len > num_blocks * block_size):
            wanted_len = num_blocks * block_size
            logger.warning(
                "max_model_len is %d, what the KV pool holds%s", wanted_len, f"; the model has {limit}" if limit else ""
            )
    return MemoryPlan(
        device=str(device),
        weights=weights,
        kv_pool=num_blocks * block_bytes,
        activations=activations,
        total=total,
        num_blocks=num_blocks,
        block_size=block_size,
        bytes_per_token=block_bytes // block_size,
        max_model_len=wanted_len or num_blocks * block_size,
    )


def _model_limit(model: PreTrainedModel) -> int | None:
    """Positions that the model knows, None if its config names no limit."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


class _NoAttention:
    """An attention handler that takes the memory of an answer and computes none."""

    def __call__(self, layer_idx: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: object) -> torch.Tensor:
        return q.new_zeros(q.shape[0], q.shape[1], v.shape[2])

    def attend_fused(
        self, info: FusedAttentionInfo, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        return qkv.new_zeros(qkv.shape[0], info.num_q_heads * info.head_dim)


@torch.inference_mode()
def _peak_activations(model: PreTrainedModel, num_tokens: int, num_logits: int) -> int:
    """Bytes that the largest step takes beside weights and cache: run it, without attention, and look."""

    device = model.device
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    tokens = torch.zeros(1, num_tokens, dtype=torch.int64, device=device)
    positions = torch.arange(num_tokens, device=device)[None]
    with attention_handled_by(_NoAttention()):
        logits = model(
            tokens, position_ids=positions, use_cache=False, logits_to_keep=torch.arange(num_logits, device=device)
        ).logits
    probs = logits.float().softmax(-1)  # sampling keeps a few copies of the logits
    del logits, probs
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return peak
