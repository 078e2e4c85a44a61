"""The combined experiment: paging, continuous batching, fewer KV heads and fewer bits, one on top of the other.

Each rung fills the same memory with as many requests as fit and serves them in a steady state. Beside each figure
stand the closed form's prediction, the simulator's, and the claim of the article that the ladder is from.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from labkit.engine import LLM
from labkit.engine.kv_storage import KVStorage
from labkit.kv_math import GIB, MODEL_SHAPES, ModelShape, model_shape
from labkit.models import convert_kv_heads, embedded, load_model, random_model
from labkit.simulation import DeviceCalibration, LengthTable, calibrate, recorded_rows

from .combined_rungs import LADDER, RUNGS, Rung
from .combined_setting import GPU_MEMORY_UTILIZATION, Limits, Setting, serve_window
from .combined_traffic import LENGTHS
from .provenance import provenance
from .recorded import results

Row = dict[str, Any]
RungNames = Collection[str] | None

SHAPES_TO_TRY = ("llama-2-13b", "llama-2-7b", "phi-3-mini", "smollm2-1.7b", "smollm2-360m", "smollm2-135m")
"""Largest first: on a GPU the first is taken that leaves room for three full requests."""

_KEY = ("model", "memory_limit_gib", "context", "lengths", "rung")
_POLICIES = {
    "auto": "unquantised",
    "int8": "int8 per token-head",
    "int4": "int4 K per channel, V per token",
}  # in data/results/quality.json


def combined(
    model: str | ModelShape | None = None,
    memory_limit: float | None = None,
    *,
    context: int | None = None,
    lengths: Collection[str] = LENGTHS,
    rungs: RungNames | Mapping[str, RungNames] = None,
    window: float | None = None,
    ramp: float | None = None,
    out: Path | None = None,
    calibration: DeviceCalibration | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Climb the ladder under a memory cap: one row for each length setting and rung.

    Args:
        model: a shape, or the name of one, which gets random weights. None takes on a GPU the largest shape of
            :data:`SHAPES_TO_TRY` that fits, and on a CPU the embedded model with its real weights.
        memory_limit: the cap in GiB; None is all of a GPU, and on a CPU room for two and a half full requests of
            the baseline.
        context: longest request; None is 4096 on a GPU and 256 on a CPU.
        lengths: "full" (every request fills the context) or the name of a length table.
        rungs: names of :data:`RUNGS`; None is the ladder, and on table lengths also what the ablation adds to it.
            A mapping chooses for each length setting.
        window, ramp: seconds that are measured, after seconds that are not; a static batch is always measured whole.
            None is 10 and 1 on a GPU, 2 and 0 on a CPU.
        out: a JSON file that is written after each row. Rows it has are not measured again, and predictions it has
            are not made again.
        calibration: of this device, for the predicted tokens/s; None is the recorded one on an H200, else none.

    ``predicted_concurrency`` is :func:`~labkit.kv_math.plan_capacity`'s pool under
    :func:`~labkit.experiments.combined_capacity.expected_concurrency`. A rung that cannot run says why under
    ``not_measured``. Raises ValueError for an unknown name.
    """
    on_gpu = torch.cuda.is_available()
    window = window or (10.0 if on_gpu else 2.0)
    ramp = (1.0 if on_gpu else 0.0) if ramp is None else ramp
    if calibration is None and on_gpu and "H200" in torch.cuda.get_device_name():
        calibration = calibrate(recorded_rows())
    setting, rows = _plan(model, memory_limit, context, lengths, rungs, window, ramp, out, calibration, None)
    source = _Source(setting)
    due = [row for row in rows if row.get("tokens_per_second") is None]
    # Each model is made once, and what the articles speak of comes first, should time run out.
    due.sort(key=lambda row: (RUNGS[row["rung"]].few_kv_heads, RUNGS[row["rung"]] not in LADDER[:5]))
    for row in tqdm(due, desc="Rungs", unit="rung", disable=not progress):
        rung = RUNGS[row["rung"]]
        row["not_measured"] = None
        try:
            row |= _measured(source.model(rung), setting, rung, row, window, ramp)
        except (NotImplementedError, ValueError, RuntimeError) as error:
            row["not_measured"] = f"{type(error).__name__}: {error}"
        if source.is_real and rung.kv_cache_dtype in _POLICIES:
            row |= _quality(_POLICIES[rung.kv_cache_dtype])
        _save(out, rows, {"provenance": provenance()})
    return pd.DataFrame(rows)


def predict_combined(
    model: str | ModelShape,
    memory_limit: float,
    *,
    device: str = "cuda",
    context: int | None = None,
    lengths: Collection[str] = LENGTHS,
    rungs: RungNames | Mapping[str, RungNames] = None,
    window: float = 10.0,
    ramp: float = 1.0,
    out: Path | None = None,
    calibration: DeviceCalibration | None = None,
) -> pd.DataFrame:
    """What :func:`combined` would find on another machine: its rows with predictions only, for it to go on from."""
    _, rows = _plan(model, memory_limit, context, lengths, rungs, window, ramp, out, calibration, device)
    return pd.DataFrame(rows)


def _plan(
    model: str | ModelShape | None,
    memory_limit: float | None,
    context: int | None,
    lengths: Collection[str],
    rungs: RungNames | Mapping[str, RungNames],
    window: float,
    ramp: float,
    out: Path | None,
    calibration: DeviceCalibration | None,
    device: str | None,
) -> tuple[Setting, list[Row]]:
    """The setting and a row for each length setting and rung, with its prediction."""
    if window <= 0:
        raise ValueError(f"window must be > 0 seconds, got {window}")
    if context is not None and context < 2:
        raise ValueError(f"context must be >= 2 tokens, got {context}")
    names = {kind: rungs.get(kind) if isinstance(rungs, Mapping) else rungs for kind in lengths}
    for kind, chosen in names.items():
        if unknown := set(chosen or ()) - set(RUNGS):
            raise ValueError(f"rungs must be among {', '.join(RUNGS)}, got {', '.join(sorted(unknown))}")
        if kind != "full":
            LengthTable.load(kind)  # or ValueError, before anything is measured
    setting = _setting(model, memory_limit, context, device or ("cuda" if torch.cuda.is_available() else "cpu"))
    earlier = json.loads(out.read_text())["rows"] if out is not None and out.exists() else []
    known = {tuple(row[key] for key in _KEY): row for row in earlier}
    rows = []
    for kind in lengths:
        for rung in _wanted(kind, names[kind]):
            row = _blank(setting, rung, kind)
            if (key := tuple(row[name] for name in _KEY)) in known:
                rows.append(known[key])
                continue
            try:
                row |= setting.predict(rung, kind, window, ramp, calibration)
            except ValueError as error:
                row["not_measured"] = f"ValueError: {error}"
            rows.append(row)
    _save(out, rows, {"predicted": provenance("cpu")} if len(rows) > len(earlier) else {})
    return setting, rows


def _wanted(kind: str, rungs: RungNames) -> list[Rung]:
    if rungs is not None:
        return [rung for name, rung in RUNGS.items() if name in rungs]
    return list(LADDER) if kind == "full" else list(RUNGS.values())


def _setting(model: str | ModelShape | None, memory_limit: float | None, context: int | None, device: str) -> Setting:
    context = context or (4096 if device == "cuda" else 256)
    if memory_limit is None and device == "cuda":
        memory_limit = torch.cuda.mem_get_info()[1] / GIB
    if isinstance(model, str):
        shape = model_shape(model)
    elif model is not None:
        shape = model
    elif device == "cuda":
        shape = _largest_that_fits(memory_limit or 0.0, context)
    else:
        shape = replace(model_shape(embedded.SHAPE_NAME), name=embedded.NAME)
    setting = Setting(shape, device, memory_limit or 0.0, context)
    if memory_limit is None:
        widest = setting.shape_of(LADDER[0])
        request = widest.kv_spec(setting.dtype).bytes_for_request(context)
        limit = (widest.weights_bytes(setting.dtype) + 2.5 * request) / GIB
        setting = Setting(shape, device, round(limit, 6), context)
    return setting


def _largest_that_fits(memory_limit: float, context: int) -> ModelShape:
    for name in SHAPES_TO_TRY:
        setting = Setting(MODEL_SHAPES[name], "cuda", memory_limit, context)
        try:
            if setting.plan(LADDER[0], Limits(16, 2048)).max_concurrency() >= 3:
                return setting.shape
        except ValueError:
            continue
    raise ValueError(f"memory_limit must leave room for {SHAPES_TO_TRY[-1]}, got {memory_limit} GiB")


def _blank(setting: Setting, rung: Rung, kind: str) -> Row:
    row: Row = {
        "model": setting.shape.name,
        "memory_limit_gib": round(setting.memory_limit, 6),
        "lengths": kind,
        "rung": rung.name,
        "context": setting.context,
        "num_kv_heads": setting.shape_of(rung).num_kv_heads,
    }
    claims = {name: value for name, value in asdict(rung).items() if name.startswith("claimed_")}
    return row | {name: getattr(rung, name) for name in ("kv_cache_dtype", "kv_allocator", "scheduler")} | claims


class _Source:
    """The models of a setting, one at a time on the device."""

    def __init__(self, setting: Setting) -> None:
        self.is_real = setting.shape.name == embedded.NAME
        self._setting = setting
        self._num_kv_heads = 0
        self._model: PreTrainedModel | None = None

    def model(self, rung: Rung) -> PreTrainedModel:
        """The model with the rung's KV heads; of the embedded one copies of its heads, which change no logit."""
        shape = self._setting.shape_of(rung)
        if shape.num_kv_heads != self._num_kv_heads or self._model is None:
            self._model = None  # its memory goes before the next takes any
            gc.collect()
            if self._setting.device == "cuda":
                torch.cuda.empty_cache()
            self._num_kv_heads = shape.num_kv_heads
            if self.is_real:
                model, _ = load_model(dtype=self._setting.dtype, device="cpu")
                self._model = convert_kv_heads(model, shape.num_kv_heads, method="repeat")[0]
            else:
                self._model = random_model(shape, dtype=self._setting.dtype, device=self._setting.device)
        return self._model


def _measured(model: PreTrainedModel, setting: Setting, rung: Rung, row: Row, window: float, ramp: float) -> Row:
    """The figures of one rung."""
    limits = setting.limits(rung, row["lengths"])
    if model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with LLM(
        model,
        max_model_len=setting.context,
        block_size=rung.block_size,
        gpu_memory_utilization=GPU_MEMORY_UTILIZATION,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        enable_prefix_caching=rung.shares_prefix,
        kv_cache_dtype=rung.kv_cache_dtype,
        memory_limit=setting.memory_limit,
        kv_allocator=rung.kv_allocator,
        scheduler=rung.scheduler,
    ) as llm:
        llm.engine.trace = None
        _fill_with_noise(llm)
        who = setting.traffic(rung, row["lengths"])
        figures = serve_window(llm.engine, who, row["predicted_concurrency"], window, ramp)
        memory = llm.memory
        figures["bytes_per_request"] = figures.pop("blocks_per_request") * memory.block_size * memory.bytes_per_token
        figures |= {
            "num_blocks": memory.num_blocks,
            "bytes_per_token": memory.bytes_per_token,
            "weights_bytes": memory.weights,
            "set_aside_bytes": memory.activations + memory.graphs + memory.kv_tails,
        }
        if model.device.type == "cuda":
            figures["peak_memory_gib"] = torch.cuda.max_memory_reserved() / GIB
    return figures


@torch.inference_mode()
def _fill_with_noise(llm: LLM) -> None:
    """Random K and V everywhere, so that nothing is faster than it would be with real ones."""
    storage: KVStorage = llm.engine.executor.storage  # type: ignore[attr-defined]
    for tensor in (*storage.tensors(), *storage.tails):
        if tensor.is_floating_point():
            tensor.uniform_(-1, 1)
        else:
            tensor.random_()


def _quality(policy: str) -> Row:
    """What the format costs the embedded model in perplexity, as recorded."""
    found = next((row for row in results("quality.json").get("rows", []) if row["policy"] == policy), None)
    return {"delta_ppl_percent": None if found is None else found["delta_ppl_percent"]}


def _save(out: Path | None, rows: list[Row], sources: dict[str, Any]) -> None:
    """Put ``rows`` into the file, in place of those with the same key."""
    if out is None:
        return
    document = json.loads(out.read_text()) if out.exists() else {"rows": []}
    ours = {tuple(row[key] for key in _KEY) for row in rows}
    others = [row for row in document["rows"] if tuple(row[key] for key in _KEY) not in ours]
    document |= sources | {"rows": others + rows}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(document, indent=1) + "\n")
