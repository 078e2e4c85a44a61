"""The two-GPU recorder, with processes on a CPU in place of GPUs."""

from __future__ import annotations

import json

import pytest

from labkit.experiments.tensor_parallel import logits_rows, record, serve_rows


@pytest.mark.slow
def test_a_file_holds_what_two_ranks_change(tmp_path, tiny_llama):
    serve = serve_rows(
        tiny_llama,
        [1, 2],
        name="tiny",
        vocab_size=128,
        batch=4,
        num_prompt_tokens=8,
        num_output_tokens=12,
        device="cpu",
    )
    logits = logits_rows([1, 2], device="cpu", dtypes=["float32"])
    record(tmp_path / "tp.json", serve + logits, {"gpu": None})
    document = json.loads((tmp_path / "tp.json").read_text())
    one, two, compared = document["rows"]
    assert (one["tensor_parallel_size"], two["tensor_parallel_size"]) == (1, 2)
    assert one["num_output_tokens"] == two["num_output_tokens"] == 48
    assert two["kv_bytes_per_token"] * 2 == one["kv_bytes_per_token"]
    assert document["decode_speedup"] == {"2": one["itl_p50_s"] / two["itl_p50_s"]}
    assert compared["num_positions"] == 4 * 63
    assert compared["max_difference"] < 1e-4 < compared["std_of_logprobs"]
