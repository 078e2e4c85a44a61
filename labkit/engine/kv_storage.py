"""The KV cache as tensors, shaped by what the model's attention really receives and by the formats it is stored in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from labkit.kernels import KVPages, QuantisedKVPages, QuantisedPages
from labkit.kv_math import KVCacheSpec, KVFormat, KVLayer
from labkit.models import FusedAttentionInfo
from labkit.quant import KVPolicy, LayerScales, Scales, hadamard

from .forward_context import attention_handled_by
from .quantised_pages import allocate_pages, bytes_of, set_fixed_scales
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

    Layers whose K and V are stored as the model has them get :class:`KVPages`, others :class:`QuantisedKVPages`. The
    pages are not initialised: attention never lets a slot that was not written reach a result.
    """

    def __init__(
        self,
        shapes: dict[int, LayerShape],
        num_blocks: int,
        block_size: int,
        device: torch.device | str,
        policy: KVPolicy | None = None,
        *,
        num_tails: int = 0,
        fixed_scales: Mapping[int, LayerScales] | None = None,
    ) -> None:
        """``policy`` None stores what the model computes. ``num_tails``: sequences that run at once, where it matters.

        ``fixed_scales`` are those of :func:`labkit.quant.load_scales`; fp8 without them has 1.0. Raises ValueError for
        a policy that does not fit, integer formats with fixed scales that are not given, and scales of other layers.
        """
        self.shapes = shapes
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.spec = cache_spec(shapes, block_size, policy)
        self._pages: dict[int, KVPages | QuantisedKVPages] = {}
        self._rotations: dict[int, torch.Tensor] = {}
        writers = [layer_idx for layer_idx, shape in shapes.items() if shape.source == layer_idx]
        if fixed_scales is not None and len(fixed_scales) != len(writers):
            raise ValueError(f"kv_scales must have {len(writers)} layers, got {len(fixed_scales)}")
        for number, (layer_idx, layer) in enumerate(zip(writers, self.spec.layers, strict=True)):
            shape = shapes[layer_idx]
            if layer.key == layer.value == KVFormat.of(shape.dtype):
                page = (num_blocks, shape.num_kv_heads, block_size)
                self._pages[layer_idx] = KVPages(
                    torch.empty(*page, shape.head_dim_k, dtype=shape.dtype, device=device),
                    torch.empty(*page, shape.head_dim_v, dtype=shape.dtype, device=device),
                )
                continue
            scales = None if fixed_scales is None else fixed_scales[number]
            self._pages[layer_idx] = _quantised(shape, layer, num_blocks, block_size, num_tails, scales, device)
        if policy is not None and policy.rotate:
            for layer_idx, shape in shapes.items():
                self._rotations[layer_idx] = hadamard(shape.head_dim_k).to(device, shape.dtype)

    def pages(self, layer_idx: int) -> KVPages | QuantisedKVPages:
        """The pages that a layer reads: its own, or those of the layer that it shares with."""
        return self._pages[self.shapes[layer_idx].source]

    def rotation(self, layer_idx: int) -> torch.Tensor | None:
        """The matrix [D_k, D_k] that q and k of a layer are multiplied with after RoPE; None for none."""
        return self._rotations.get(layer_idx)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor that has blocks, once: what is copied, swapped and evicted together. float8 comes as bytes."""
        for tensor in self._parts():
            if tensor is not None and tensor.shape[0] == self.num_blocks:
                yield bytes_of(tensor)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole pool, scales included: ``spec.bytes_for_pool(num_blocks)``."""
        return sum(tensor.nbytes for tensor in self._parts() if tensor is not None)

    @property
    def tails(self) -> list[torch.Tensor]:
        """Where unfinished blocks wait: [num_tails, num_kv_heads, block_size, D] for each K or V that needs it."""
        quantised = [pages for pages in self._pages.values() if isinstance(pages, QuantisedKVPages)]
        return [tail for pages in quantised for tail in (pages.k_tail, pages.v_tail) if tail is not None]

    def release(self) -> None:
        """Let go of the tensors; the cache cannot be used any more."""
        self._pages.clear()
        self._rotations.clear()

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, given as (src, dst), in all layers; every source is read before any destination is written."""
        if not copies:
            return
        device = next(self.tensors()).device
        src = upload([pair[0] for pair in copies], torch.int64, device)
        dst = upload([pair[1] for pair in copies], torch.int64, device)
        for tensor in self.tensors():
            tensor[dst] = tensor[src]

    def _parts(self) -> Iterator[torch.Tensor | None]:
        """Codes, scales and zero points of every layer, those that are fixed included."""
        for pages in self._pages.values():
            yield from (pages if isinstance(pages, KVPages) else (*pages.k, *pages.v))


def cache_spec(shapes: dict[int, LayerShape], block_size: int, policy: KVPolicy | None = None) -> KVCacheSpec:
    """The cache of a model as kv_math counts it: its exact bytes, from what the layers hand to attention.

    A policy numbers the layers that have a cache of their own. Raises ValueError if it does not fit them.
    """
    layers = [
        KVLayer(s.num_kv_heads, s.head_dim_k, s.head_dim_v, KVFormat.of(s.dtype), KVFormat.of(s.dtype))
        for layer_idx, s in shapes.items()
        if s.source == layer_idx
    ]
    spec = KVCacheSpec.from_layers(layers, block_size)
    if policy is None:
        return spec
    spec = policy.apply_to(spec)
    for layer in spec.layers:
        for format, head_dim in ((layer.key, layer.head_dim), (layer.value, layer.head_dim_v)):
            allocate_pages(format, 1, layer.num_kv_heads, block_size, head_dim, "meta")
    return spec


def _quantised(
    shape: LayerShape,
    layer: KVLayer,
    num_blocks: int,
    block_size: int,
    num_tails: int,
    fixed_scales: LayerScales | None,
    device: torch.device | str,
) -> QuantisedKVPages:
    """Pages of one layer in its formats."""

    def side(format: KVFormat, head_dim: int, scales: Scales | None) -> tuple[QuantisedPages, torch.Tensor | None]:
        pages = allocate_pages(format, num_blocks, shape.num_kv_heads, block_size, head_dim, device)
        set_fixed_scales(pages, format, scales)
        if not format.needs_tail:
            return pages, None
        tail = (num_tails, shape.num_kv_heads, block_size, head_dim)
        return pages, torch.empty(tail, dtype=shape.dtype, device=device)

    fixed = fixed_scales or LayerScales(None, None)
    k, k_tail = side(layer.key, shape.head_dim_k, fixed.key)
    v, v_tail = side(layer.value, shape.head_dim_v, fixed.value)
    return QuantisedKVPages(k, v, shape.head_dim_k, shape.head_dim_v, k_tail, v_tail)
