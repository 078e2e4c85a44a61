"""How long a request may be and how many blocks there are, from what the device has; and a report of where it went."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import psutil
import torch
from transformers import PreTrainedModel

from labkit.kv_math import KVCacheSpec
from labkit.models import FusedAttentionInfo

from .decode_graphs import capture_sizes
from .device_memory import GIB
from .forward_context import attention_handled_by
from .memory_monitor import unique_storage_bytes

logger = logging.getLogger(__name__)

_CPU_POOL_LIMIT = 4 * GIB
_CPU_POOL_SHARE = 0.25
BYTES_PER_GRAPH = 1 << 20  # what torch's allocator rounds up; launch records were too small to see on an H200


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What memory goes where, in bytes.

    Attributes:
        weights: parameters and buffers, each storage once.
        kv_pool: K and V of all blocks, with their scales; on a CPU the system hands pages out only as blocks are first
            used.
        kv_tails: where unfinished blocks of running sequences wait, for formats whose scales span a block.
        activations: peak of the largest step, measured before the pool was sized (GPU only; 0 on a CPU).
        graphs: set aside for CUDA graphs.
        total: memory of the device, or less if ``memory_limit`` says so.
        num_host_blocks: blocks in host memory to swap to; ``swap_space`` bytes.
    """

    device: str
    weights: int
    kv_pool: int
    activations: int
    total: int
    num_blocks: int
    block_size: int
    bytes_per_block: int
    max_model_len: int
    graphs: int = 0
    num_host_blocks: int = 0
    kv_tails: int = 0

    @property
    def bytes_per_token(self) -> int:
        """A token's share of a full block, rounded up where tokens share scales."""
        return -(-self.bytes_per_block // self.block_size)

    @property
    def swap_space(self) -> int:
        """Bytes of host memory to swap to."""
        return self.num_host_blocks * self.bytes_per_block

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
        if self.kv_tails:
            rows.insert(2, ("KV tails", f"{self.kv_tails / GIB:8.3f} GiB for unfinished blocks"))
        if self.graphs:
            rows.insert(-1, ("CUDA graphs", f"{self.graphs / GIB:8.3f} GiB set aside"))
        if self.num_host_blocks:
            rows.append(("swap space", f"{self.swap_space / GIB:8.3f} GiB of the host = {self.num_host_blocks} blocks"))
        tokens = self.num_blocks * self.block_size
        lines = [f"{label:<12}{text}" for label, text in rows]
        lines.append(f"{tokens} tokens fit: {tokens / self.max_model_len:.1f} requests of {self.max_model_len} tokens")
        return "\n".join(lines)


def cpu_pool_bytes(available: int) -> int:
    """Bytes that a KV pool may take on a CPU of whose memory ``available`` bytes are left: a share, up to a limit."""
    return min(_CPU_POOL_LIMIT, int(available * _CPU_POOL_SHARE))


def plan_memory(
    model: PreTrainedModel,
    spec: KVCacheSpec,
    *,
    max_model_len: int | None,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    num_blocks: int | None,
    gpu_memory_utilization: float,
    memory_limit: int | None = None,
    swap_space: int = 0,
    kv_tails: int = 0,
    captures_graphs: bool = False,
) -> MemoryPlan:
    """Choose the number of blocks (unless given) and the effective ``max_model_len``.

    ``spec`` is the cache as it is stored. ``memory_limit``, ``swap_space`` and ``kv_tails`` are bytes. On a GPU
    ``gpu_memory_utilization`` is the share of it, or of ``memory_limit``, that everything takes together; on a CPU
    weights and pool stay below ``memory_limit``.

    A ``max_model_len`` that the caller chose, or one that fits, is kept. If the model's own is longer than an
    automatically sized pool, it is lowered to the pool and a warning says so. Raises ValueError naming numbers and
    knobs if there is no room for a pool at all, or for what was asked for.
    """
    device = model.device
    weights = unique_storage_bytes([*model.parameters(), *model.buffers()])
    block_size, block_bytes = spec.block_size, spec.bytes_per_block
    limit = _model_limit(model)
    if max_model_len is not None and limit is not None and max_model_len > limit:
        raise ValueError(f"max_model_len must be <= {limit}, the positions that this model has, got {max_model_len}")
    wanted_len = max_model_len or limit
    activations = graphs = 0
    if device.type == "cuda":
        activations = _largest_step(model, max_num_batched_tokens, max_num_seqs)
        graphs = _graph_bytes(model, max_num_seqs) if captures_graphs else 0
        free, total = torch.cuda.mem_get_info(device)
        used = total - free
        if memory_limit is not None and memory_limit < total:  # as if the card were smaller, and ours alone
            total, used = memory_limit, torch.cuda.memory_reserved(device)
        beside = activations + graphs + kv_tails + spec.fixed_bytes
        most = min(total - used, free) - beside
        room = min(int(total * gpu_memory_utilization) - used - beside, most)
        knobs = f"raise gpu_memory_utilization by {(block_bytes - room) / total:.3f} or lower max_num_batched_tokens"
    else:
        memory = psutil.virtual_memory()
        total = memory.total if memory_limit is None else min(memory.total, memory_limit)
        most = memory.available if memory_limit is None else min(memory.available, memory_limit - weights)
        most -= kv_tails + spec.fixed_bytes
        room = min(cpu_pool_bytes(memory.available), most)
        knobs = "free some memory"
    if memory_limit is not None:
        knobs += f", or raise memory_limit by {(block_bytes - room) / GIB:.3f} GiB or more"
    if num_blocks is not None and num_blocks * block_bytes > most:
        raise ValueError(
            f"num_gpu_blocks_override={num_blocks} takes {num_blocks * block_bytes / GIB:.2f} GiB and "
            f"{most / GIB:.2f} GiB are left for the KV pool: lower it to {max(0, most) // block_bytes} or less"
        )
    if num_blocks is None:
        num_blocks = max(0, room) // block_bytes
        if num_blocks == 0:
            raise ValueError(
                f"no room for the KV pool: {room / GIB:.2f} GiB are left for it beside {weights / GIB:.2f} GiB of "
                f"weights, and one block of {block_size} tokens takes {block_bytes / GIB:.6f} GiB; {knobs}"
            )
        if wanted_len is not None:
            num_blocks = min(num_blocks, max_num_seqs * -(-wanted_len // block_size))
        if max_model_len is None and (wanted_len is None or wanted_len > num_blocks * block_size):
            wanted_len = num_blocks * block_size
            logger.warning(
                "max_model_len is %d, what the KV pool holds%s", wanted_len, f"; the model has {limit}" if limit else ""
            )
    wanted_len = wanted_len or num_blocks * block_size
    on_host = 0 if device.type == "cuda" else num_blocks * block_bytes
    return MemoryPlan(
        device=str(device),
        weights=weights,
        kv_pool=spec.bytes_for_pool(num_blocks),
        activations=activations,
        total=total,
        num_blocks=num_blocks,
        block_size=block_size,
        bytes_per_block=block_bytes,
        max_model_len=wanted_len,
        graphs=graphs,
        kv_tails=kv_tails,
        num_host_blocks=_num_host_blocks(swap_space, block_bytes, max_num_seqs * -(-wanted_len // block_size), on_host),
    )


def _num_host_blocks(swap_space: int, block_bytes: int, most_needed: int, taken: int) -> int:
    """Blocks that fit into ``swap_space`` bytes of host memory, of which ``taken`` are spoken for otherwise."""
    num_blocks = min(swap_space // block_bytes, most_needed)
    if not swap_space:
        return 0
    if num_blocks == 0:
        raise ValueError(
            f"swap_space={swap_space / GIB:g} GiB holds no block of {block_bytes / GIB:.6f} GiB: raise it, or use 0"
        )
    available = psutil.virtual_memory().available - taken
    if num_blocks * block_bytes > available:
        raise ValueError(
            f"swap_space={swap_space / GIB:g} GiB is more than the host has free: lower it to "
            f"{max(0, available) / GIB:.2f} or less"
        )
    return num_blocks


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


def _largest_step(model: PreTrainedModel, max_num_batched_tokens: int, max_num_seqs: int) -> int:
    """Bytes that the largest step takes; ValueError, naming a size that fits, if there is no room for it."""
    num_tokens = max_num_batched_tokens
    while num_tokens > 0:
        try:
            peak = _peak_activations(model, num_tokens, min(num_tokens, max_num_seqs))
        except torch.OutOfMemoryError:
            num_tokens //= 2
            continue
        if num_tokens == max_num_batched_tokens:
            return peak
        break
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(model.device)[0]
    advice = f"lower max_num_batched_tokens to {num_tokens}" if num_tokens else "take a smaller model"
    if 0 < num_tokens < max_num_seqs:
        advice += f" and max_num_seqs to {num_tokens} or less"
    raise ValueError(
        f"a step of max_num_batched_tokens={max_num_batched_tokens} does not fit into the {free / GIB:.2f} GiB that "
        f"are free on {model.device}: {advice}"
    )


def _graph_bytes(model: PreTrainedModel, max_num_seqs: int) -> int:
    """What CUDA graphs will take: activations of the largest, which all share, and each one's logits."""
    sizes = capture_sizes(max_num_seqs)
    head = model.get_output_embeddings()
    logits = sum(sizes) * head.weight.shape[0] * head.weight.itemsize if head is not None else 0  # type: ignore
    activations = _peak_activations(model, max_num_seqs, max_num_seqs, samples=False)
    return activations + logits + len(sizes) * BYTES_PER_GRAPH


@torch.inference_mode()
def _peak_activations(model: PreTrainedModel, num_tokens: int, num_logits: int, *, samples: bool = True) -> int:
    """Bytes that a step takes beside weights and cache: run it, without attention, and look."""
    device = model.device
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    tokens = torch.zeros(1, num_tokens, dtype=torch.int64, device=device)
    positions = torch.arange(num_tokens, device=device)[None] % (_model_limit(model) or num_tokens)
    with attention_handled_by(_NoAttention()):
        logits = model(
            tokens, position_ids=positions, use_cache=False, logits_to_keep=torch.arange(num_logits, device=device)
        ).logits
    probs = logits.float().softmax(-1) if samples else None  # sampling keeps a few copies of the logits
    del logits, probs
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return peak
