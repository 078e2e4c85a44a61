"""The data that ships: length tables, text, and where they are found."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from labkit.paths import data_path
from labkit.simulation import LengthTable
from labkit.simulation.length_tables import PERCENTS
from labkit.simulation.make_length_tables import TRACES, main

# Computed from the traces apart from the code that made the tables.
DECILES = {
    ("azure_conv", "prompt_tokens"): [207, 387, 403, 703, 1020, 1071, 1130, 1315, 2734.5],
    ("azure_conv", "output_tokens"): [54, 77, 91, 103, 129, 177, 384, 400, 424],
    ("azure_code", "prompt_tokens"): [147, 385.6, 770, 1075, 1469, 1909, 2433, 3192.4, 5187.6],
    ("azure_code", "output_tokens"): [7, 8, 9, 11, 13, 16, 20, 29, 55],
}
MEANS = {
    "azure_conv": (19_366, 1154.7, 211.1),
    "azure_code": (8_819, 2047.8, 27.9),
    "mooncake_conversation": (12_031, 12_035, 343),
    "arxiv_summarization": (28_257, 2_588, 291),
}


@pytest.mark.parametrize(("name", "quantity"), DECILES)
def test_deciles_are_those_of_the_traces(name: str, quantity) -> None:
    table = LengthTable.load(name)
    assert [table.percentile(quantity, p) for p in range(10, 100, 10)] == DECILES[name, quantity]


def test_tails_and_totals_are_those_of_the_traces() -> None:
    conv, code = LengthTable.load("azure_conv"), LengthTable.load("azure_code")
    total = [conv.percentile("total_tokens", p) for p in (50, 90, 99, 100)]
    assert total == pytest.approx([1412, 2820, 4259, 14_089], abs=0.5)
    assert [code.percentile("prompt_tokens", p) for p in (95, 100)] == pytest.approx([7303, 7437], abs=0.5)
    assert code.percentile("output_tokens", 99) == pytest.approx(251.5, abs=0.5)
    assert LengthTable.load("mooncake_conversation").percentile("prompt_tokens", 100) == 126_195
    assert conv.arrivals is not None and code.arrivals is not None
    assert (round(conv.arrivals["rate"], 2), round(conv.arrivals["cv"], 2)) == (5.53, 1.09)
    assert (round(code.arrivals["rate"], 2), round(code.arrivals["cv"], 2)) == (2.57, 13.15)


@pytest.mark.parametrize("name", MEANS)
def test_samples_have_the_mean_of_the_trace(name: str) -> None:
    table = LengthTable.load(name)
    prompts, outputs = table.sample(100_000, rng=1)
    assert (table.num_requests, table.means["prompt_tokens"]) == (
        MEANS[name][0],
        pytest.approx(MEANS[name][1], abs=0.6),
    )
    assert prompts.mean() == pytest.approx(MEANS[name][1], rel=0.02)
    assert outputs.mean() == pytest.approx(MEANS[name][2], rel=0.05)  # the last percentile of code's outputs is long
    assert prompts.min() >= 1 and prompts.max() <= table.percentile("prompt_tokens", 100)


def test_samples_follow_the_distribution_and_repeat_with_the_seed() -> None:
    table = LengthTable.load("azure_conv")
    prompts, _ = table.sample(100_000, rng=2)
    assert np.percentile(prompts, [10, 50, 90]) == pytest.approx([207, 1020, 2734.5], rel=0.02)
    assert np.array_equal(prompts, table.sample(100_000, rng=2)[0])
    assert not np.array_equal(prompts, table.sample(100_000, rng=3)[0])


def test_all_tables_are_named_with_source_and_licence() -> None:
    assert LengthTable.names() == sorted(TRACES)
    for name in LengthTable.names():
        table = LengthTable.load(name)
        assert table.name == name and table.source and table.licence in ("CC-BY-4.0", "Apache-2.0", "MIT")
        for lengths in (table.prompt_tokens, table.output_tokens, table.total_tokens):
            assert lengths.shape == (len(PERCENTS),) and np.all(np.diff(lengths) >= 0)
        assert f"{name}.json" in data_path("LICENSES.md").read_text(encoding="utf-8")


def test_unknown_names_say_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"unknown length table 'azure': there are arxiv_summarization, azure_code"):
        LengthTable.load("azure")
    with pytest.raises(FileNotFoundError, match=r"no data file 'text/emma\.txt': that folder holds persuasion"):
        data_path("text/emma.txt")
    with pytest.raises(ValueError, match=r"percent must be in \[0, 100\], got 101"):
        LengthTable.load("azure_conv").percentile("prompt_tokens", 101)


def test_the_text_is_the_one_that_perplexities_are_quoted_for() -> None:
    text = data_path("text/persuasion_excerpt_320k.txt").read_bytes()
    assert len(text) == 319_906 and text.isascii()
    assert hashlib.sha256(text).hexdigest() == "1efcc9cddc05a5b10624767a5c7544e79efbfe8d5a5e09fa3e568292dad33c40"


def test_tables_are_made_from_a_folder_of_traces(tmp_path: Path) -> None:
    azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
        f"2023-11-16 18:15:4{i}.5000000,{10 * i},{i}\n" for i in range(1, 6)
    )
    (tmp_path / "in").mkdir()
    for name, trace in TRACES.items():
        text = azure
        if name == "mooncake_conversation":
            text = '{"timestamp": 0, "input_length": 7, "output_length": 0, "hash_ids": [0]}\n'
        elif name == "arxiv_summarization":
            text = "num_prefill_tokens,num_decode_tokens,num_total_tokens\n8,2,10\n6,4,10\n"
        (tmp_path / "in" / trace.file_name).write_text(text, encoding="utf-8")
    main(tmp_path / "in", tmp_path)

    made = json.loads((tmp_path / "azure_code.json").read_text(encoding="utf-8"))
    assert made["num_requests"] == 5 and made["arrivals"] == {"rate": 1.0, "cv": 0.0}
    assert made["means"] == {"prompt_tokens": 30.0, "output_tokens": 3.0, "total_tokens": 33.0}
    assert [made["prompt_tokens"][i] for i in (0, 50, -1)] == [10, 30, 50]
    untimed = json.loads((tmp_path / "arxiv_summarization.json").read_text(encoding="utf-8"))
    assert untimed["arrivals"] is None and set(untimed["total_tokens"]) == {10.0}

    (tmp_path / "in" / "conversation_trace.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match=r"conversation_trace\.jsonl is nowhere in"):
        main(tmp_path / "in", tmp_path)
