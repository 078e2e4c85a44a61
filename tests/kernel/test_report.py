"""The tables of the kernels' README are the recorded results, and those are complete."""

from __future__ import annotations

import json

import pytest


def test_readme_tables_come_from_the_recorded_results():
    from labkit.kernels import report

    text = report.README.read_text()
    assert report.render(text) == text


def test_recorded_results_name_their_source_and_cover_every_op():
    from labkit.kernels import report

    result = json.loads((report.RESULTS / "kernels.json").read_text())
    assert {"gpu", "driver", "torch", "triton", "commit", "command", "date"} <= set(result["provenance"])
    assert {row["op"] for row in result["rows"]} >= {"decode", "prefill", "mixed", "write"}
    for row in result["rows"]:
        assert row["us"] > 0
        assert "error" not in row or row["error"] < 6e-3


def test_a_missing_mark_is_an_error():
    from labkit.kernels import report

    with pytest.raises(ValueError, match="decode"):
        report.fill("no marks here", "decode", "table")
