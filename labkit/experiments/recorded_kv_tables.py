"""The recorded tables beside the quality of KV formats: layers, failure cases, fp8 weights and cache, the engine's own.

labkit experiment sensitivity, failures, fp8, engine-quality: measured on the embedded model and the shipped text
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from labkit.models.fp8_weights import require_fp8_weights

from .engine_quality import engine_quality
from .fp8_quality import fp8_ablation, fp8_ablation_emulated
from .kv_failures import failure_table, key_bias_quality
from .kv_quality import Row
from .provenance import provenance
from .recorded_quality import CALIBRATION_TOKENS, HOW, NUM_TOKENS, TEXT, embedded_setup
from .result_file import write_results
from .sensitivity import layer_sensitivity

_KEY_BIASES = (0.0, 20.0, 40.0)


def record_sensitivity(path: Path, formats: Sequence[str], *, num_tokens: int = 4096, device: str = "cpu") -> list[Row]:
    """:func:`layer_sensitivity` of each format by name ("int8", "int4"), written to ``path``."""
    model, token_ids, source = embedded_setup(device)
    shared = {"text": Path(TEXT).name, "tokens": num_tokens, "ctx": 1024, "device": source["gpu"] or "cpu"}
    calibration = token_ids[NUM_TOKENS : NUM_TOKENS + CALIBRATION_TOKENS]
    rows: list[Row] = []
    for name in formats:
        table = layer_sensitivity(model, token_ids[:num_tokens], name, calibration=calibration, progress=True)
        rows += [shared | {"format": name} | row for row in table.to_dict("records")]
        write_results(path, {"measured": HOW, "provenance": source, "rows": rows})
    return rows


def record_failures(path: Path, *, num_tokens: int = 2048, device: str = "cpu") -> dict[str, list[Row]]:
    """Errors of synthetic and real keys ("keys"), and what a key bias costs ("key_bias"), written to ``path``."""
    model, token_ids, source = embedded_setup(device)
    keys = failure_table(model, token_ids[:256]).to_dict("records")
    text, ctx = Path(TEXT).name, min(1024, num_tokens)
    biased = key_bias_quality(model, token_ids[:num_tokens], _KEY_BIASES, text=text, ctx=ctx, progress=True)
    write_results(path, {"measured": HOW, "provenance": source, "keys": keys, "key_bias": biased})
    return {"keys": keys, "key_bias": biased}


def record_fp8(path: Path, *, num_tokens: int = NUM_TOKENS, device: str = "cpu") -> list[Row]:
    """fp8 weights, fp8 KV cache, both: by the engine on a GPU that has fp8, else emulated, which the file then says."""
    model, token_ids, source = embedded_setup(device)
    tokens = token_ids[:num_tokens]
    try:
        require_fp8_weights(torch.device(device), torch.bfloat16)
    except (ValueError, ImportError) as reason:
        how = f"emulated by rounding: no fp8 product ran ({reason})"
        calibration = token_ids[NUM_TOKENS : NUM_TOKENS + CALIBRATION_TOKENS]
        rows = fp8_ablation_emulated(model, tokens, calibration=calibration)
    else:
        how, source = "by the engine: fp8 products, fp8 KV cache", provenance(device)
        rows = fp8_ablation(None, tokens, device=device)
    shared = {"text": Path(TEXT).name, "tokens": num_tokens, "ctx": 1024, "device": source["gpu"] or "cpu"}
    rows = [shared | row for row in rows]
    write_results(path, {"measured": how, "provenance": source, "rows": rows})
    return rows


def record_engine_quality(
    path: Path, dtypes: Sequence[str], *, num_tokens: int = NUM_TOKENS, device: str = "cpu"
) -> list[Row]:
    """:func:`engine_quality` of the embedded model in fp32: what LLM(kv_cache_dtype=...) itself loses."""
    model, token_ids, source = embedded_setup(device)
    rows = engine_quality(model, token_ids[:num_tokens], dtypes, progress=True)
    rows = [{"text": Path(TEXT).name, "device": source["gpu"] or "cpu"} | row for row in rows]
    write_results(path, {"measured": "by the engine, from its quantised pages", "provenance": source, "rows": rows})
    return rows
