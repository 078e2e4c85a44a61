"""A sweep runs each configuration once, keeps what is done, and gives one row after the other."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from labkit.experiments.fragmentation import final_length_utilisation
from labkit.experiments.sweep import grid, sweep

CALLS: list[dict[str, Any]] = []


def area(width: int, height: int = 1) -> dict[str, int]:
    CALLS.append({"width": width, "height": height})
    if width < 0:
        raise ValueError(f"width must be >= 0, got {width}")
    return {"area": width * height}


def squares(count: int) -> list[dict[str, int]]:
    return [{"number": n, "square": n * n} for n in range(count)]


@pytest.fixture(autouse=True)
def no_calls() -> None:
    CALLS.clear()


def test_a_grid_is_every_combination() -> None:
    assert grid(a=(1, 2), b="xy") == [dict(a=1, b="x"), dict(a=1, b="y"), dict(a=2, b="x"), dict(a=2, b="y")]


def test_rows_stand_in_the_order_of_the_configurations() -> None:
    table = sweep(area, grid(width=(3, 1), height=(2, 5)), workers=1, progress=False)
    assert table.to_dict("list") == {"width": [3, 3, 1, 1], "height": [2, 5, 2, 5], "area": [6, 15, 2, 5]}


def test_a_run_may_give_several_rows() -> None:
    table = sweep(squares, [{"count": 1}, {"count": 3}], workers=1, progress=False)
    assert table.to_dict("list") == {"count": [1, 3, 3, 3], "number": [0, 0, 1, 2], "square": [0, 0, 1, 4]}


def test_what_is_done_is_not_run_again_and_failures_do_not_lose_it(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"1 of 3 runs failed.*'width': -1.*width must be >= 0"):
        sweep(area, grid(width=(1, -1, 2)), folder=tmp_path, workers=1, progress=False)
    assert len(CALLS) == 3 and len(list(tmp_path.iterdir())) == 2
    CALLS.clear()
    table = sweep(area, grid(width=(2, 1, 7)), folder=tmp_path, workers=1, progress=False)
    assert table["area"].tolist() == [2, 1, 7] and [call["width"] for call in CALLS] == [7]


def test_a_damaged_file_and_another_function_are_run(tmp_path: Path) -> None:
    sweep(area, [{"width": 4}], folder=tmp_path, workers=1, progress=False)
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text()) == {"configuration": {"width": 4}, "result": {"area": 4}}
    file.write_text("{")
    CALLS.clear()
    sweep(area, [{"width": 4}], folder=tmp_path, workers=1, progress=False)
    assert len(CALLS) == 1
    sweep(squares, [{"count": 2}], folder=tmp_path, workers=1, progress=False)
    assert len(list(tmp_path.iterdir())) == 2


def test_local_processes_give_the_same_table() -> None:
    configurations = grid(lengths=("azure_code", "azure_conv"))
    here = sweep(final_length_utilisation, configurations, workers=1, progress=False)
    pd.testing.assert_frame_equal(here, sweep(final_length_utilisation, configurations, workers=2, progress=False))


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="workers must be >= 1, got 0"):
        sweep(area, [], workers=0)
    with pytest.raises(ValueError, match="configurations must hold JSON values, got .*object"):
        sweep(area, [{"width": object()}])


def test_nothing_to_do_is_an_empty_table() -> None:
    assert sweep(area, [], progress=False).empty


def test_without_ray_an_address_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'kv-labkit\[ray\]'"):
        sweep(area, [{"width": 1}], ray_address="auto", progress=False)
