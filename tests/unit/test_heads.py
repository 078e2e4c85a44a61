"""The heads experiment: every part on a tiny model, resumable, and the recorded figures against what they claim."""

from __future__ import annotations

import copy
import json
import lzma
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from labkit.experiments import heads
from labkit.experiments.heads import HeadBudget, HeadTexts, conversion_rows, perplexity, uptraining_rows
from labkit.experiments.heads_layer import attention_flops, flops_rows
from labkit.experiments.heads_results import HeadsResults, heads_tables
from labkit.experiments.kv_quality import window_nll
from labkit.experiments.uptrain import UptrainSettings
from labkit.paths import data_path

BUDGET = HeadBudget(UptrainSettings(steps=4, ctx=16, batch_size=2, lr=3e-3), long_steps=12, eval_ctx=32, num_evals=2)


@pytest.fixture
def texts() -> HeadTexts:
    drawn = torch.randint(1, 120, (384,), generator=torch.Generator().manual_seed(0)).tolist()
    return HeadTexts(drawn[:192], drawn[192:320], drawn[320:])


def test_conversion_and_uptraining_of_a_tiny_model(tiny_llama: PreTrainedModel, texts, tmp_path: Path) -> None:
    tiny_llama = copy.deepcopy(tiny_llama)  # transformers leaves hooks on a model asked for its hidden states
    path = tmp_path / "heads.json"
    results = HeadsResults.open(path, tiny_llama.device, "tiny")
    conversion_rows(tiny_llama, texts, BUDGET, results)
    rows = {row["name"]: row for row in results.rows}
    original = rows["2"]
    for name in ("2 -> 4 by repeat", "2 -> 4 by repeat -> 2 by mean"):
        assert rows[name]["max_logit_change"] < 1e-4 and rows[name]["last_step_exact"]
        assert rows[name]["ppl"] == pytest.approx(original["ppl"], rel=1e-5)
    merged = rows["2 -> 1 by mean"]
    assert merged["max_logit_change"] > 0.1 and not merged["last_step_exact"]
    assert rows["2 -> 4 by repeat -> 1 by mean"]["ppl"] == pytest.approx(merged["ppl"], rel=1e-5)

    uptraining_rows(tiny_llama, texts, BUDGET, results, checkpoints=tmp_path / "checkpoints")
    runs = {row["name"]: row for row in results.rows if row["part"] == "uptraining"}
    assert len(runs) == 6 and all(row["finished"] for row in runs.values())
    long = runs["2 -> 1 by svd, distilled, long"]
    assert [point["step"] for point in long["curve"]] == [0, 6, 12]
    assert long["tokens"] == 12 * 2 * 16 and long["epochs"] == 2
    assert long["last_loss"] < long["first_loss"]
    assert json.loads(path.read_text())["rows"] == results.rows

    again = HeadsResults.open(tmp_path / "again.json", tiny_llama.device, "tiny")  # the table is lost, not the weights
    uptraining_rows(tiny_llama, texts, BUDGET, again, checkpoints=tmp_path / "checkpoints")
    assert [row["ppl"] for row in again.rows] == [row["ppl"] for row in runs.values()]
    assert all(row["tokens_per_second"] is None for row in again.rows)


def test_perplexity_is_that_of_the_paged_path(tiny_llama: PreTrainedModel, texts) -> None:
    expected = float(window_nll(tiny_llama, texts.held_out, ctx=24).mean().exp())
    assert perplexity(tiny_llama, texts.held_out, 24) == pytest.approx(expected, rel=1e-5)


def test_what_was_measured_is_not_measured_again(tiny_llama, texts, tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "heads.json"
    results = HeadsResults.open(path, tiny_llama.device, "tiny")
    conversion_rows(tiny_llama, texts, BUDGET, results)
    monkeypatch.setattr(heads, "convert_along", lambda *_: pytest.fail("measured again"))
    conversion_rows(tiny_llama, texts, BUDGET, HeadsResults.open(path, tiny_llama.device, "tiny"))
    with pytest.raises(ValueError, match=r"has rows of model 'tiny', this is 'other'"):
        HeadsResults.open(path, tiny_llama.device, "other")


@pytest.mark.parametrize("num_kv_heads", [8, 2, 1])
def test_flops_are_those_that_torch_counts(num_kv_heads: int) -> None:
    num_heads, head_dim, hidden, context = 8, 16, 96, 40
    meta = dict(device="meta")
    x, kv = torch.empty(1, hidden, **meta), torch.empty(1, num_kv_heads, context, head_dim, **meta)
    counted = {}
    with FlopCounterMode(display=False) as counter:
        q = F.linear(x, torch.empty(num_heads * head_dim, hidden, **meta))
        F.linear(q, torch.empty(hidden, num_heads * head_dim, **meta))
        counted["query_output"] = counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        for _ in range(2):
            F.linear(x, torch.empty(num_kv_heads * head_dim, hidden, **meta))
        counted["key_value"] = counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        keys = kv.repeat_interleave(num_heads // num_kv_heads, dim=1)
        torch.matmul(torch.matmul(q.view(1, num_heads, 1, head_dim), keys.transpose(2, 3)), keys)
        counted["attend"] = counter.get_total_flops()
    assert attention_flops(num_heads, num_kv_heads, head_dim, hidden, context) == counted


def test_sharing_kv_heads_saves_bytes_not_products_with_them() -> None:
    mha, gqa, mqa = flops_rows()
    assert mha["attend_flops"] == gqa["attend_flops"] == mqa["attend_flops"]
    assert [row["kv_bytes_per_token"] for row in (mha, gqa, mqa)] == [32768, 4096, 512]
    assert mha["key_value_flops"] == 8 * gqa["key_value_flops"] == 64 * mqa["key_value_flops"]
    assert list(heads_tables([mha, gqa, mqa])) == ["attention FLOPs"]


def test_training_and_held_out_text_share_no_paragraph() -> None:
    novels = lzma.decompress(data_path(heads.TRAINING_TEXT).read_bytes()).decode()
    held_out = data_path(heads.HELD_OUT_TEXT).read_text().split("\n\n")
    training = set(novels.split("\n\n"))
    assert len(training) > 5000
    assert not [paragraph for paragraph in held_out if len(paragraph) > 40 and paragraph in training]


@pytest.fixture(scope="module")
def recorded() -> list[dict]:
    results = json.loads(data_path("results/h200/heads.json").read_text())
    assert results["provenance"]["gpu"] == "NVIDIA H200" and results["provenance"]["commit"]
    return results["rows"]


def test_recorded_conversions_are_exact_or_ruinous(recorded: list[dict]) -> None:
    ppl = {row["name"]: row["ppl"] for row in recorded if row["part"] == "conversion"}
    assert ppl["3"] == pytest.approx(39.2635, abs=0.001)  # also measured on a CPU
    assert ppl["3 -> 9 by repeat"] == pytest.approx(ppl["3"], abs=1e-3)
    assert ppl["3 -> 9 by repeat -> 3 by mean"] == ppl["3"]
    assert ppl["3 -> 9 by repeat -> 1 by mean"] == pytest.approx(ppl["3 -> 1 by mean"])
    assert 10_000 < ppl["3 -> 1 by mean"] < ppl["3 -> 1 by svd"] < ppl["3 -> 1 by first"]


def test_recorded_uptraining_recovers_and_distillation_recovers_most(recorded: list[dict]) -> None:
    runs = {row["name"]: row for row in recorded if row["part"] == "uptraining"}
    assert all(
        row["finished"] and row["tokens"] == 120 * 16 * 1024 for row in runs.values() if "long" not in row["name"]
    )
    ways = ("svd, distilled", "mean, distilled", "mean, distilled without layer errors", "mean, next token")
    ppl = [runs[f"3 -> 1 by {way}"]["ppl"] for way in ways]
    assert ppl == sorted(ppl) and ppl[0] < 50 and ppl[-1] < 70
    assert all(row["ppl_other_domain"] > 200 for row in runs.values() if "-> 1" in row["name"])  # five novels are few


def test_recorded_layer_shows_what_fewer_kv_heads_buy(recorded: list[dict]) -> None:
    layer = {(r["num_kv_heads"], r["batch"], r["context"]): r for r in recorded if r["part"] == "decode layer"}
    assert len(layer) == 12
    full = [layer[n, 64, 4096] for n in (64, 8, 1)]
    assert [row["kv_bytes"] for row in full] == [8 * 2**30, 2**30, 2**27]
    assert full[0]["attention_us"] > 7 * full[1]["attention_us"] > 7 * 5 * full[2]["attention_us"]
    assert full[0]["layer_us"] > 3 * full[1]["layer_us"]
