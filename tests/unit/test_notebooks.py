"""Lessons run one by one: a failing one is named with its cell, the others run, and the file is whole all the while."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from labkit.experiments import notebooks

Result = TypeVar("Result")


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """In a thread of its own: in this one the loop of the browser tests may still run."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def write(path: Path, *cells: str) -> Path:
    nbformat.write(new_notebook(cells=[new_markdown_cell("# A lesson"), *map(new_code_cell, cells)]), path)
    return path


def test_a_failing_lesson_is_recorded_and_the_others_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = write(tmp_path / "01_wrong.ipynb", "1", "raise ValueError('no such block')", "2")
    dies = write(tmp_path / "02_dies.ipynb", "import os; os._exit(9)")
    right = write(tmp_path / "03_right.ipynb", "open('here.txt', 'w').close()", "print('~' * 5000)\n40 + 2")
    out = tmp_path / "out" / "notebooks.json"
    out.parent.mkdir()
    out.write_text(json.dumps({"rows": [{"lesson": "00_before", "seconds": 1.0, "error": None}]}))
    failed = run(notebooks.record(out, [wrong, dies, right], jobs=2, time_limit=120, executed=tmp_path / "executed"))
    before, first, second, third = json.loads(out.read_text())["rows"]
    assert before["lesson"] == "00_before", "what other lessons took stays"
    assert (first["cell"], first["error"]) == (2, "ValueError: no such block")
    assert (second["cell"], second["error"]) == (1, "DeadKernelError: Kernel died")
    assert third["error"] is None and third["slowest_cell"]["cell"] in (1, 2) and 0 < third["seconds"] < 120
    assert first["shown"] == {"1": "1"}
    assert third["shown"] == {"2": "~" * 4000 + " ..."}, "what is shown is kept, as far as a reader would read"
    assert sorted(row["lesson"] for row in failed) == ["01_wrong", "02_dies"]
    assert (tmp_path / "here.txt").exists(), "cells run in the notebook's folder"
    copy = nbformat.read(tmp_path / "executed" / "03_right.ipynb", as_version=4)
    assert copy.cells[2].outputs[1].data["text/plain"] == "42"
    assert "no such block" in capsys.readouterr().out, "the whole traceback is in the log"


def test_a_lesson_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    slow = write(
        tmp_path / "01_slow.ipynb",
        "import os, pathlib, time; pathlib.Path('pid').write_text(str(os.getpid()))",
        "time.sleep(600)",
    )
    row = run(notebooks.run_lesson(slow, time_limit=8))
    assert row["error"] == "longer than 8 s" and row["seconds"] < 30
    if (pid := tmp_path / "pid").exists():  # the kernel was up in time
        assert row["cell"] == 2
        assert not Path(f"/proc/{pid.read_text()}").exists(), "its kernel is ended too"


def test_lessons_are_chosen_by_how_they_begin(tmp_path: Path) -> None:
    assert [path.name[:2] for path in notebooks.lessons(["00", "03"])] == ["00", "03"]
    assert len(notebooks.lessons()) == len(list(notebooks.LESSONS.glob("*.ipynb")))
    with pytest.raises(ValueError, match=r"only must be how lessons begin, of 00_start_here, .*; got 77"):
        notebooks.lessons(["00", "77"])
    with pytest.raises(ValueError, match="holds none"):
        notebooks.lessons(folder=tmp_path)


def test_a_wrong_option_ends_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["notebooks", "--out", "x.json", "--jobs", "0"])
    with pytest.raises(SystemExit, match="2"):
        notebooks.main()
    assert "--jobs must be 1 or more, got 0" in capsys.readouterr().err
