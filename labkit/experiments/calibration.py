"""Scales that are fixed before a run, measured on a text.

scales = calibrate(model, token_ids, policy)         # K and V of each layer, as far as the policy has fixed scales
save_scales("fp8.safetensors", scales, policy)       # labkit.quant; load_scales gives them back
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from labkit.kv_math import PER_HEAD, PER_TENSOR, KVFormat
from labkit.kv_math.formats import dtype_name
from labkit.models import load_model
from labkit.quant import KVPolicy, LayerScales, Scales, hadamard, measure_scales, save_scales

from .kv_windows import cache_spec, window_logits


class _Extremes:
    """Smallest and largest number of each channel of K and V over all tokens seen, by layer: [2, num_heads, D]."""

    def __init__(self, rotate: bool) -> None:
        self._rotate = rotate
        self.seen: dict[int, list[torch.Tensor]] = {}

    def __call__(
        self, layer: int | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if layer is not None:
            sides = k @ hadamard(k.shape[2]).to(k) if self._rotate else k, v
            before = self.seen.get(layer, [side[:0] for side in sides])
            both = [torch.cat([old, new]) for old, new in zip(before, sides, strict=True)]
            self.seen[layer] = [torch.stack([side.amin(0), side.amax(0)]) for side in both]
        return q, k, v


def calibrate(
    model: PreTrainedModel, token_ids: Sequence[int], policy: KVPolicy, *, ctx: int = 1024, progress: str | None = None
) -> dict[int, LayerScales]:
    """Scales of every layer, on the CPU, such that no K or V of this text saturates.

    The model runs unquantised over windows of ``ctx`` tokens. Formats without fixed scales (``tokens="layer"``) get
    None. Raises ValueError for a policy that does not fit the model; else as :func:`window_logits`.
    """
    num_layers = policy.apply_to(cache_spec(model, 32)).num_layers
    extremes = _Extremes(policy.rotate)
    for _ in window_logits(model, token_ids, extremes, ctx=ctx, progress=progress):
        pass
    scales = {}
    for layer in range(num_layers):
        sides = zip(extremes.seen[layer], policy.formats(layer, num_layers), strict=True)
        # The extremes of a box over all tokens are among the extremes of its channels.
        scales[layer] = LayerScales(*(_fixed(pair, format) for pair, format in sides))
    return scales


def calibrate_to_file(
    path: str | Path,
    text: str | Path,
    model: str | Path | None = None,
    dtype: str = "fp8",
    *,
    per_head: bool = False,
    num_tokens: int = 8192,
    ctx: int = 1024,
    device: str | None = None,
) -> KVPolicy:
    """Load a model, measure scales of K and V in ``dtype`` on the first tokens of a text file, and save them.

    One scale a layer, or one a KV head. Returns the policy that the scales are for. Raises ValueError for a dtype that
    has no scales fixed before a run, and a text shorter than ``ctx`` tokens.
    """
    format = KVFormat(dtype_name(dtype), PER_HEAD if per_head else PER_TENSOR)
    policy = KVPolicy.of(format)
    loaded, tokenizer = load_model(model, device=device)
    token_ids = tokenizer.encode(Path(text).read_text(), verbose=False)[:num_tokens]
    save_scales(path, calibrate(loaded, token_ids, policy, ctx=ctx, progress="calibrating"), policy)
    return policy


def has_fixed_scales(policy: KVPolicy, num_layers: int) -> bool:
    """Whether any format of the policy has scales that are fixed before a run."""
    return any(_is_fixed(format) for layer in range(num_layers) for format in policy.formats(layer, num_layers))


def _is_fixed(format: KVFormat) -> bool:
    return format.scales is not None and format.scales.tokens == "layer"


def _fixed(extremes: torch.Tensor, format: KVFormat) -> Scales | None:
    return measure_scales(extremes.cpu(), format) if _is_fixed(format) else None
