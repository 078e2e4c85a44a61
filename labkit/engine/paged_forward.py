"""What happens at each layer's attention during one forward pass over the paged cache."""

from __future__ import annotations

import torch

from labkit.kernels import KVPages
from labkit.models import FusedAttentionInfo

from .backends import PagedAttention
from .kv_storage import KVStorage


class PagedForward:
    """The attention handler of one forward pass: writes each layer's K and V to the cache, then attends to it."""

    def __init__(self, storage: KVStorage, attention: PagedAttention) -> None:
        self._storage = storage
        self._attention = attention

    def __call__(
        self,
        layer_idx: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        pages = self._storage.pages(layer_idx)
        q, k = self._spread(layer_idx, q, k)
        if self._storage.shapes[layer_idx].source == layer_idx:
            self._attention.write(k, v, pages)
        return self._attention.attend(
            q, pages, scale=scale, sliding_window=sliding_window, softcap=softcap, sinks=sinks
        )

    def attend_fused(
        self, info: FusedAttentionInfo, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """The same for a fused layer; plain pages are written where RoPE is; returns [num_tokens, num_q_heads * D]."""
        pages = self._storage.pages(info.layer_idx)
        if isinstance(pages, KVPages) and self._storage.rotation(info.layer_idx) is None:
            q = self._attention.rotate_and_write(info, qkv, cos, sin, pages)
        else:
            q, k, v = self._attention.rotate(info, qkv, cos, sin)
            q, k = self._spread(info.layer_idx, q, k)
            self._attention.write(k, v, pages)
        out = self._attention.attend(
            q, pages, scale=info.scale, sliding_window=info.sliding_window, softcap=None, sinks=None
        )
        return out.flatten(1)

    def _spread(self, layer_idx: int, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q and k with outlier channels spread over all, where the policy asks for it (labkit.quant.rotation)."""
        rotation = self._storage.rotation(layer_idx)
        return (q, k) if rotation is None else (q @ rotation, k @ rotation)
