"""The combined experiment: paging, continuous batching, fewer KV heads and fewer bits, one on top of the other.

Each rung fills the same memory with as many requests as fit and serves them in a steady state. Beside each figure
stand the closed form's prediction, the simulator's, and the claim of the article that the ladder is from.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import torch
from tqdm.auto import tqdm

from labkit.kv_math import GIB, MODEL_SHAPES, ModelShape, model_shape
from labkit.models import embedded
from labkit.simulation import DeviceCalibration, LengthTable, calibrate, recorded_rows

from .combined_measure import ModelSource, measured, recorded_quality_of
from .combined_rungs import LADDER, RUNGS, Rung
from .combined_setting import Limits, Setting
from .combined_traffic import LENGTHS
from .provenance import provenance
from .result_file import Row, read_results, write_results

RungNames = Collection[str] | None

SHAPES_TO_TRY = ("llama-2-13b", "llama-2-7b", "phi-3-mini", "smollm2-1.7b", "smollm2-360m", "smollm2-135m")
"""Largest first: on a GPU the first is taken that leaves room for three full requests."""

_KEY = ("model", "memory_limit_gib", "context", "lengths", "rung")


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
        window, ramp: seconds that are measured, after seconds that are not; a static batch is always measured whole,
            from the first. None is 10 and 1 on a GPU, 2 and 0 on a CPU.
        out: a JSON file that is written after each row. Rows it has are measured again only for a longer ``window``,
            predictions for the same ``window`` are kept.
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
    setting = _setting(model, memory_limit, context, "cuda" if on_gpu else "cpu")
    free = psutil.virtual_memory().available / GIB
    if not on_gpu and setting.memory_limit > free:
        raise ValueError(
            f"memory_limit must be <= {free:.2f} GiB, what is free here without a GPU, got {setting.memory_limit:g}"
            + (f", which {setting.shape.name} needs: choose a smaller model" if memory_limit is None else "")
        )
    rows = _plan(setting, lengths, rungs, window, ramp, out, calibration)
    source = ModelSource(setting)
    due = [row for row in rows if _is_due(row, window)]
    # Each model is made once, and what the articles speak of comes first, should time run out.
    due.sort(key=lambda row: (RUNGS[row["rung"]].few_kv_heads, RUNGS[row["rung"]] not in LADDER[:5]))
    for row in tqdm(due, desc="Rungs", unit="rung", disable=not progress):
        rung, start = RUNGS[row["rung"]], time.perf_counter()
        try:
            row |= measured(source.model(rung), setting, rung, row, window, ramp) | {"not_measured": None}
        except Exception as error:  # whatever it is, the other rungs are still to come
            if row.get("tokens_per_second") is None:  # else what an earlier window found stands
                row["not_measured"] = f"{type(error).__name__}: {error}"
        row["measured_in_s"] = round(time.perf_counter() - start, 1)
        if source.is_real:
            row |= recorded_quality_of(rung)
        _save(out, rows, {"provenance": provenance()})
        if progress:
            tqdm.write(_in_words(row))
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
    setting = _setting(model, memory_limit, context, device)
    return pd.DataFrame(_plan(setting, lengths, rungs, window, ramp, out, calibration))


def _plan(
    setting: Setting,
    lengths: Collection[str],
    rungs: RungNames | Mapping[str, RungNames],
    window: float,
    ramp: float,
    out: Path | None,
    calibration: DeviceCalibration | None,
) -> list[Row]:
    """A row for each length setting and rung, with its prediction."""
    if window <= 0:
        raise ValueError(f"window must be > 0 seconds, got {window}")
    names = {kind: rungs.get(kind) if isinstance(rungs, Mapping) else rungs for kind in lengths}
    for kind, chosen in names.items():
        if unknown := set(chosen or ()) - set(RUNGS):
            raise ValueError(f"rungs must be among {', '.join(RUNGS)}, got {', '.join(sorted(unknown))}")
        if kind != "full":
            LengthTable.load(kind)  # or ValueError, before anything is measured
    earlier = [] if out is None else read_results(out, "rows").get("rows", [])
    known = {tuple(row[key] for key in _KEY): row for row in earlier}
    rows, predicted = [], {}
    for kind in lengths:
        for rung in _wanted(kind, names[kind]):
            row = _blank(setting, rung, kind)
            row = known.get(tuple(row[name] for name in _KEY), row)
            if _is_due(row, window) and row.get("predicted_window_s") != window:
                try:
                    row |= setting.predict(rung, kind, window, ramp, calibration) | {"predicted_window_s": window}
                    predicted = {"predicted": provenance("cpu")}
                except ValueError as error:
                    row["not_measured"] = f"ValueError: {error}"
            rows.append(row)
    _save(out, rows, predicted)
    return rows


def _is_due(row: Row, window: float) -> bool:
    return row.get("tokens_per_second") is None or row["window_s"] < window


def _wanted(kind: str, rungs: RungNames) -> list[Rung]:
    if rungs is not None:
        return [rung for name, rung in RUNGS.items() if name in rungs]
    return list(LADDER) if kind == "full" else list(RUNGS.values())


def _setting(model: str | ModelShape | None, memory_limit: float | None, context: int | None, device: str) -> Setting:
    if context is not None and context < 2:
        raise ValueError(f"context must be >= 2 tokens, got {context}")
    if memory_limit is not None and memory_limit <= 0:
        raise ValueError(f"memory_limit must be > 0 GiB, got {memory_limit:g}")
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


def _save(out: Path | None, rows: list[Row], sources: dict[str, Any]) -> None:
    """Put ``rows`` into the file, in place of those with the same key."""
    if out is None:
        return
    document = read_results(out, "rows") or {"rows": []}
    ours = {tuple(row[key] for key in _KEY) for row in rows}
    others = [row for row in document["rows"] if tuple(row[key] for key in _KEY) not in ours]
    write_results(out, document | sources | {"rows": others + rows})


def _in_words(row: Row) -> str:
    what = f"{row['model']}, {row['memory_limit_gib']:.3g} GiB, {row['lengths']}, {row['rung']}: "
    if why := row["not_measured"]:
        return f"{what}not measured: {why}"
    reached = f"{row['max_concurrency']:.0f} at once ({row['predicted_concurrency']} predicted)"
    reached += f", {row['tokens_per_second']:,.0f} tokens/s"
    if predicted := row["predicted_tokens_per_second"]:
        reached += f" ({predicted:,.0f})"
    return f"{what}{reached}, in {row['measured_in_s']:.0f} s with a window of {row['window_s']:.1f} s"
