"""Whole traces on a simulated H200, and the commands around the simulated experiments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from labkit.cli import app
from labkit.experiments.simulated_serving import load_workload, simulated_serving

run = CliRunner().invoke


@pytest.mark.parametrize("command", ["sensitivity", "failures", "fp8", "engine-quality", "quality", "fragmentation"])
def test_a_file_that_holds_no_results_is_not_overwritten(command, tmp_path):
    file = tmp_path / "thesis.txt"
    file.write_text("years of work")
    done = run(app, ["experiment", command, "--out", str(file)])
    assert "must be a JSON file of results" in str(done.exception) + done.output
    assert file.read_text() == "years of work"


def shared_trace(path: Path) -> Path:
    rows = [
        {"timestamp": 2000 * i, "input_length": 2000, "output_length": 4, "hash_ids": [0, 1, 2, 10 + i]}
        for i in range(3)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_a_shipped_table_is_served_with_its_rate() -> None:
    row = simulated_serving(workload="azure_conv", num_requests=30)
    assert row["num_requests"] == 30 and row["num_too_long"] == 0
    assert 2 < row["seconds"] < 20  # 5.5 a second
    assert 0.003 < row["itl_p50_s"] < 0.01 and row["ttft_p50_s"] > row["itl_p50_s"]
    faster = simulated_serving(workload="azure_conv", num_requests=30, speed_up=10)
    assert faster["seconds"] < row["seconds"] and faster["num_generated_tokens"] == row["num_generated_tokens"]


def test_what_prompts_share_is_found_in_the_prefix_cache(tmp_path: Path) -> None:
    row = simulated_serving(workload=str(shared_trace(tmp_path / "t.jsonl")))
    assert row["prefix_cache_hit_rate"] == pytest.approx(2 * 1536 / (3 * 2003), rel=0.01)


def test_requests_that_the_model_cannot_hold_are_counted() -> None:
    row = simulated_serving(workload="azure_conv", num_requests=50, model="llama-2-7b")
    assert row["num_too_long"] == (load_workload("azure_conv", 50).num_total_tokens > 4096).sum() > 0
    assert row["num_requests"] + row["num_too_long"] == 50


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="workload must be a trace file or one of .*azure_conv.* got 'nowhere'"):
        simulated_serving(workload="nowhere")
    with pytest.raises(ValueError, match="speed_up must be > 0, got 0"):
        simulated_serving(speed_up=0)
    with pytest.raises(ValueError, match="num_requests must be >= 1, or None for all, got 0"):
        simulated_serving(num_requests=0)


def test_a_trace_of_which_nothing_fits_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "long.jsonl"
    trace.write_text(
        '{"timestamp": 0, "input_length": 5000, "output_length": 4, "hash_ids": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]}\n'
    )
    with pytest.raises(ValueError, match="workload must have requests of at most 4096 tokens, and '.*long.jsonl'"):
        simulated_serving(workload=str(trace), model="llama-2-7b")


def test_simulate_prints_and_saves_with_provenance(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = run(app, ["experiment", "simulate", "--trace", "azure_code", "--requests", "5", "--out", str(out)])
    assert result.exit_code == 0 and "ttft_p50_s" in result.output
    saved = json.loads(out.read_text())
    assert saved["rows"][0]["num_requests"] == 5 and saved["provenance"]["date"]


def test_prefix_hits_of_a_file(tmp_path: Path) -> None:
    out, trace = tmp_path / "out.json", shared_trace(tmp_path / "t.jsonl")
    result = run(app, ["experiment", "prefix-hits", str(trace), "--pool-blocks", "4", "--out", str(out)])
    assert result.exit_code == 0 and [row["num_hits"] for row in json.loads(out.read_text())["rows"]] == [6, 6]


def test_a_sweep_from_the_command_line_goes_on_where_it_was(tmp_path: Path) -> None:
    command = ["experiment", "sweep", "--vary", "workload=azure_code", "--vary", "num_requests=3,4"]
    command += ["--folder", str(tmp_path / "runs"), "--workers", "1", "--out", str(tmp_path / "out.json")]
    assert run(app, command).exit_code == 0
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["num_requests"] for row in rows] == [3, 4]
    assert run(app, command).exit_code == 0
    assert json.loads((tmp_path / "out.json").read_text())["rows"] == rows  # took_s too: nothing ran again


def test_vary_without_values_is_refused() -> None:
    result = run(app, ["experiment", "sweep", "--vary", "block_size"])
    assert "vary must be name=value,value,..., got 'block_size'" in str(result.exception)
