"""What tensor parallelism cannot do, said before any process starts."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel


def require_shardable(model: PreTrainedModel, size: int) -> int:
    """The KV heads that the model needs so that ``size`` ranks share them evenly: its own, or copies up to ``size``.

    ``model`` may be without weights (device "meta"). Every rank gets whole query heads together with the KV heads that
    they read. Raises ValueError if the heads do not divide, or if transformers has no plan that shards them.
    """
    config = model.config.get_text_config(decoder=True)
    name = f"{type(model).__name__} (model_type {model.config.model_type!r})"
    if reason := _why_no_plan(model):
        raise ValueError(f"tensor_parallel_size must be 1 for {name}, got {size}: {reason}")
    num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
    allowed = [n for n in range(1, num_heads + 1) if _divides(n, num_heads, num_kv_heads)]
    if size not in allowed:
        raise ValueError(
            f"tensor_parallel_size must be one of {', '.join(map(str, allowed))} for {name}, got {size}: every rank "
            f"takes whole heads, and there are {num_heads} query heads and {num_kv_heads} KV heads"
        )
    return max(num_kv_heads, size)


def _divides(size: int, num_heads: int, num_kv_heads: int) -> bool:
    return num_heads % size == 0 and (num_kv_heads % size == 0 or size % num_kv_heads == 0)


def _why_no_plan(model: PreTrainedModel) -> str | None:
    """None if transformers' plan gives each rank its own heads, else the reason, as part of a sentence."""
    plan: dict[str, Any] = dict(model.tp_plan or {})
    projections = {rule.rpartition(".")[2]: style for rule, style in plan.items() if ".self_attn." in rule}
    if not projections:
        return "transformers has no tensor-parallel plan for its attention"
    for projection in ("q_proj", "k_proj", "v_proj"):
        if projections.get(projection) != "colwise":
            return (
                f"transformers' plan does not shard its heads: {projection} is "
                f"{projections.get(projection, 'not in it')}, not 'colwise'"
            )
    return None


def require_devices(device: torch.device, ranks_here: int) -> None:
    """Raise ValueError unless there is a device for each of the ranks that this machine runs."""
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"tensor_parallel_size > 1 needs device 'cuda' or 'cpu', got {str(device)!r}")
    if device.index is not None:
        raise ValueError(
            f"device must be {device.type!r} with tensor_parallel_size > 1, got {str(device)!r}: rank r takes GPU r; "
            "choose GPUs by CUDA_VISIBLE_DEVICES"
        )
    if device.type == "cuda" and ranks_here > torch.cuda.device_count():
        raise ValueError(
            f"tensor_parallel_size must be <= {torch.cuda.device_count()}, the GPUs that torch sees here, got "
            f"{ranks_here}: each rank needs one of its own"
        )


def require_supported_options(swap_space: float, quantization: str | None) -> None:
    """Raise ValueError for what does not work on several ranks."""
    if swap_space:
        raise ValueError(f"swap_space must be 0 with tensor_parallel_size > 1, got {swap_space}: ranks do not swap yet")
    if quantization is not None:
        raise ValueError(
            f"quantization must be None with tensor_parallel_size > 1, got {quantization!r}: transformers shards "
            "plain weights only"
        )
