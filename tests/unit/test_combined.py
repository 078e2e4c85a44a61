"""The combined experiment: what it predicts, what it reaches on a CPU, and what it makes of the figures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from labkit.core import Engine
from labkit.engine import LLM
from labkit.experiments.combined_document import FILE, PAGE, page
from labkit.experiments.combined_equal_batch import equal_batch, record_equal_batch
from labkit.experiments.combined_ladder import combined, predict_combined
from labkit.experiments.combined_measure import fill_with_noise
from labkit.experiments.combined_outcome import outcome_lines
from labkit.experiments.combined_report import effects, ladder_table, whole_ladders
from labkit.experiments.combined_rungs import ABLATION, LADDER, RUNGS
from labkit.experiments.combined_setting import Setting, serve_window
from labkit.experiments.combined_traffic import traffic
from labkit.experiments.recorded import results
from labkit.figures.combined import combined_ladder
from labkit.kv_math import ModelShape, model_shape
from labkit.memory import KVCacheManager
from labkit.models import random_model
from labkit.scheduling import SamplingParams, SchedulerConfig, StaticScheduler
from labkit.simulation import SimulatedExecutor, calibrate, recorded_rows

TINY = ModelShape("tiny", 2, 4, 4, 16, 64, 96, 256, 4096)


def records(table: pd.DataFrame) -> list[Any]:
    return table.to_dict("records")


def test_traffic_fits_the_context_and_fills_it_where_it_should():
    full, chat = traffic("full", 4096, 100), traffic("azure_conv", 4096, 100)
    assert set(full.prompts + full.outputs) == {4096}
    assert (chat.prompts + chat.outputs).max() <= 4096
    assert np.mean(chat.prompts + chat.outputs) == pytest.approx(1366, rel=0.02)  # the trace's own mean
    means = [chat.prompts[i : i + 128].mean() for i in range(0, 4096, 128)]
    assert np.std(means) < 0.02 * np.mean(means)  # any short stretch has seen all lengths
    for old in traffic("full", 64, 100).requests_met_under_way(20):
        assert old.num_prompt_tokens + (old.sampling_params.max_tokens or 0) == 64


ON_H200 = Setting(model_shape("llama-2-13b"), "cuda", 40.0, 4096)
SHORT = Setting(ModelShape("short", 4, 8, 8, 32, 256, 512, 2000, 64), "cpu", 0.025, 64)


@pytest.mark.parametrize(
    ("setting", "name", "lengths", "seconds"),  # long enough to forget with whom it began
    [
        (ON_H200, "+ GQA", "azure_conv", 40),
        (ON_H200, "+ INT8 KV", "full", 40),
        (ON_H200, "+ INT4 KV", "full", 40),
        (replace(ON_H200, shape=model_shape("llama-2-7b")), "+ paged", "azure_conv", 160),  # batches of 41
        (SHORT, "+ GQA", "azure_conv", 2),  # of 113 requests every third leaves in a step
        (SHORT, "+ INT8 KV", "azure_conv", 2),  # as many as a CPU may run
    ],
)
def test_the_closed_form_is_what_scheduler_and_allocator_reach(
    setting: Setting, name: str, lengths: str, seconds: float
):
    expected = setting.predict(RUNGS[name], lengths, 1.0, 0.0, None)["predicted_concurrency"]
    scheduler = setting.scheduler(RUNGS[name], setting.limits(RUNGS[name], lengths))
    engine = Engine(scheduler, SimulatedExecutor(lambda plan: 0.01))
    figures = serve_window(engine, setting.traffic(RUNGS[name], lengths), expected, seconds)
    assert figures["max_concurrency"] == pytest.approx(expected, rel=0.05)
    if setting is ON_H200:
        assert figures["live_utilisation"] > 0.96


STATIC = [row for row in results(FILE)["rows"] if row["rung"] == "+ paged" and row.get("num_blocks")]


@pytest.mark.parametrize("row", STATIC, ids=lambda row: f"{row['model']}-{row['memory_limit_gib']:g}-{row['lengths']}")
def test_static_batches_in_a_measured_pool_are_as_large_as_they_were_measured(row: dict[str, Any]):
    setting, rung = (
        Setting(model_shape(row["model"]), "cuda", row["memory_limit_gib"], row["context"]),
        RUNGS["+ paged"],
    )
    config = SchedulerConfig(*setting.limits(rung, row["lengths"]), row["context"])
    scheduler = StaticScheduler(config, KVCacheManager(row["num_blocks"], rung.block_size))
    executor = calibrate(recorded_rows()).executor(setting.shape, setting.shape.kv_spec("bfloat16"))
    who = setting.traffic(rung, row["lengths"])
    figures = serve_window(Engine(scheduler, executor), who, 0, 30)  # as many batches as on the GPU
    assert figures["max_concurrency"] == pytest.approx(row["max_concurrency"], rel=0.01)
    assert figures["num_preemptions"] == pytest.approx(row["num_preemptions"], abs=2)


def test_predictions_for_the_article_s_setting(tmp_path: Path):
    rows = predict_combined("llama-2-13b", 40, out=tmp_path / "rows.json", window=1)
    found = {(row["lengths"], row["rung"]): row["predicted_concurrency"] for row in records(rows)}
    assert found["full", "baseline"] == 3
    assert found["full", "+ INT8 KV"] >= 14 * 3
    assert found["azure_conv", "+ INT8 KV"] == pytest.approx(138, rel=0.05)
    assert len(rows) == 2 * len(LADDER) + len(RUNGS) - len(LADDER)
    assert "predicted" in json.loads((tmp_path / "rows.json").read_text())


def test_rows_of_another_context_are_not_taken_for_these(tmp_path: Path):
    out = tmp_path / "rows.json"
    for context in (512, 256):
        rows = predict_combined(TINY, 1.0, context=context, lengths=["full"], rungs=["baseline"], window=1, out=out)
        assert rows["context"].tolist() == [context]
    assert len(json.loads(out.read_text())["rows"]) == 2


def test_every_rung_runs_on_a_cpu_and_what_is_there_is_not_measured_again(tmp_path: Path, monkeypatch):
    out = tmp_path / "combined.json"
    rows = combined(TINY, lengths=["full"], window=0.3, out=out, progress=False)
    by_rung = {row["rung"]: row for row in records(rows)}
    for row in by_rung.values():
        assert row["not_measured"] is None
        assert row["max_concurrency"] == pytest.approx(row["predicted_concurrency"], rel=0.05, abs=1)
        assert row["tokens_per_second"] > 0
    assert by_rung["baseline"]["bytes_per_request"] == 2 * 2 * 4 * 16 * 4 * 256  # reserved whole
    sizes = [by_rung[name]["bytes_per_request"] for name in ("baseline", "+ paged", "+ GQA", "+ INT8 KV", "+ INT4 KV")]
    assert sizes == sorted(sizes, reverse=True)

    monkeypatch.setattr("labkit.experiments.combined_measure.LLM", None)  # measuring anything would fail
    again = combined(TINY, lengths=["full"], window=0.3, out=out, progress=False)
    assert again["tokens_per_second"].tolist() == rows["tokens_per_second"].tolist()
    assert json.loads(out.read_text())["provenance"]["gpu"] is None


def test_a_rung_that_cannot_run_says_why(tmp_path: Path):
    rows = combined(TINY, 1e-6, lengths=["full"], rungs=["baseline"], progress=False)
    assert "does not fit" in rows["not_measured"].iloc[0]
    with pytest.raises(ValueError, match="rungs must be among baseline, .*, got faster"):
        combined(TINY, rungs=["faster"])
    for wrong in ({"window": -1.0}, {"context": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
            combined(TINY, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown length table"):
        combined(TINY, lengths=["short"])


def test_a_longer_window_is_measured_anew_and_a_failure_loses_nothing(tmp_path: Path, monkeypatch):
    out = tmp_path / "combined.json"
    options: dict[str, Any] = {"lengths": ["full"], "rungs": ["+ GQA", "+ INT8 KV"], "out": out, "progress": False}
    first = combined(TINY, window=0.1, **options)

    def fail(*_: object) -> None:
        raise KeyError("no such kernel")

    with monkeypatch.context() as patch:
        patch.setattr("labkit.experiments.combined_ladder.measured", fail)
        kept = combined(TINY, window=0.3, **options)
    assert kept["tokens_per_second"].tolist() == first["tokens_per_second"].tolist()
    longer = combined(TINY, window=0.3, **options)
    assert min(longer["window_s"].tolist()) >= 0.3
    assert all(longer["not_measured"].isna().tolist())


def test_formats_at_equal_batch_stand_beside_the_rungs(tmp_path: Path, tiny_llama):
    out = tmp_path / "combined.json"
    out.write_text('{"rows": []}')
    record_equal_batch(out, equal_batch(tiny_llama, 2, 8, ("auto", "int5", "int4"), num_gpu_blocks_override=40))
    plain, unknown, int4 = json.loads(out.read_text())["equal_batch"]
    assert plain["step_ms"] > 0.1 and int4["step_ms"] > 0.1  # a model ran
    assert "kv_cache_dtype must be" in unknown["not_measured"]


def made_up() -> pd.DataFrame:
    factors = {"paged + continuous": 4.0, "GQA": 5.0, "INT8 KV": 2.0}
    rows = []
    for combination, rung in ABLATION.items():
        product = float(np.prod([factors[name] for name in combination]))
        figures = {"max_concurrency": 3 * product, "tokens_per_second": 100 * product, "bytes_per_request": 8 / product}
        figures |= {"scheduler": rung.scheduler, "drift": -0.3 if rung.few_kv_heads else 0.1}
        rows.append({"model": "m", "memory_limit_gib": 40.0, "lengths": "azure_conv", "rung": rung.name} | figures)
    return pd.DataFrame(rows)


def test_effects_that_multiply_have_the_same_factor_whatever_they_join():
    table = effects(made_up())
    assert len(table) == 7  # edges between the six combinations
    found = {(row["effect"], row["concurrency"]) for row in records(table)}
    assert found == {("GQA", 5), ("INT8 KV", 2), ("paged + continuous", 4)}


def test_the_ladder_is_compared_with_its_baseline():
    table = {row["rung"]: row for row in records(ladder_table(made_up()))}
    assert list(table) == ["baseline", "+ continuous batching", "+ GQA", "+ INT8 KV"]
    assert table["+ INT8 KV"]["speedup"] == 40
    assert table["+ GQA"]["saving"] == pytest.approx(0.95)


def test_a_rung_measured_later_stands_beside_the_baseline_in_the_file():
    rows = made_up()
    others = [row | {"lengths": "full"} for row in records(rows)]
    whole = whole_ladders(rows[rows.rung == "+ GQA"], records(rows) + others)
    assert records(whole) == records(rows)


def test_the_figure_shows_one_ladder(tmp_path: Path):
    rows = predict_combined("llama-2-13b", 40, lengths=["full"], window=1)
    figure = combined_ladder(ladder_table(rows))
    assert {trace["name"] for trace in figure.to_dict()["data"]} == {"measured", "predicted", "article's claim"}
    with pytest.raises(ValueError, match="one ladder, got 2"):
        combined_ladder(ladder_table(pd.concat([rows, rows.assign(lengths="azure_conv")])))


def test_the_page_shows_the_recorded_rows():
    assert PAGE.read_text() == page(results(FILE))
    document = {"rows": records(made_up()), "provenance": None}
    assert "| m, 40 GiB, azure_conv | GQA | nothing | 5.00 | 5.00 |" in page(document)
    shown = {line.split("|")[1].strip(): line for line in page(document).splitlines() if line.startswith("|")}
    assert "~ 2,000" in shown["+ GQA"] and "~" not in shown["+ continuous batching"]  # halves of a window that differ


def outcome(**changes: Any) -> str:
    """What the page says of a ladder of three rungs, in one line."""
    reached = {"baseline": (3.0, 100.0, 0.2), "+ GQA": (30.0, 880.0, 0.99), "+ INT8 KV": (45.0, 900.0, 0.97)}
    rows = []
    for kind in ("full", "azure_conv"):
        for name, (at_once, rate, live) in reached.items():
            rung = RUNGS[name]
            row = {"model": "llama-2-13b", "memory_limit_gib": 40.0, "lengths": kind, "rung": name}
            row |= {"scheduler": rung.scheduler, "kv_cache_dtype": rung.kv_cache_dtype, "bytes_per_request": 1.0}
            row |= {"max_concurrency": at_once, "tokens_per_second": rate, "live_utilisation": live}
            row |= {"window_s": 30.2, "drift": -0.1, "itl_p50_s": at_once / rate, "itl_p99_s": 0.1}
            row |= {"predicted_concurrency": at_once * 1.04, "predicted_tokens_per_second": rate * 0.9}
            row["predicted_itl_p99_s"] = 0.3 if (kind, name) == ("full", "+ INT8 KV") else 0.11
            rows.append(row | changes)
    return " ".join(" ".join(outcome_lines(pd.DataFrame(rows))).split())


def test_the_page_says_what_came_of_a_ladder_beside_what_was_aimed_at():
    shown = outcome()
    assert "Windows with continuous batching: 4 of 30 s, whose halves differ by 10 % at most." in shown
    assert "requests at full length (3 to 45; 14 times were aimed at) and 9.0 times the tokens/s" in shown
    assert "INT8 adds only 2 % to GQA's tokens/s" in shown and "grows from 34 to 50 ms" in shown
    assert 'missed by "+ INT8 KV" (full) with 97.0 and "+ INT8 KV" (azure_conv) with 97.0' in shown
    assert "requests at once +4 % (5 % were aimed at); tokens/s -10 % in 16 bit and INT8, not measured" in shown
    assert 'ITL p99: +10 %; far off only "+ INT8 KV" (full) 100 ms instead of 300.' in shown
    assert not outcome(lengths="full") and not outcome_lines(made_up())


def test_another_cap_has_no_aims_of_its_own_and_misses_are_named():
    shown = outcome(memory_limit_gib=80.0, window_s=4.1, predicted_concurrency=45.1, predicted_tokens_per_second=1100.0)
    assert "Windows with continuous batching: 4 rough ones of 4 s" in shown
    assert "14 times" not in shown and "8 times were" not in shown and "98 % were aimed at" in shown
    assert '(5 % were aimed at, and missed by "baseline" (full): 45 predicted, 3 measured and "+ GQA" (full)' in shown
    assert '"+ INT8 KV" (full): 1,100 predicted, 900 measured' in shown
    assert "requests at once 0 to +1403 %" in shown


def test_a_window_after_other_requests_has_room_for_all_their_successors():
    model = random_model(TINY, dtype="float32", device="cpu")
    options: dict[str, Any] = dict(kv_cache_dtype="int4", block_size=32, max_num_seqs=4, max_model_len=64)
    with LLM(model, num_gpu_blocks_override=16, **options) as llm:
        ended = SamplingParams(max_tokens=2, ignore_eos=True)
        llm.generate([[1, 2, 3]] * 4, ended, use_tqdm=False)  # each had one of four places for an unfinished block
        fill_with_noise(llm)
        figures = serve_window(llm.engine, traffic("full", 64, 256), 4, seconds=0.1)
    assert figures["peak_concurrency"] == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_limit": -4.0}, "memory_limit must be > 0 GiB, got -4"),
        ({"memory_limit": 1e6}, "memory_limit must be <= .* GiB, what is free here without a GPU, got 1e"),
        (
            {"model": ModelShape("vast", 100, 64, 64, 128, 8192, 28672, 32000, 4096)},
            "which vast needs: choose a smaller",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_a_model_is_made(options, message):
    with pytest.raises(ValueError, match=message):
        combined(progress=False, **options)
