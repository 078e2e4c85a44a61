"""docs/quality.md is what the recorded results say."""

from __future__ import annotations

from labkit.experiments.quality_document import PAGE, SHIPPED, page
from labkit.experiments.quality_policies import quality_policies
from labkit.experiments.recorded_quality import recorded_quality
from labkit.quant import KVPolicy


def test_the_page_is_generated_from_the_results():
    assert PAGE.read_text() == page(), "run python -m labkit.experiments.quality_document"


def test_the_shipped_int4_is_the_row_in_bold_within_five_bits():
    assert quality_policies()[SHIPPED] == KVPolicy.of("int4")
    row = next(row for row in recorded_quality() if row["policy"] == SHIPPED)
    assert row["bits_with_tails"] <= 5.0 and row["other_layers"] == []
    assert row["delta_ppl_percent"] <= 1.1
    assert f"**{SHIPPED}**" in page()
