"""Whether a model can be served on this machine, and how much of it fits: `labkit doctor --model NAME`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.kv_math import KVCacheSpec, format_bytes

GPU_MEMORY_UTILIZATION = 0.9
"""As LLM's default."""


@dataclass(frozen=True, slots=True)
class ServingPlan:
    """What a supported model takes of a machine.

    Attributes:
        spec: what a token takes in the cache.
        num_params: parameters, shared ones once.
        dtype: of weights and cache.
        pool_bytes: what the weights leave for the KV pool; not above 0 if they do not fit. Activations are not counted.
        max_model_len: positions that the model has; None if its config names no limit.
    """

    spec: KVCacheSpec
    num_params: int
    dtype: str
    weights_bytes: int
    device: str
    pool_bytes: int
    max_model_len: int | None

    @property
    def num_tokens(self) -> int:
        """Tokens of all requests together that fit the pool, in whole blocks."""
        return max(0, self.pool_bytes) // self.spec.bytes_per_block * self.spec.block_size

    def rows(self) -> list[tuple[str, str]]:
        token = self.spec.bytes_per_token
        rows = [
            ("weights", f"{self.num_params:,} parameters, {format_bytes(self.weights_bytes)} in {self.dtype}"),
            ("KV cache", f"{token:,} B a token ({format_bytes(token)}) in {self.dtype}, {self.spec.num_layers} layers"),
        ]
        if not self.num_tokens:
            short = format_bytes(self.spec.bytes_per_block - self.pool_bytes)
            return [*rows, ("fits", f"no: {short} too little memory on {self.device} for weights and one block")]
        fits = f"{self.num_tokens:,} tokens in a pool of {format_bytes(self.pool_bytes)} on {self.device}"
        if self.max_model_len is not None:
            fits += f": {self.num_tokens / self.max_model_len:.1f} requests of {self.max_model_len:,} tokens"
        return [*rows, ("fits", fits)]


@dataclass(frozen=True, slots=True)
class ModelReport:
    """A model and this machine. ``plan`` is None if the model is refused, or if only its own code could size it."""

    name: str
    support: Any  # SupportReport, whose module imports torch
    plan: ServingPlan | None

    def __repr__(self) -> str:
        rows = [("model", self.name), ("served", str(self.support)), *(self.plan.rows() if self.plan else ())]
        return "\n".join(f"{label:<13}{text}" for label, text in rows)


def model_report(name: str | Path | None = None) -> ModelReport:
    """Look at a model by hub name, folder or .gguf file (None: the embedded one), by its config alone.

    Raises ValueError or OSError, saying what to do, if there is no such model.
    """
    from labkit.models import check_support, read_config
    from labkit.models.embedded import NAME

    config = read_config(name)
    support = check_support(config)
    knows_config = not hasattr(config, "auto_map")
    plan = _serving_plan(config, name) if support.supported and knows_config else None
    return ModelReport(NAME if name is None else str(name), support, plan)


def _serving_plan(config: Any, name: str | Path | None) -> ServingPlan:
    import psutil
    import torch
    from transformers import AutoModelForCausalLM

    from labkit.engine import cpu_pool_bytes
    from labkit.models.loading import resolve_device, resolve_dtype

    device = resolve_device(None)
    dtype = resolve_dtype("auto", device)
    if dtype is None:  # the checkpoint's own, on a GPU
        dtype = getattr(config, "dtype", None) or torch.bfloat16
    with torch.device("meta"):
        num_params = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    weights_bytes = num_params * dtype.itemsize
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        pool_bytes = int(total * GPU_MEMORY_UTILIZATION) - (total - free) - weights_bytes
    else:
        available = psutil.virtual_memory().available - weights_bytes
        pool_bytes = cpu_pool_bytes(available)
    return ServingPlan(
        spec=KVCacheSpec.from_config(config, dtype),
        num_params=num_params,
        dtype=str(dtype).removeprefix("torch."),
        weights_bytes=weights_bytes,
        device=str(device),
        pool_bytes=pool_bytes,
        max_model_len=getattr(config.get_text_config(), "max_position_embeddings", None),
    )
