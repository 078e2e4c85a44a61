"""The serving benchmark: its workload is fixed, its rows add up, its file is updated row by row."""

import json
import subprocess
import sys

import pytest

from labkit.experiments import ServeRequest, bench_serve, provenance, save_rows, standard_workload, table
from labkit.experiments.serving import run_requests


def test_the_standard_workload_is_the_one_in_the_tables():
    requests = standard_workload(32000)
    assert len(requests) == 256
    assert sum(len(r.prompt_token_ids) for r in requests) == 43_368
    assert sum(r.num_output_tokens for r in requests) == 55_994
    assert max(len(r.prompt_token_ids) + r.num_output_tokens for r in requests) == 1322
    assert all(10 <= token < 32000 for token in requests[0].prompt_token_ids)


def some_requests() -> list[ServeRequest]:
    return [ServeRequest([5 + i] * (3 + i), 4 + i % 3) for i in range(6)]


def test_labkit_and_generate_serve_the_same_requests(tiny_llama):
    rows = bench_serve(
        tiny_llama,
        some_requests(),
        systems=["labkit", "transformers-generate"],
        model_name="tiny",
        workload_name="six",
        num_gpu_blocks_override=40,
        max_num_seqs=4,
    )
    assert [row.system for row in rows] == ["labkit", "transformers-generate"]
    assert all(row.num_output_tokens == 30 and row.tokens_per_second == 30 / row.seconds for row in rows)
    latencies = rows[0].ttft_p50_s, rows[0].itl_p50_s, rows[0].itl_p99_s
    assert all(latency is not None and latency > 0 for latency in latencies)
    assert rows[1].ttft_p50_s is None
    assert table(rows)["ratio"].tolist() == [1.0, rows[1].tokens_per_second / rows[0].tokens_per_second]


def test_timed_requests_start_when_they_arrive(tiny_llama):
    from labkit import LLM

    requests = [ServeRequest([5, 6, 7], 3, arrival_time=0.2 * i) for i in range(3)]
    with LLM(tiny_llama, max_model_len=64, num_gpu_blocks_override=20) as llm:
        figures = run_requests(llm, requests)
        assert llm.stats.num_finished == {"length": 3}
    assert figures["seconds"] >= 0.4


def test_an_unknown_system_is_refused(tiny_llama):
    with pytest.raises(ValueError, match="systems must be among labkit, .*, got \\['vroom'\\]"):
        bench_serve(tiny_llama, some_requests(), systems=["vroom"], model_name="tiny", workload_name="six")


def test_results_are_kept_with_where_they_come_from(tiny_llama, tmp_path):
    rows = bench_serve(tiny_llama, some_requests(), model_name="tiny", workload_name="six", num_gpu_blocks_override=40)
    path = tmp_path / "results" / "serve.json"
    save_rows(path, rows, provenance("cpu"))
    save_rows(path, rows, provenance("cpu"))
    stored = json.loads(path.read_text())
    assert len(stored["rows"]) == 1 and stored["rows"][0]["system"] == "labkit"
    assert {"gpu", "driver", "torch", "triton", "transformers", "commit", "command", "date"} <= set(
        stored["provenance"]
    )


def test_the_command_refuses_a_shape_that_it_does_not_know():
    command = [sys.executable, "-m", "labkit.cli", "bench", "serve", "--shape", "lama-2-7b"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "llama-2-7b" in done.stderr.lower()


def test_the_page_of_serving_figures_shows_the_recorded_results():
    from labkit.experiments.serve_document import PAGE, recorded

    assert PAGE.read_text() == recorded(), "run python -m labkit.experiments.serve_document"


def test_the_recorded_run_replays_to_an_empty_pool():
    from labkit.observe import BlockTableState, Trace
    from labkit.paths import data_path

    trace = Trace.load(data_path("results/h200/azure_conv_smollm2.trace"))
    assert trace.meta["recorded"]["gpu"] == "NVIDIA H200" and not trace.is_truncated
    state = BlockTableState(trace.num_blocks, trace.block_size)
    most = 0
    for record in trace:
        state.apply(record)
        most = max(most, state.num_referenced_blocks)
    assert most / trace.num_blocks > 0.99
    assert state.num_referenced_blocks == 0
