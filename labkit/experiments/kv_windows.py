"""Windows of text through a model's paged path, with a look at K and V on their way into the cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from labkit.engine.attention import attach, detach
from labkit.engine.forward_context import attention_handled_by
from labkit.engine.input_batch import InputBatch
from labkit.engine.kv_storage import KVStorage, LayerShape, record_layer_shapes
from labkit.engine.kv_storage import cache_spec as spec_of_layers
from labkit.engine.paged_forward import PagedForward
from labkit.engine.torch_attention import TorchPagedAttention
from labkit.kv_math import KVCacheSpec
from labkit.models import FusedAttentionInfo


class KVHook(Protocol):
    """Sees q, k, v [num_tokens, heads, D] of a layer after RoPE, and returns those that are written and attended.

    ``layer`` counts the layers that have a cache of their own; None for one that reads the cache of an earlier layer.
    """

    def __call__(
        self, layer: int | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


def window_logits(
    model: PreTrainedModel,
    token_ids: Sequence[int],
    hook: KVHook | None = None,
    *,
    ctx: int = 1024,
    block_size: int = 32,
    progress: str | None = None,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(token ids [ctx], logits [ctx, vocab_size]) of every window; each is one prefill from an empty cache.

    Windows of ``ctx`` tokens do not overlap and begin without a BOS token; what does not fill a window is left out.
    ``progress`` names a bar. Raises ValueError if ``token_ids`` fill no window, and for a model whose attention cannot
    be replaced; RuntimeError for a model that an open LLM has fused.
    """
    if ctx < 2 or len(token_ids) < ctx:
        raise ValueError(f"ctx must be within [2, {len(token_ids)}], the number of tokens, got {ctx}")
    windows = torch.tensor(token_ids[: len(token_ids) // ctx * ctx], device=model.device).view(-1, ctx)
    with _attached(model):
        storage = KVStorage(record_layer_shapes(model), -(-ctx // block_size), block_size, model.device)
        layers = {layer_idx: n for n, layer_idx in enumerate(_writers(storage.shapes))}
        for window in tqdm(windows, desc=progress, disable=progress is None):
            batch = _prefill(window, block_size)
            handler = _HookedForward(PagedForward(storage, TorchPagedAttention(batch, block_size)), hook, layers)
            with torch.inference_mode(), attention_handled_by(handler):
                logits = model(window[None], position_ids=batch.positions[None], use_cache=False).logits[0]
            yield window, logits


def cache_spec(model: PreTrainedModel, block_size: int) -> KVCacheSpec:
    """The unquantised cache of a model as kv_math counts it, from what its layers hand to attention."""
    with _attached(model):
        return spec_of_layers(record_layer_shapes(model), block_size)


class _HookedForward:
    """The attention handler of one window."""

    def __init__(self, forward: PagedForward, hook: KVHook | None, layers: Mapping[int, int]) -> None:
        self._forward, self._hook, self._layers = forward, hook, layers

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
        if self._hook is not None:
            q, k, v = self._hook(self._layers.get(layer_idx), q, k, v)
        return self._forward(
            layer_idx, q, k, v, scale=scale, sliding_window=sliding_window, softcap=softcap, sinks=sinks
        )

    def attend_fused(
        self, info: FusedAttentionInfo, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """Refused: a fused layer rotates and writes in one go. Raises RuntimeError."""
        raise RuntimeError("this model belongs to an open LLM that fused its layers: close it (llm.close()) first")


@contextmanager
def _attached(model: PreTrainedModel) -> Iterator[None]:
    attach(model)
    try:
        yield
    finally:
        detach(model)


def _writers(shapes: Mapping[int, LayerShape]) -> list[int]:
    """The layers that have a cache of their own."""
    return [layer_idx for layer_idx, shape in shapes.items() if shape.source == layer_idx]


def _prefill(window: torch.Tensor, block_size: int) -> InputBatch:
    """One sequence from its first token, in blocks 0, 1, 2, ..."""
    length, device = len(window), window.device
    positions = torch.arange(length, device=device)
    return InputBatch(
        token_ids=window,
        positions=positions,
        slot_mapping=positions,
        block_table=torch.arange(-(-length // block_size), dtype=torch.int32, device=device)[None],
        seq_lens=torch.tensor([length], dtype=torch.int32, device=device),
        query_start_loc=torch.tensor([0, length], dtype=torch.int32, device=device),
        host_seq_lens=[length],
        host_query_lens=[length],
    )
