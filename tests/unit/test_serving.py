"""The serving benchmark: its workload is fixed, its rows add up, its file is updated row by row."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from labkit.experiments import ServeRequest, bench_serve, provenance, save_rows, serving_peers, standard_workload, table
from labkit.experiments.kv_formats import kv_formats, record_kv_formats
from labkit.experiments.serving import ServeRow, run_requests


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
    rates = [row.tokens_per_second or 0.0 for row in rows]
    assert rates == [30 / (row.seconds or 1e9) for row in rows] and all(row.num_output_tokens == 30 for row in rows)
    latencies = rows[0].ttft_p50_s, rows[0].itl_p50_s, rows[0].itl_p99_s
    assert all(latency is not None and latency > 0 for latency in latencies)
    assert rows[1].ttft_p50_s is None
    assert table(rows)["ratio"].tolist() == [1.0, rates[1] / rates[0]]


def test_vllm_is_a_column_where_it_is_installed_and_not_measured_elsewhere(tiny_llama, monkeypatch):
    def vllm_row() -> ServeRow:
        return bench_serve(tiny_llama, some_requests(), systems=["vllm"], model_name="tiny", workload_name="six")[0]

    monkeypatch.setattr(serving_peers, "find_spec", lambda name: None)
    missing = vllm_row()
    assert missing.seconds is None and missing.tokens_per_second is None
    assert "not measured" in table([missing]).to_string(na_rep="not measured")

    calls = []

    class FakeLLM:
        def __init__(self, model, **options):
            self.config = json.loads((Path(model) / "config.json").read_text())
            self.options = options

        def generate(self, prompts, params, use_tqdm):
            calls.append((self, prompts, params))

    module = ModuleType("vllm")
    module.__dict__.update(LLM=FakeLLM, SamplingParams=lambda **options: options)
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(serving_peers, "find_spec", lambda name: module)
    measured = vllm_row()
    assert measured.tokens_per_second is not None and measured.tokens_per_second > 0
    llm, prompts, params = calls[-1]
    assert len(calls) == 2 and len(calls[0][1]) == 4  # a warm-up comes first
    assert llm.config["num_hidden_layers"] == 3 and llm.options["load_format"] == "dummy"
    assert llm.options["dtype"] == "float32" and llm.options["max_model_len"] == 14
    assert [prompt["prompt_token_ids"] for prompt in prompts] == [r.prompt_token_ids for r in some_requests()]
    assert [one["max_tokens"] for one in params] == [r.num_output_tokens for r in some_requests()]
    assert all(one["ignore_eos"] and one["temperature"] == 0 for one in params)


def test_a_kv_format_is_named_in_its_row(tiny_llama):
    names = {"model_name": "tiny", "workload_name": "six"}
    options = {"kv_cache_dtype": "int8", "num_gpu_blocks_override": 40}
    rows = bench_serve(tiny_llama, some_requests(), systems=["labkit", "transformers-generate"], **names, **options)
    assert [row.kv_format for row in rows] == ["int8", "float32"]


def test_kv_formats_share_one_number_of_bytes(tiny_llama, tmp_path):
    formats = {"16 bit": {}, "int8": {"kv_cache_dtype": "int8"}, "int5": {"kv_cache_dtype": "int5"}}
    path = tmp_path / "quant.json"
    path.write_text('{"rows": [1]}')
    rows = kv_formats(tiny_llama, pool_bytes=1 << 17, context=32, num_output_tokens=4, formats=formats)
    plain, equal, most, refused = record_kv_formats(path, rows, provenance("cpu"))
    assert plain["ratio_to_first"] == 1 and plain["batch"] == equal["batch"] < most["batch"]
    assert equal["num_blocks"] == most["num_blocks"] > 2 * plain["num_blocks"]
    assert refused["kv_format"] == "int5" and "kv_cache_dtype must be one of" in refused["not_measured"]
    assert json.loads(path.read_text()).keys() == {"rows", "engine"}


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
    assert len(stored["rows"]) == 1 and stored["rows"][0]["system"] == "labkit" and "commit" not in stored["rows"][0]
    save_rows(path, [replace(rows[0], system="other")], provenance("cpu") | {"commit": "later"})
    before, after = json.loads(path.read_text())["rows"]
    assert before["commit"] == stored["provenance"]["commit"] and "commit" not in after
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
