"""The KV cache as tensors: two a layer, shaped by what the model's attention really receives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from labkit.kernels import KVPages
from labkit.models import FusedAttentionInfo

from .forward_context import attention_handled_by
from .upload import upload


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer keeps a token.

    ``source`` is the layer that writes K and V: the layer itself, or an earlier one whose cache it reads (gemma3n).
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    dtype: torch.dtype
    sliding_window: int | None
    source: int

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token in this layer."""
        return self.num_kv_heads * (self.head_dim_k + self.head_dim_v) * self.dtype.itemsize


class _ShapeRecorder:
    """An attention handler that computes nothing and notes the shapes of what it is given."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}
        self._keys: dict[int, torch.Tensor] = {}  # kept alive, so that equal addresses mean the same tensor

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
        if layer_idx in self.shapes:
            raise ValueError(f"two attention layers call themselves layer {layer_idx}: they cannot be told apart")
        source = next((i for i, other in self._keys.items() if other.data_ptr() == k.data_ptr()), layer_idx)
        self._keys[layer_idx] = k
        self.shapes[layer_idx] = LayerShape(
            q.shape[1], k.shape[1], k.shape[2], v.shape[2], k.dtype, sliding_window, source
        )
        return q.new_zeros(q.shape[0], q.shape[1], v.shape[2])

    def attend_fused(
        self, info: FusedAttentionInfo, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """Layers that an earlier engine of the same model has fused."""
        self.shapes[info.layer_idx] = LayerShape(
            info.num_q_heads,
            info.num_kv_heads,
            info.head_dim,
            info.head_dim,
            qkv.dtype,
            info.sliding_window,
            info.layer_idx,
        )
        return qkv.new_zeros(qkv.shape[0], info.num_q_heads * info.head_dim)


@torch.inference_mode()
def record_layer_shapes(model: PreTrainedModel) -> dict[int, LayerShape]:
    """Run two tokens through ``model`` and note what each layer hands to attention, by layer_idx.

    More reliable than any config: it holds for every architecture, also where layers differ or share K and V.
    Raises ValueError if no attention call arrives.
    """
    recorder = _ShapeRecorder()
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    positions = torch.arange(2, device=model.device)[None]
    with attention_handled_by(recorder):
        model(tokens, position_ids=positions, use_cache=False)
    if not recorder.shapes:
        raise ValueError(f"{type(model).__name__} never calls its attention: there is no KV cache to page")
    return recorder.shapes


class KVStorage:
    """K and V pages of every layer; block b of every layer belongs to the same tokens.

    The pages are not initialised: attention never lets a slot that was not written reach a result.
    """

    def __init__(
        self, shapes: dict[int, LayerShape], num_blocks: int, block_size: int, device: torch.device | str
    ) -> None:
        self.shapes = shapes
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._pages: dict[int, KVPages] = {}
        for layer_idx, shape in shapes.items():
            if shape.source == layer_idx:
                page = (num_blocks, shape.num_kv_heads, block_size)
                self._pages[layer_idx] = KVPages(
                    torch.empty(*page, shape.head_dim_k, dtype=shape.dtype, device=device),
                    torch.empty(*page, shape.head_dim_v, dtype=shape.dtype, device=device),
                )

    def pages(self, layer_idx: int) -> KVPages:
        """The pages that a layer reads: its own, or those of the layer that it shares with."""
        return self._pages[self.shapes[layer_idx].source]

    def owned_pages(self) -> Sequence[KVPages]:
        """The pages of all layers that have their own."""
        return list(self._pages.values())

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor of the cache, once."""
        for pages in self._pages.values():
            yield from pages

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole pool."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def release(self) -> None:
        """Let go of the tensors; the cache cannot be used any more."""
        self._pages.clear()

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, given as (src, dst), in all layers; every source is read before any destination is written."""
        if not copies:
            return
        device = next(self.tensors()).device
        src = upload([pair[0] for pair in copies], torch.int64, device)
        dst = upload([pair[1] for pair in copies], torch.int64, device)
        for tensor in self.tensors():
            tensor[dst] = tensor[src]


def bytes_per_block(shapes: dict[int, LayerShape], block_size: int) -> int:
    """Bytes of one block over all layers that have a cache of their own."""
    return block_size * sum(s.bytes_per_token for i, s in shapes.items() if s.source == i)
