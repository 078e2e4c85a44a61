"""Fewer KV heads for a trained model: what conversion costs, what uptraining gives back, what a decode layer gains.

labkit experiment heads     measures what the file lacks: on a GPU in minutes; on a CPU the same steps, far fewer
"""

from __future__ import annotations

import copy
import lzma
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from labkit.models import convert_kv_heads, embedded, load_model
from labkit.models.kv_heads import HeadConversion, Method
from labkit.paths import data_path

from .heads_layer import flops_rows, layer_rows
from .heads_results import HeadsResults, Row
from .uptrain import UptrainSettings, uptrain

TRAINING_TEXT = "text/uptraining_austen_novels.txt.xz"
HELD_OUT_TEXT = "text/persuasion_excerpt_320k.txt"

Conversions = tuple[tuple[int, Method], ...]
"""(num_kv_heads, method) of one conversion after the other."""


@dataclass(frozen=True, slots=True)
class HeadTexts:
    """Token ids. training: five novels. held_out: a sixth of the same author. other_domain: a language reference."""

    training: Sequence[int]
    held_out: Sequence[int]
    other_domain: Sequence[int]


@dataclass(frozen=True, slots=True)
class HeadBudget:
    """How much to train and to read. short: the settings of the runs that compare ways; long_steps: of the last one.

    eval_ctx: tokens of a window of perplexity, measured in float32. num_evals: of the held-out text during a run.
    """

    short: UptrainSettings
    long_steps: int
    held_out_tokens: int = 65536
    other_domain_tokens: int = 16384
    eval_ctx: int = 1024
    num_evals: int = 10

    @classmethod
    def for_device(cls, device: torch.device) -> HeadBudget:
        if device.type == "cuda":
            return cls(UptrainSettings(steps=120), long_steps=600)
        return cls(UptrainSettings(steps=2, ctx=128, batch_size=1), 4, 2048, 1024, num_evals=2)


def record_heads(
    path: Path, *, long_steps: int | None = None, checkpoints: Path | None = None, progress: bool = True
) -> list[Row]:
    """Complete the JSON file at ``path`` for the embedded model and return its rows; each is written once measured.

    ``long_steps``: updates of the long run, else as the device allows. ``checkpoints``: a folder in which the runs keep
    theirs. Raises ValueError for a file from another device.
    """
    model, tokenizer = load_model(dtype=torch.float32)
    budget = HeadBudget.for_device(model.device)
    if long_steps is not None:
        budget = replace(budget, long_steps=long_steps)
    results = HeadsResults.open(path, model.device, f"{embedded.NAME}, Q4_1 weights dequantised")
    for row in flops_rows():
        results.put(row)
    texts = head_texts(tokenizer, budget)
    conversion_rows(model, texts, budget, results)
    if model.device.type == "cuda" and not results.find(part="decode layer"):
        for row in layer_rows():
            results.put(row)
        torch.cuda.empty_cache()
    uptraining_rows(model, texts, budget, results, checkpoints, progress)
    return results.rows


def head_texts(tokenizer: PreTrainedTokenizerBase, budget: HeadBudget) -> HeadTexts:
    """The shipped novels for training, and two texts that share no paragraph with them.

    The second is the language reference that comes with Python (pydoc_data), so it depends on Python's version.
    """
    from pydoc_data.topics import topics

    novels = lzma.decompress(data_path(TRAINING_TEXT).read_bytes()).decode()
    held_out, reference = data_path(HELD_OUT_TEXT).read_text(), "\n\n".join(topics[name] for name in sorted(topics))

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, verbose=False)

    return HeadTexts(
        encode(novels), encode(held_out)[: budget.held_out_tokens], encode(reference)[: budget.other_domain_tokens]
    )


# ---------------------------------------------------------------- conversion alone


def conversion_paths(num_heads: int, num_kv_heads: int) -> dict[str, Conversions]:
    """Ways from ``num_kv_heads`` to other numbers of KV heads, by the name that stands in the table."""
    have, most = num_kv_heads, num_heads
    expanded: Conversions = ((most, "repeat"),)
    return {
        f"{have}": (),
        f"{have} -> {most} by repeat": expanded,
        f"{have} -> {most} by repeat -> {have} by mean": (*expanded, (have, "mean")),
        f"{have} -> {most} by repeat -> 1 by mean": (*expanded, (1, "mean")),
        f"{have} -> 1 by mean": ((1, "mean"),),
        f"{have} -> 1 by first": ((1, "first"),),
        f"{have} -> 1 by svd": ((1, "svd"),),
    }


def conversion_rows(model: PreTrainedModel, texts: HeadTexts, budget: HeadBudget, results: HeadsResults) -> None:
    """Perplexity after each conversion, without any training."""
    config = model.config.get_text_config(decoder=True)
    for name, path in conversion_paths(config.num_attention_heads, config.num_key_value_heads).items():
        if results.find(part="conversion", name=name):
            continue
        converted, reports = convert_along(model, path)
        row: Row = {"part": "conversion", "source": "measured", "name": name, **_perplexities(converted, texts, budget)}
        row["max_logit_change"] = _max_logit_change(model, converted, texts.held_out[: budget.eval_ctx])
        row["kv_heads"] = converted.config.get_text_config(decoder=True).num_key_value_heads
        if reports:
            last = reports[-1]
            row |= {"key_error": last.key_error, "value_error": last.value_error, "last_step_exact": last.exact}
        results.put(row)


def convert_along(model: PreTrainedModel, path: Conversions) -> tuple[PreTrainedModel, list[HeadConversion]]:
    """The model after each conversion of ``path`` in turn (a copy also for none), and the reports."""
    converted, reports = model if path else copy.deepcopy(model), []
    for num_kv_heads, method in path:
        converted, report = convert_kv_heads(converted, num_kv_heads, method)
        reports.append(report)
    return converted, reports


def _perplexities(model: PreTrainedModel, texts: HeadTexts, budget: HeadBudget) -> Row:
    return {
        "ppl": perplexity(model, texts.held_out, budget.eval_ctx),
        "ppl_other_domain": perplexity(model, texts.other_domain, budget.eval_ctx),
        "held_out_tokens": len(texts.held_out),
    }


def perplexity(model: PreTrainedModel, token_ids: Sequence[int], ctx: int, batch_size: int = 4) -> float:
    """Over windows of ``ctx`` tokens that do not overlap and begin without BOS, ``batch_size`` of them at a time."""
    windows = torch.tensor(token_ids[: len(token_ids) // ctx * ctx], device=model.device).view(-1, ctx)
    total = 0.0
    with torch.inference_mode():
        for batch in windows.split(batch_size):
            logits = model(input_ids=batch, use_cache=False).logits[:, :-1]
            total += float(F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten(), reduction="sum"))
    return math.exp(total / (windows.numel() - len(windows)))


def _max_logit_change(model: PreTrainedModel, converted: PreTrainedModel, token_ids: Sequence[int]) -> float:
    ids = torch.tensor([token_ids], device=model.device)
    with torch.inference_mode():
        return float((model(ids, use_cache=False).logits - converted(ids, use_cache=False).logits).abs().max())


# ---------------------------------------------------------------- uptraining


@dataclass(frozen=True, slots=True)
class HeadRun:
    """A run of `uptrain`: from which conversion, towards the original's distributions or the next token."""

    path: Conversions
    distil: bool
    settings: UptrainSettings


def uptraining_runs(budget: HeadBudget, num_kv_heads: int) -> dict[str, HeadRun]:
    """Short runs that differ in one thing each, a control that converts nothing, and a long run of the best way."""
    have, short = num_kv_heads, budget.short
    mean: Conversions = ((1, "mean"),)
    svd: Conversions = ((1, "svd"),)
    return {
        f"{have} -> 1 by mean, distilled": HeadRun(mean, True, short),
        f"{have} -> 1 by mean, distilled without layer errors": HeadRun(mean, True, replace(short, hidden_weight=0.0)),
        f"{have} -> 1 by mean, next token": HeadRun(mean, False, short),
        f"{have} -> 1 by svd, distilled": HeadRun(svd, True, short),
        f"{have}, next token (control)": HeadRun((), False, short),
        f"{have} -> 1 by svd, distilled, long": HeadRun(svd, True, replace(short, steps=budget.long_steps)),
    }


def uptraining_rows(
    model: PreTrainedModel,
    texts: HeadTexts,
    budget: HeadBudget,
    results: HeadsResults,
    checkpoints: Path | None = None,
    progress: bool = False,
) -> None:
    """One row a run, with perplexity on the way; an unfinished run leaves the row of its last evaluation."""
    have = model.config.get_text_config(decoder=True).num_key_value_heads
    for number, (name, run) in enumerate(uptraining_runs(budget, have).items()):
        row: Row = {"part": "uptraining", "name": name, "settings": asdict(run.settings)}
        if results.find(**row, finished=True):
            continue
        student, _ = convert_along(model, run.path)
        row |= {"source": "measured", "distilled": run.distil, "training_tokens": len(texts.training)}
        folder = checkpoints / f"run-{number}" if checkpoints else None
        results.put(row | _run(student, model, run, texts, budget, results, row, folder, name if progress else None))


def _run(
    student: PreTrainedModel,
    original: PreTrainedModel,
    run: HeadRun,
    texts: HeadTexts,
    budget: HeadBudget,
    results: HeadsResults,
    row: Row,
    checkpoint: Path | None,
    progress: str | None,
) -> Row:
    part_of_text = texts.held_out[: max(budget.eval_ctx, len(texts.held_out) // 4)]
    every = max(1, run.settings.steps // budget.num_evals)
    per_step = run.settings.tokens_per_step
    curve: list[Row] = list(results.find(**row).get("curve", ())) if checkpoint else []
    if not curve:
        curve.append({"step": 0, "tokens": 0, "ppl": perplexity(student, part_of_text, budget.eval_ctx)})
    clock = _Clock(student.device)

    def measured(step: int) -> Row:
        return {
            "step": step,
            "tokens": step * per_step,
            "epochs": step * per_step / len(texts.training),
            "seconds": clock.seconds,  # of training, in this process
            "tokens_per_second": clock.steps * per_step / clock.seconds if clock.steps else None,
            "curve": curve,
            "curve_held_out_tokens": len(part_of_text),
        }

    def on_step(step: int) -> None:
        clock.steps += 1
        if step % every and step != run.settings.steps:
            return
        clock.stop()
        curve[:] = [point for point in curve if point["step"] < step]  # a resumed run goes over some steps again
        ppl = perplexity(student, part_of_text, budget.eval_ctx)
        curve.append({"step": step, "tokens": step * per_step, "ppl": ppl})
        results.put(row | measured(step) | {"finished": False})
        clock.go()

    clock.go()
    losses = uptrain(
        student,
        texts.training,
        run.settings,
        teacher=original if run.distil else None,
        checkpoint=checkpoint,
        on_step=on_step,
        progress=progress,
    )
    ends = {"first_loss": losses[0], "last_loss": sum(losses[-10:]) / len(losses[-10:]), "finished": True}
    return measured(len(losses)) | ends | _perplexities(student, texts, budget)


class _Clock:
    """Seconds and steps of training, without the evaluations in between."""

    def __init__(self, device: torch.device) -> None:
        self.seconds, self.steps, self._since, self._device = 0.0, 0, 0.0, device

    def go(self) -> None:
        self._since = time.perf_counter()

    def stop(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.seconds += time.perf_counter() - self._since
