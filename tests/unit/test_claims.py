"""Every claim of the two articles has a verdict, and its numbers come out as the arithmetic says."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer import Exit

from labkit.experiments import recorded
from labkit.experiments.claims import CLAIMS, VERDICTS, __main__, measurements
from labkit.experiments.claims import evidence as evidence_of_files
from labkit.experiments.claims.evidence import LOOKUPS, claims_table, evidence
from labkit.experiments.claims.measurements import attention_flops, gain_by_spread, kv_share
from labkit.figures.claim_card import claim_cards

IDS = [f"A{n}" for n in range(1, 42)] + [f"B{n}" for n in range(1, 51)]


def test_no_claim_is_missing():
    assert list(CLAIMS) == IDS


@pytest.mark.parametrize("claim_id", IDS)
def test_a_claim_says_what_holds_and_how_that_is_known(claim_id):
    claim = CLAIMS[claim_id]
    assert claim.id == claim_id
    assert claim.verdict in VERDICTS
    assert claim.says.endswith((".", "%"))
    assert claim.check and claim.source
    assert claim.statement.endswith(".")
    assert not re.search(r"nan|inf\b|[{}]", claim.statement)


def test_only_claims_that_hold_are_confirmed_without_a_reason():
    short = [claim.id for claim in CLAIMS.values() if claim.statement == "True."]
    assert all(CLAIMS[claim_id].verdict == "correct" for claim_id in short)


@pytest.mark.parametrize(
    ("claim_id", "number", "value"),
    [
        ("A1", "knee", 31_777),
        ("A2", "conv", 26.9),
        ("A4", "b16", 0.54),
        ("A6", "gib", 50.0),
        ("A12", "gb", 1.678),
        ("A14", "reserved", 15.3),
        ("A14", "paged", 45.8),
        ("A18", "slot20", 52),
        ("A18", "slot47", 127),
        ("A34", "c256", 2416),
        ("B2", "most40", 1.87),
        ("B6", "gib", 2.0),
        ("B7", "even", 6.28),
        ("B11", "tokens", 91_136),
        ("B14", "conv", 8.02),
        ("B18", "rate", 532),
        ("B18", "share", 35.7),
        ("B21", "conv", 0.81),
        ("B43", "at90", 3),
        ("B45", "fits", 23),
        ("B46", "fits", 46),
    ],
)
def test_the_numbers_of_a_claim(claim_id, number, value):
    """Within 2 %: percentiles of a trace stand for its requests."""
    assert CLAIMS[claim_id].numbers()[number] == pytest.approx(value, rel=0.02)


def test_the_table_has_a_row_for_each_claim_and_can_be_split_by_article():
    assert list(claims_table().id) == IDS
    assert len(claims_table("A")) == 41
    assert len(claims_table("B")) == 50


def test_evidence_names_file_device_and_commit():
    found = evidence("A27")
    assert found, "the sweep over block sizes is recorded"
    assert all("kernels.json" in item.where and "H200" in item.where and "commit" in item.where for item in found)
    assert set(LOOKUPS) <= set(CLAIMS)


def test_an_unknown_claim_is_named():
    with pytest.raises(ValueError, match="'A99'"):
        evidence("A99")


def test_sharing_kv_heads_saves_no_attention_flops():
    assert {row["value"] for row in attention_flops()} == {536_870_912}


def test_blocks_gain_more_where_lengths_differ_more():
    gains = [row["value"] for row in gain_by_spread()]
    assert gains == sorted(gains)
    assert gains[-1] > 2 * gains[1]


def test_cards_show_verdict_numbers_and_what_was_recorded():
    from labkit.figures import claim_cards

    cards = claim_cards("A6", "A27")
    assert "50.00 GiB" in str(cards) and "[wrong]" in str(cards)
    html = cards._repr_html_()
    assert html.count("<article") == 2 and "Recorded:" in html and "H200" in html
    wrong = claim_cards(verdict="wrong")
    assert {claim.verdict for claim in wrong.claims} == {"wrong"} and len(wrong.claims) > 10
    with pytest.raises(ValueError, match="'false'"):
        claim_cards(verdict="false")
    with pytest.raises(ValueError, match="'C1'"):
        claim_cards("C1")


def test_what_was_measured_here_stands_on_the_card(tmp_path):
    from labkit.experiments.claims.evidence import measured_here
    from labkit.figures import claim_cards

    assert measured_here(tmp_path / "none.json") == []
    row = {"claim": "A6", "quantity": "KV cache allocated", "setting": "fp16", "value": 50.0, "unit": "GiB"}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"provenance": {"gpu": "My GPU", "commit": "abc"}, "rows": [row]}))
    text = str(claim_cards("A6", here=measured_here(path)))
    assert "here: KV cache allocated (fp16): 50 GiB [mine.json, My GPU, commit abc]" in text


def test_what_a_gpu_will_measure_stands_on_the_cards(tmp_path: Path, monkeypatch):
    """The file as the command writes it, its figures made up, one measurement failing: the others come through."""

    def made_up(*claims: str) -> Any:
        def rows(*_: object) -> list[measurements.Row]:
            return [measurements._row(name, "something", "1 x 2 tokens", 1234.5, "ms") for name in claims]

        return rows

    def fail(*_: object) -> list[measurements.Row]:
        raise torch.OutOfMemoryError("no room")

    file = tmp_path / "claims.json"
    gpu = {"pool_allocation": ("A6",), "joined_against_paged": ("A19",), "cache_peaks": ("A8",), "kv_share": ("B11",)}
    for name, claims in (gpu | {"decode_steps": ("A1", "A34")}).items():
        monkeypatch.setattr(measurements, name, made_up(*claims))
    monkeypatch.setattr(measurements, "activation_peaks", fail)
    monkeypatch.setattr(__main__, "random_model", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(__main__, "provenance", lambda: {"gpu": "NVIDIA H200", "commit": "abc"})
    with pytest.raises(Exit) as end:
        __main__.main(file)
    assert end.value.exit_code == 1

    def results(name: str) -> dict[str, Any]:
        return json.loads(file.read_text()) if name.endswith("claims.json") else recorded.results(name)

    monkeypatch.setattr(evidence_of_files, "results", results)
    assert not evidence("A28")
    for name in ("A1", "A6", "A8", "A19", "A34", "B11"):
        line = "something (1 x 2 tokens): 1,234 ms [claims.json, NVIDIA H200, commit abc]"
        card = claim_cards(name)
        assert line in str(card) and line in card._repr_html_()
    assert "claims.json" in str(claim_cards("B21")) and "claims.json" in str(claim_cards("B24"))
    assert claims_table().set_index("id").measured["A6"].startswith("something")


def test_verdicts_follow_from_what_was_recorded():
    """What the cards say of the combined ladder and of quantised runs, and that each figure has its row below."""
    assert "4 of full length" in CLAIMS["B44"].statement and "12 conversations" in CLAIMS["B44"].statement
    assert (
        "24 of full length" in CLAIMS["B45"].statement and "72 conversations and 15.2 times" in CLAIMS["B45"].statement
    )
    assert (
        "47 of full length" in CLAIMS["B46"].statement and "141 conversations and 17.7 times" in CLAIMS["B46"].statement
    )
    assert CLAIMS["B45"].verdict == CLAIMS["B46"].verdict == "wrong"
    unfused, fused = (CLAIMS["A39"].numbers()[name] for name in ("unfused", "fused"))
    assert unfused < 0.95 < 1 < fused, "neither way is 5 % slower"
    measured = "A1 A6 A8 A19 A28 A30 A34 A36 A37 A38 A39 A40 B11 B21 B24 B33 B41 B42 B43 B44 B45 B46 B47 B49"
    assert all(any("H200" in item.where for item in evidence(name)) for name in measured.split())


def test_the_share_of_the_cache_grows_with_the_batch():
    from labkit.kv_math import ModelShape
    from labkit.models import random_model

    model = random_model(ModelShape("tiny", 1, 2, 2, 8, 16, 16, 64, 2048), dtype="float32", device="cpu")
    one, most_of_one, three, most_of_three = (row["value"] for row in kv_share(model, (1, 3)))
    assert 0 < one < most_of_one < 100 and one < three < most_of_three


def test_cards_are_open_if_few_lines_if_some_and_folded_by_verdict_if_many():
    html = claim_cards("A6", "A27")._repr_html_()
    assert html.count("<details open>") == 2
    html = claim_cards("A6", "A7", "A11", "A12")._repr_html_()
    assert html.count("<article") == 4 and "<details open>" not in html and "claims <span" not in html
    html = claim_cards()._repr_html_()
    assert html.count("<article") == len(CLAIMS) and html.count("claims <span") == len(VERDICTS)
