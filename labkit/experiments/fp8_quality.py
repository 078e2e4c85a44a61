"""fp8 weights and an fp8 KV cache are two things: what each costs in quality, and what it saves in bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from labkit.engine import LLM
from labkit.kv_math import PER_TENSOR, PER_TOKEN_HEAD, KVFormat
from labkit.models import load_model
from labkit.models.fp8_weights import projections, require_fp8_weights
from labkit.quant import KVPolicy, quantise, round_trip

from .engine_quality import engine_nll
from .kv_quality import Row, fixed_scales, paired_loss, window_nll
from .kv_windows import cache_spec

_ROW_SCALES = KVFormat("fp8_e4m3", PER_TOKEN_HEAD)  # a weight [out, in] as tokens x 1 head x channels: one scale a row


def fp8_ablation(
    model: str | Path | None,
    token_ids: Sequence[int],
    *,
    ctx: int = 1024,
    device: str | torch.device | None = None,
    **llm_options: Any,
) -> list[Row]:
    """Neither, weights only, KV cache only, both: by the engine, in bf16, on a GPU with fp8 tensor cores.

    Rows have the bytes of the weights and of a token's KV, and the perplexity with its paired change; fp8 weights
    round the inputs of their products too. ``model`` is a name, as LLM takes it. Raises ValueError on a CPU or an older
    GPU: :func:`fp8_ablation_emulated` runs there, and is something else.
    """
    require_fp8_weights(torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")), torch.bfloat16)
    rows, baseline = [], torch.empty(0)
    for weights, kv in ((None, "auto"), ("fp8", "auto"), (None, "fp8"), ("fp8", "fp8")):
        own, tokenizer = load_model(model, dtype=torch.bfloat16, device=device, quantization=weights)
        options: dict[str, Any] = {"max_model_len": ctx + 1, "kv_cache_dtype": kv} | llm_options
        with LLM(own, tokenizer=tokenizer, **options) as llm:
            nll = engine_nll(llm, token_ids, ctx=ctx)
            memory = llm.memory
        baseline = nll if not rows else baseline
        names = {"weights": weights or "bfloat16", "kv_cache": "bfloat16" if kv == "auto" else kv}
        rows.append(_row(names, memory.weights, memory.bytes_per_token, nll, baseline))
    return rows


def fp8_ablation_emulated(
    model: PreTrainedModel, token_ids: Sequence[int], *, calibration: Sequence[int], ctx: int = 1024
) -> list[Row]:
    """The same four rows by rounding alone, on any device: no fp8 product runs, and rows say so.

    Weights of the projections are rounded to fp8 with one scale a row and multiplied in the model's own type (their
    inputs are not rounded, unlike on a GPU); K and V pass through the reference quantiser with one static scale a
    layer. The model's weights are as before afterwards. Bytes are computed, not allocated.
    """
    spec = cache_spec(model, 16)
    fp8 = KVPolicy.of(KVFormat("fp8_e4m3", PER_TENSOR))
    rows, baseline = [], torch.empty(0)
    for rounds_weights, policy in ((False, None), (True, None), (False, fp8), (True, fp8)):
        with _rounded_weights(model) if rounds_weights else _as_is(model) as num_bytes:
            scales = None if policy is None else fixed_scales(model, policy, calibration, spec.num_layers, ctx)
            nll = window_nll(model, token_ids, policy, ctx=ctx, scales=scales)
        baseline = nll if not rows else baseline
        own = str(model.dtype).removeprefix("torch.")
        names = {
            "weights": "fp8, emulated" if rounds_weights else own,
            "kv_cache": own if policy is None else "fp8, emulated",
        }
        kv_bytes = (spec if policy is None else policy.apply_to(spec)).bytes_per_token
        rows.append(_row(names, num_bytes, kv_bytes, nll, baseline))
    return rows


def _row(names: Row, weights_bytes: int, kv_bytes: int, nll: torch.Tensor, baseline: torch.Tensor) -> Row:
    return names | {"weights_bytes": weights_bytes, "kv_bytes_per_token": kv_bytes} | paired_loss(nll, baseline)


@contextmanager
def _as_is(model: PreTrainedModel) -> Iterator[int]:
    yield sum(parameter.nbytes for parameter in model.parameters())


@contextmanager
def _rounded_weights(model: PreTrainedModel) -> Iterator[int]:
    """The model with fp8-rounded projections; yields the bytes that it would take."""
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    before = {}
    try:
        for name, module in projections(model).items():
            weight = before[name] = module.weight.data
            small = quantise(weight[:, None], _ROW_SCALES)
            num_bytes += small.num_bytes - weight.nbytes
            module.weight.data = round_trip(weight[:, None], _ROW_SCALES)[:, 0]
        yield num_bytes
    finally:
        modules = dict(model.named_modules())
        for name, weight in before.items():
            modules[name].weight.data = weight
