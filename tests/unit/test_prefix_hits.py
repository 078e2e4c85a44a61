"""Prefix hits of a trace: what an unlimited cache finds, and what eviction takes away."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from labkit.experiments.prefix_hits import prefix_hits, prefix_hits_table
from labkit.figures import prefix_hit_curve


def drawn(figure: Any) -> list[Any]:
    """The traces of a figure, whose classes plotly makes at run time."""
    return list(figure.data)


def trace(path: Path, *prompts: list[int]) -> Path:
    rows = [
        {"timestamp": i, "input_length": 512 * len(ids) - 7, "output_length": 1, "hash_ids": ids}
        for i, ids in enumerate(prompts)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_hits_end_where_the_prompts_part_and_small_pools_forget(tmp_path: Path) -> None:
    path = trace(tmp_path / "t.jsonl", [0, 1, 2], [0, 1, 3], [7, 8, 9], [0, 1, 2])
    rows = prefix_hits(path, [3, 8], progress=False)
    assert [(row["pool_blocks"], row["num_hits"]) for row in rows] == [(3, 2), (7, 5)]  # 7 different blocks
    assert rows[-1]["hit_ratio"] == 5 / 12 and rows[-1]["pool_tokens"] == 7 * 512


def test_the_least_recently_used_goes_first_and_a_prompts_end_before_its_beginning(tmp_path: Path) -> None:
    path = trace(tmp_path / "t.jsonl", [0, 1], [2, 3], [0], [4, 5], [0, 1], [2, 3])
    (row, _) = prefix_hits(path, [4], progress=False)
    # 4 and 5 take the places of 3 and then 2: block 0 was used after them, and 1 was longest unused of all
    assert row["num_hits"] == 1 + 1


def test_bad_input_is_refused(tmp_path: Path) -> None:
    path = trace(tmp_path / "t.jsonl", [0, 1, 2])
    with pytest.raises(ValueError, match="pool_blocks must be >= 3, the longest prompt, got 2"):
        prefix_hits(path, [2], progress=False)
    with pytest.raises(ValueError, match="has no requests"):
        prefix_hits(trace(tmp_path / "empty.jsonl"), progress=False)


def test_the_curve_shows_the_table(tmp_path: Path) -> None:
    rows = prefix_hits(trace(tmp_path / "t.jsonl", [0, 1, 2], [0, 1, 3]), [3], progress=False)
    table = prefix_hits_table(rows)
    assert table["llama_3_8b_gib"].tolist() == [3 * 512 / 8192, 4 * 512 / 8192]
    curve = drawn(prefix_hit_curve(table))[0]
    assert list(curve.y) == pd.DataFrame(rows)["hit_ratio"].tolist()
