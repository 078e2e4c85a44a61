"""Which layers bear a coarse KV cache, and which do not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from labkit.quant import KVPolicy

from .kv_quality import fixed_scales, paired_loss, window_nll
from .kv_windows import cache_spec


def layer_sensitivity(
    model: PreTrainedModel,
    token_ids: Sequence[int],
    format: object,
    *,
    calibration: Sequence[int] = (),
    ctx: int = 1024,
    block_size: int = 32,
    progress: bool = False,
) -> pd.DataFrame:
    """One row a layer: the loss when this layer's K and V alone are quantised, all others being as they were.

    ``format`` is a name, a KVFormat or a :class:`KVPolicy`, such as ``KVPolicy.of("int4", "float32")`` for K alone; its
    own exceptions do not count. Columns: layer, k_format, v_format, ppl, delta_ppl_percent, dnll, dnll_se (paired, see
    :func:`~labkit.experiments.kv_quality.quality_row`). Losses of layers add up only roughly. Errors as in
    :func:`~labkit.experiments.kv_quality.kv_quality`.
    """
    chosen = format if isinstance(format, KVPolicy) else KVPolicy.of(format)
    spec = cache_spec(model, block_size)
    own = KVPolicy.of(spec.layers[0].key, spec.layers[0].value)
    options: dict[str, Any] = {"ctx": ctx, "block_size": block_size}
    baseline = window_nll(model, token_ids, **options)
    rows = []
    for layer in tqdm(range(spec.num_layers), desc=f"layers in {chosen.key.dtype}", disable=not progress):
        policy = replace(own.with_layers([layer], chosen.key, chosen.value), rotate=chosen.rotate)
        scales = fixed_scales(model, policy, calibration, spec.num_layers, ctx)
        nll = window_nll(model, token_ids, policy, **options, scales=scales)
        formats = {"k_format": str(chosen.key), "v_format": str(chosen.value), "rotate": chosen.rotate}
        rows.append({"layer": layer, **formats, **paired_loss(nll, baseline)})
    return pd.DataFrame(rows)
