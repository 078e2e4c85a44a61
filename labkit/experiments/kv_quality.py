"""What a KV format costs in perplexity.

Each window of text is one prefill through the engine's attention plug-in and its paged cache. K, after RoPE, and V are
quantised and dequantised by the reference quantiser before they are written, so every token is read as it would be
stored, also within the window that wrote it. (An engine that keeps its newest tokens in 16 bit loses less. With scales
shared by the tokens of a block, a token is read with scales that later tokens of its block took part in.)

python -m labkit.experiments.kv_quality --tokens 4096 --out kv_quality.json      the embedded model on the CPU
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from labkit.engine.attention import attach, detach
from labkit.engine.forward_context import attention_handled_by
from labkit.engine.input_batch import InputBatch
from labkit.engine.kv_storage import KVStorage, LayerShape, record_layer_shapes
from labkit.engine.paged_forward import PagedForward
from labkit.engine.torch_attention import TorchPagedAttention
from labkit.kv_math import KVCacheSpec, KVFormat
from labkit.kv_math.cache_spec import KVLayer
from labkit.models import FusedAttentionInfo, load_model
from labkit.paths import data_path
from labkit.quant import KVPolicy, ScaleLayout, hadamard, round_trip

from .provenance import provenance

TEXT = "text/persuasion_excerpt_320k.txt"
Row = dict[str, Any]


def quality_policies() -> dict[str, KVPolicy]:
    """Policies that show what each granularity and the rotation buys, for blocks of 32 tokens."""

    def int4(tokens: Any, channels: Any = "all", zero_point_bits: int = 16) -> KVFormat:
        return KVFormat("int4", ScaleLayout(tokens, 1, channels, scale_bits=16, zero_point_bits=zero_point_bits))

    per_token_head = ScaleLayout(tokens=1, heads=1)
    symmetric, asymmetric, per_channel = int4(1, zero_point_bits=0), int4(1), int4("block", channels=1)
    return {
        "int8 per token-head": KVPolicy.of("int8"),
        "fp8 e4m3 per token-head": KVPolicy.of(KVFormat("fp8_e4m3", per_token_head)),
        "fp8 e4m3, scale 1": KVPolicy.of(KVFormat("fp8_e4m3")),
        "int4 per token-head, symmetric": KVPolicy.of(symmetric),
        "int4 per token-head, asymmetric": KVPolicy.of(asymmetric),
        "int4 per token-head, asymmetric, rotated": KVPolicy.of(asymmetric, rotate=True),
        "int4 asymmetric, groups of 32": KVPolicy.of("int4"),
        "int4 asymmetric, groups of 32, rotated": KVPolicy.of("int4", rotate=True),
        "int4 K per channel, V per token": KVPolicy.of(per_channel, asymmetric),
        "int4 K per channel symmetric, V per token": KVPolicy.of(int4("block", 1, 0), asymmetric),
        "int4 K per channel, V groups of 32": KVPolicy.of(per_channel, int4(1, 32)),
        "int4 K per channel, V per token, rotated": KVPolicy.of(per_channel, asymmetric, rotate=True),
    }


class QuantisedForward:
    """The attention handler of one window: K and V pass through ``policy`` on their way into the paged cache."""

    def __init__(self, forward: PagedForward, storage: KVStorage, policy: KVPolicy) -> None:
        self._forward, self._rotate, self._block_size = forward, policy.rotate, storage.block_size
        writers = _writers(storage.shapes)  # a policy numbers the layers that have a cache of their own
        self._formats = {layer_idx: policy.formats(n, len(writers)) for n, layer_idx in enumerate(writers)}

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
        if self._rotate:
            rotation = hadamard(k.shape[2]).to(k)
            q, k = q @ rotation, k @ rotation
        if layer_idx in self._formats:  # other layers read the cache of an earlier one
            key, value = self._formats[layer_idx]
            k = round_trip(k, key, block_size=self._block_size)
            v = round_trip(v, value, block_size=self._block_size)
        return self._forward(
            layer_idx, q, k, v, scale=scale, sliding_window=sliding_window, softcap=softcap, sinks=sinks
        )

    def attend_fused(
        self, info: FusedAttentionInfo, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """Refused: a fused layer rotates and writes in one go. Raises RuntimeError."""
        raise RuntimeError("this model belongs to an open LLM that fused its layers: close it (llm.close()) first")


def window_nll(
    model: PreTrainedModel,
    token_ids: Sequence[int],
    policy: KVPolicy | None = None,
    *,
    ctx: int = 1024,
    block_size: int = 32,
    progress: str | None = None,
) -> torch.Tensor:
    """Negative log-likelihood in nats of every predicted token, float64 [num_windows * (ctx - 1)].

    Windows of ``ctx`` tokens do not overlap and begin without a BOS token; what does not fill a window is left out.
    ``policy`` None is the unquantised cache; ``progress`` names a bar. Raises ValueError if ``token_ids`` fill no
    window, for a policy that does not fit the model, and for a model whose attention cannot be replaced; RuntimeError
    for a policy on a model that an open LLM has fused.
    """
    if ctx < 2 or len(token_ids) < ctx:
        raise ValueError(f"ctx must be within [2, {len(token_ids)}], the number of tokens, got {ctx}")
    windows = torch.tensor(token_ids[: len(token_ids) // ctx * ctx], device=model.device).view(-1, ctx)
    with _attached(model), torch.inference_mode():
        shapes = record_layer_shapes(model)
        if policy is not None:
            policy.apply_to(_spec(shapes, block_size))
        storage = KVStorage(shapes, -(-ctx // block_size), block_size, model.device)
        nll = []
        for window in tqdm(windows, desc=progress, disable=progress is None):
            batch = _prefill(window, block_size)
            forward = PagedForward(storage, TorchPagedAttention(batch, block_size))
            handler = forward
            if policy is not None:
                handler = QuantisedForward(forward, storage, policy)
            with attention_handled_by(handler):
                logits = model(window[None], position_ids=batch.positions[None], use_cache=False).logits[0, :-1]
            nll.append(torch.nn.functional.cross_entropy(logits.float(), window[1:], reduction="none").double())
    return torch.cat(nll).cpu()


def kv_quality(
    model: PreTrainedModel,
    token_ids: Sequence[int],
    policies: Mapping[str, KVPolicy],
    *,
    text: str,
    ctx: int = 1024,
    block_size: int = 32,
    progress: bool = False,
) -> list[Row]:
    """One row for the unquantised cache and one for each policy.

    ``dnll`` is the mean over tokens of NLL minus the NLL of the same token in the unquantised run, ``dnll_se`` its
    standard error with tokens taken as independent: compare policies by these, perplexities of short texts differ by
    less than their noise. ``bits_per_value`` includes scales. Errors as in :func:`window_nll`.
    """
    with _attached(model):
        spec = _spec(record_layer_shapes(model), block_size)
    own = spec.layers[0].key
    options: dict[str, Any] = {"ctx": ctx, "block_size": block_size}
    baseline = window_nll(model, token_ids, **options, progress="unquantised" if progress else None)
    rows = [_row("unquantised", KVPolicy(own, own), spec, baseline, baseline)]
    for name, policy in policies.items():
        nll = window_nll(model, token_ids, policy, **options, progress=name if progress else None)
        rows.append(_row(name, policy, spec, nll, baseline))
    shared = {"text": text, "tokens": len(token_ids) // ctx * ctx, **options, "device": str(model.device)}
    return [shared | row for row in rows]


def quality_table(rows: Sequence[Row]) -> pd.DataFrame:
    """The columns that people compare, cheapest loss first."""
    columns = ["policy", "bits_per_value", "ppl", "delta_ppl_percent", "dnll", "dnll_se"]
    return pd.DataFrame(rows).loc[:, columns].sort_values("dnll", ignore_index=True)


def _row(name: str, policy: KVPolicy, spec: KVCacheSpec, nll: torch.Tensor, baseline: torch.Tensor) -> Row:
    difference = nll - baseline
    mean = float(difference.mean())
    return {
        "policy": name,
        "k_format": str(policy.key),
        "v_format": str(policy.value),
        "rotate": policy.rotate,
        "other_layers": [number for number, _, _ in policy.exceptions],
        "bits_per_value": policy.bits_per_value(spec),
        "ppl": math.exp(float(nll.mean())),
        "delta_ppl_percent": 100 * math.expm1(mean),
        "dnll": mean,
        "dnll_se": float(difference.std()) / len(difference) ** 0.5,
    }


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


def _spec(shapes: Mapping[int, LayerShape], block_size: int) -> KVCacheSpec:
    """The cache of a model as kv_math counts it, from what its layers hand to attention."""
    layers = [
        KVLayer(s.num_kv_heads, s.head_dim_k, s.head_dim_v, KVFormat.of(s.dtype), KVFormat.of(s.dtype))
        for s in (shapes[layer_idx] for layer_idx in _writers(shapes))
    ]
    return KVCacheSpec.from_layers(layers, block_size)


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


def main() -> None:
    """Measure the embedded model in fp32 on the CPU and print the table."""
    parser = argparse.ArgumentParser(description="Perplexity of the embedded model with a quantised KV cache, CPU.")
    parser.add_argument("--tokens", type=int, default=4096, help="first tokens of the shipped text")
    parser.add_argument("--ctx", type=int, default=1024)
    parser.add_argument("--policy", action="append", choices=list(quality_policies()), help="repeat; default: all")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    model, tokenizer = load_model(dtype=torch.float32, device="cpu")
    token_ids = tokenizer.encode(data_path(TEXT).read_text(), verbose=False)[: options.tokens]
    chosen = {name: p for name, p in quality_policies().items() if not options.policy or name in options.policy}
    rows = kv_quality(model, token_ids, chosen, text=Path(TEXT).name, ctx=options.ctx, progress=True)
    print(quality_table(rows).to_string(float_format="{:.4f}".format))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        source = provenance("cpu") | {"model": "SmolLM2-135M-Instruct, Q4_1 weights dequantised", "dtype": "float32"}
        how = "CPU; K and V quantised and dequantised by the reference quantiser inside attention; no GPU kernel ran"
        options.out.write_text(json.dumps({"measured": how, "provenance": source, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
