"""Which paged attention runs: `torch`, `triton`, or, to compare a quantised cache with, `unfused`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Protocol

import torch

from labkit.kernels import KVPages, QuantisedKVPages
from labkit.models import FusedAttentionInfo

from .input_batch import InputBatch
from .torch_attention import TorchPagedAttention

logger = logging.getLogger(__name__)


class PagedAttention(Protocol):
    """One step's attention: made from the step's batch, then used by every layer of the forward pass."""

    def write(self, k: torch.Tensor, v: torch.Tensor, kv: KVPages | QuantisedKVPages) -> None:
        """Put the step's K and V [num_tokens, num_kv_heads, D] into their slots, or tails."""
        ...

    def rotate(
        self, info: FusedAttentionInfo, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """For a fused layer: rotate q and k of ``qkv`` by position; returns q, k and v [num_tokens, heads, D]."""
        ...

    def rotate_and_write(
        self, info: FusedAttentionInfo, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, kv: KVPages
    ) -> torch.Tensor:
        """:meth:`rotate` and :meth:`write` at once, for plain pages; returns q."""
        ...

    def attend(
        self,
        q: torch.Tensor,
        kv: KVPages | QuantisedKVPages,
        *,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Causal attention of q [num_tokens, num_q_heads, D_k]; returns [num_tokens, num_q_heads, D_v]."""
        ...


Backend = Callable[[InputBatch, int], PagedAttention]
"""Makes a step's attention from its batch and the block size."""


def choose_backend(device: torch.device | str) -> tuple[str, str]:
    """Name of the backend that ``attention_backend="auto"`` takes on ``device``, and why, in words."""
    device = torch.device(device)
    if device.type != "cuda":
        return "torch", f"vectorised PyTorch, since Triton has no compiler for {device.type}"
    try:
        import triton  # noqa: F401
    except ImportError:
        return "torch", "triton is not installed (pip install triton), so vectorised PyTorch"
    return "triton", f"Triton kernels compiled for {torch.cuda.get_device_name(device)}"


def load_backend(name: str, device: torch.device) -> tuple[str, Backend]:
    """The backend of that name, or for "auto" the one that :func:`choose_backend` says, with its name.

    Raises ValueError for the others than `torch` where no kernel can run.
    """
    if name == "auto":
        name, reason = choose_backend(device)
        if device.type == "cuda" and name == "torch":
            logger.warning("attention_backend 'torch' on a GPU is slow: %s", reason)
    if name == "torch":
        return name, TorchPagedAttention
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"attention_backend={name!r} needs a CUDA device, got {device.type}: use 'torch', or set "
            "TRITON_INTERPRET=1 before Python starts to run the kernels in Triton's interpreter, which is very slow"
        )
    if name == "unfused":
        from .unfused_attention import UnfusedBackend

        return name, UnfusedBackend()
    from .triton_attention import TritonBackend

    return name, TritonBackend()
