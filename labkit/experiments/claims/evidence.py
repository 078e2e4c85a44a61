"""What recorded results say about a claim, and the table of all claims."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from ..recorded import results
from . import CLAIMS

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Evidence:
    """One measured figure. ``where``: the file it is from, its device and commit."""

    claim_id: str
    quantity: str
    setting: str
    value: float
    unit: str
    where: str

    def __str__(self) -> str:
        value = f"{self.value:,.0f}" if abs(self.value) >= 1e4 else f"{self.value:,.4g}"
        return f"{self.quantity} ({self.setting}): {' '.join([value, self.unit]).strip()} [{self.where}]"


@dataclass(frozen=True, slots=True)
class Lookup:
    """Rows of a result file, or of a ``part`` of it, that bear on a claim: those that have all of ``match``."""

    file: str
    match: dict[str, Any]
    column: str
    quantity: str
    unit: str
    setting: tuple[str, ...]
    part: str | None = None


def _serve(system: str) -> Lookup:
    return Lookup("h200/serve.json", {"system": system}, "tokens_per_second", system, "tokens/s", ("model", "workload"))


def _kernel(kv_format: str) -> Lookup:
    match = {"op": "decode", "system": "labkit", "kv_format": kv_format}
    setting = ("heads", "batch", "block_size")
    return Lookup("h200/quant.json", match, "ratio_to_bf16", f"time of {kv_format} / bf16", "x", setting)


def _quality(policy: str) -> Lookup:
    setting = ("policy", "tokens")
    return Lookup("quality.json", {"policy": policy}, "delta_ppl_percent", "perplexity added", "%", setting)


def _combined(column: str, quantity: str, unit: str, *rungs: str) -> tuple[Lookup, ...]:
    shape = {"model": "llama-2-13b", "memory_limit_gib": 40}
    quantity = f"{quantity}, Llama-2-13B in 40 GiB"
    return tuple(
        Lookup("h200/combined.json", shape | {"rung": rung}, column, quantity, unit, ("lengths", "rung"))
        for rung in rungs
    )


def _climbed(*rungs: str) -> tuple[Lookup, ...]:
    at_once = _combined("max_concurrency", "requests at once", "requests", *rungs)
    return (*at_once, *_combined("tokens_per_second", "throughput", "tokens/s", *rungs))


def _whole_run(kv_format: str) -> Lookup:
    file, setting = "h200/quant.json", ("kv_format", "batch", "context")
    quantity = "whole run, tokens/s over those of bf16"
    return Lookup(file, {"kv_format": kv_format}, "ratio_to_first", quantity, "x", setting, "engine")


_INT8, _FP8_KV, _INT4 = map(
    _quality, ("int8 per token-head", "fp8 e4m3 per token-head", "int4 K per channel, V per token")
)
_GQA_INT8 = ("+ GQA", "+ INT8 KV")
_STRATEGIES = ("baseline", "+ paged", "+ continuous batching", *_GQA_INT8, "+ shared prefix")
_COARSE_INT4 = _quality("int4 per token-head, symmetric")
_EDGES_KEPT = _quality("int4 K per channel, V per token, first and last layer bf16")
_RUN_INT8, _RUN_FP8, _RUN_INT4, _RUN_UNFUSED = map(
    _whole_run, ("int8", "fp8", "int4", "int8, dequantised before attention")
)
_ENGINE_QUALITY = Lookup("engine_quality.json", {}, "dnll", "loss added, by the engine", "nats", ("kv_cache_dtype",))
_FP8 = Lookup("fp8_ablation.json", {}, "delta_ppl_percent", "perplexity added", "%", ("weights", "kv_cache"))
_BY_LAYER = Lookup("kv_sensitivity.json", {}, "dnll", "loss added by one layer", "nats", ("format", "layer"))
_PREFILL_FP8 = Lookup(
    "h200/quant.json",
    {"op": "prefill", "kv_format": "fp8"},
    "ratio_to_bf16",
    "time of prefill attention, fp8 / bf16",
    "x",
    ("heads", "batch"),
)
_BY_BLOCK_SIZE = Lookup(
    "h200/kernels.json",
    {"op": "decode", "system": "labkit", "batch": "32x2048"},
    "percent_of_ceiling",
    "decode, heads Q/KV/size and block size",
    "% of the read ceiling",
    ("heads", "block_size"),
)
_PREEMPTION = Lookup(
    "h200/engine.json", {"op": "preemption"}, "tokens_per_second", "preemption", "tokens/s", ("model", "by")
)
_HEADS = Lookup(
    "h200/heads.json", {"part": "decode layer"}, "layer_us", "decode layer", "us", ("num_kv_heads", "batch", "context")
)
_CONVERSION = Lookup("h200/heads.json", {"part": "conversion"}, "ppl", "perplexity", "", ("name",))
_UPTRAINING = Lookup("h200/heads.json", {"part": "uptraining"}, "ppl", "perplexity", "", ("name",))

LOOKUPS: dict[str, tuple[Lookup, ...]] = {
    "A2": _combined("live_utilisation", "live tokens / held slots", "", "baseline"),
    "A4": _combined("live_utilisation", "live tokens / held slots", "", "+ continuous batching"),
    "A14": _combined("max_concurrency", "requests at once", "requests", "baseline", "+ paged"),
    "A27": (_BY_BLOCK_SIZE,),
    "A29": (_PREEMPTION,),
    "A30": _combined("live_utilisation", "live tokens / held slots", "", "+ paged", "+ continuous batching"),
    "A33": (_serve("labkit"), _serve("transformers-cb"), _serve("transformers-generate")),
    "A36": (_INT8, _FP8_KV, _INT4, _COARSE_INT4, _ENGINE_QUALITY),
    "A37": (_FP8,),
    "A38": (_RUN_FP8, _PREFILL_FP8, _kernel("fp8")),
    "A39": (_RUN_INT8, _RUN_UNFUSED, _kernel("int8")),
    "A40": (_RUN_INT8, _RUN_FP8, _RUN_INT4, *_combined("tokens_per_second", "throughput", "tokens/s", *_GQA_INT8)),
    "A41": _combined(
        "tokens_per_second", "throughput", "tokens/s", "+ continuous batching", "+ GQA", "+ shared prefix"
    ),
    "B29": (_HEADS,),
    "B30": (_CONVERSION, _UPTRAINING),
    "B33": (_HEADS,),
    "B38": (_INT8, _INT4),
    "B39": (_INT8,),
    "B40": (_INT4, _COARSE_INT4),
    "B41": (_RUN_INT8, _RUN_INT4, _RUN_UNFUSED, _kernel("int8"), _kernel("int4")),
    "B42": (_INT4, _EDGES_KEPT, _BY_LAYER),
    "B43": _climbed("baseline"),
    "B44": _climbed("+ paged"),
    "B45": _climbed("+ GQA"),
    "B46": _climbed("+ INT8 KV"),
    "B47": _combined("tokens_per_second", "throughput", "tokens/s", "baseline", "+ paged", *_GQA_INT8),
    "B49": _climbed("baseline", "+ continuous batching", "GQA alone", "INT8 KV without GQA", *_GQA_INT8),
}


def evidence(claim_id: str) -> list[Evidence]:
    """Recorded figures for a claim, its own measurements first; empty if nothing was measured yet.

    Raises ValueError for an id that no claim has.
    """
    if claim_id not in CLAIMS:
        raise ValueError(f"claim_id must be one of A1 to A41 and B1 to B50, got {claim_id!r}")
    own = Lookup("h200/claims.json", {"claim": claim_id}, "value", "", "", ("setting",))
    return [found for lookup in (own, *LOOKUPS.get(claim_id, ())) for found in _find(claim_id, lookup)]


def claims_table(article: str | None = None) -> pd.DataFrame:
    """All claims, or those of article "A" or "B": verdict, what holds, how it is checked, source, measured figures."""
    return pd.DataFrame(
        {
            "id": claim.id,
            "claim": claim.says,
            "verdict": claim.verdict,
            "what holds": claim.statement,
            "checked by": claim.check,
            "source": claim.source,
            "measured": "; ".join(map(str, evidence(claim.id))),
        }
        for claim in CLAIMS.values()
        if article in (None, claim.article)
    )


def measured_here(path: str | Path) -> list[Evidence]:
    """Figures that ``python -m labkit.experiments.claims --out path`` wrote on this machine; [] if there are none."""
    path = Path(path)
    if not path.exists():
        return []
    document = json.loads(path.read_text(encoding="utf-8"))
    own = Lookup(path.name, {}, "value", "", "", ("setting",))
    return [item for row in document["rows"] for item in _matching(row["claim"], own, document | {"rows": [row]})]


def _find(claim_id: str, lookup: Lookup) -> list[Evidence]:
    document = results(lookup.file)
    return _matching(claim_id, lookup, document if lookup.part is None else document.get(lookup.part, {}))


def _matching(claim_id: str, lookup: Lookup, document: Row) -> list[Evidence]:
    made = document.get("provenance", {})
    where = f"{Path(lookup.file).name}, {made.get('gpu') or made.get('cpu') or 'CPU'}, commit {made.get('commit')}"
    found = []
    for row in document.get("rows", []):
        if all(row.get(key) == value for key, value in lookup.match.items()) and row.get(lookup.column) is not None:
            setting = ", ".join(_short(row[key]) for key in lookup.setting if row.get(key) is not None)
            quantity, unit = row.get("quantity", lookup.quantity), row.get("unit", lookup.unit)
            found.append(Evidence(claim_id, quantity, setting, float(row[lookup.column]), unit, where))
    return found


def _short(setting: Any) -> str:
    return "/".join(map(str, setting)) if isinstance(setting, list) else str(setting)
