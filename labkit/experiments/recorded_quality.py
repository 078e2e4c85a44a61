"""The recorded quality of the embedded model's KV formats: data/results/quality.json, one row a policy.

labkit experiment quality     measures what is missing, in fp32; rows that are there are kept
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from labkit.models import embedded, load_model
from labkit.paths import data_path

from .kv_quality import Row, fixed_scales, quality_row, unquantised_row, window_nll
from .kv_windows import cache_spec
from .provenance import provenance
from .quality_policies import quality_policies
from .recorded import results
from .result_file import read_results, write_results

TEXT = "text/persuasion_excerpt_320k.txt"
NUM_TOKENS = 16384
CALIBRATION_TOKENS = 8192  # those that follow the measured ones
HOW = "K and V went through the reference quantiser on their way into the paged cache; no GPU kernel ran"


def record_quality(
    path: Path,
    *,
    num_tokens: int = NUM_TOKENS,
    ctx: int = 1024,
    device: str = "cpu",
    only: Collection[str] | None = None,
    progress: bool = True,
) -> list[Row]:
    """Measure the policies that ``path`` has no row of, writing after each; returns all rows.

    A row is kept if it is of the same policy, text, tokens and ctx, on whatever device: ``device`` is where the missing
    ones are measured, each against an unquantised run on the same device. ``only`` names policies. Raises ValueError
    for an unknown name, and if the unquantised perplexity here is not that of the file to one part in 10,000.
    """
    policies = quality_policies()
    if unknown := set(only or ()) - set(policies):
        raise ValueError(f"policies must be among {', '.join(policies)}, got {', '.join(sorted(unknown))}")
    text = Path(TEXT).name
    shared: Row = {"text": text, "tokens": num_tokens, "ctx": ctx, "block_size": 32}
    kept = [
        row for row in read_results(path, "rows").get("rows", []) if shared.items() <= row.items() and _is_current(row)
    ]
    done = {row["policy"] for row in kept}
    missing = [name for name in policies if name not in done and (only is None or name in only)]
    if not missing and done:
        return kept

    model, token_ids, source = embedded_setup(device)
    measured, calibration = token_ids[:num_tokens], token_ids[num_tokens : num_tokens + CALIBRATION_TOKENS]
    spec = cache_spec(model, 32)
    stamp = {"device": source["gpu"] or "cpu", "commit": source["commit"], "date": source["date"]}
    baseline = window_nll(model, measured, ctx=ctx, progress="unquantised" if progress else None)
    unquantised = shared | unquantised_row(spec, baseline) | stamp
    rows = kept if "unquantised" in done else [unquantised, *kept]
    if abs(rows[0]["ppl"] / unquantised["ppl"] - 1) > 1e-4:
        raise ValueError(f"{path} has rows of another baseline: ppl {rows[0]['ppl']}, here {unquantised['ppl']}")
    order = ["unquantised", *policies]
    record = {"measured": HOW, "calibration_tokens": CALIBRATION_TOKENS, "provenance": source, "rows": rows}
    for name in missing:
        policy = policies[name]
        scales = fixed_scales(model, policy, calibration, spec.num_layers, ctx)
        nll = window_nll(model, measured, policy, ctx=ctx, scales=scales, progress=name if progress else None)
        rows.append(shared | quality_row(name, policy, spec, nll, baseline, ctx=ctx) | stamp)
        rows.sort(key=lambda row: order.index(row["policy"]))
        write_results(path, record)
    return rows


def embedded_setup(device: str) -> tuple[PreTrainedModel, list[int], dict[str, Any]]:
    """The embedded model in fp32, the shipped text as tokens, and the provenance of what is measured with them."""
    model, tokenizer = load_model(dtype=torch.float32, device=device)
    source = provenance(device) | {"model": f"{embedded.NAME}, Q4_1 weights dequantised", "dtype": "float32"}
    return model, tokenizer.encode(data_path(TEXT).read_text(), verbose=False), source


def recorded_quality() -> list[Row]:
    """The rows that ship."""
    return results("quality.json")["rows"]


def _is_current(row: Row) -> bool:
    """Whether the policy of that name is still the one that was measured."""
    if row["policy"] == "unquantised":
        return True
    policy = quality_policies().get(row["policy"])
    return policy is not None and (row["k_format"], row["v_format"], row["rotate"], row["other_layers"]) == (
        str(policy.key),
        str(policy.value),
        policy.rotate,
        [number for number, _, _ in policy.exceptions],
    )
