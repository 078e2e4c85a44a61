"""Result files: whole at any moment, and refused by name where they are something else."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from labkit.experiments import provenance
from labkit.experiments.result_file import read_results, replace_text, write_results
from labkit.kernels import result_file as kernel_results


def test_what_was_written_is_read_and_nothing_else_is_left(tmp_path: Path):
    path = tmp_path / "folder" / "rows.json"
    assert read_results(path, "rows") == {}
    for document in ({"rows": [{"a": 1}]}, {"rows": []}):
        write_results(path, document)
        assert read_results(path, "rows") == document
    kernel_results.write_results(path, {"rows": [{"b": 2}]})
    assert read_results(path, "rows") == {"rows": [{"b": 2}]}
    assert [file.name for file in path.parent.iterdir()] == ["rows.json"]


def test_a_process_that_dies_while_it_writes_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch):
    path = tmp_path / "rows.json"
    write_results(path, {"rows": []})

    def die(self: Path, text: str, **_: object) -> int:
        self.open("w").write(text[:1])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", die)
    for write in (replace_text, lambda path, text: kernel_results.write_results(path, {"text": text})):
        with pytest.raises(KeyboardInterrupt):
            write(path, "something longer")
    assert json.loads(path.read_text()) == {"rows": []}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"rows": [', "is no JSON"),
        ("[]", "must hold a JSON object of results, got list"),
        ('{"table": []}', 'must hold "rows", a list of rows, and has table'),
        ('{"rows": [1]}', 'must hold "rows"'),
    ],
)
def test_another_layout_is_refused_by_the_name_of_the_file(tmp_path: Path, text: str, said: str):
    path = tmp_path / "half.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"half.json.*{said}"):
        read_results(path, "rows")


def test_the_command_of_a_notebook_is_not_that_of_its_kernel(tmp_path: Path, monkeypatch):
    arguments = ["ipykernel_launcher.py", "-f", str(tmp_path / "kernel.json"), "--HistoryManager.hist_file=:memory:"]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=object))
    assert provenance("cpu")["command"] == kernel_results.command() == "in a notebook"


def test_a_command_is_what_was_typed_without_the_machine_s_folders(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(
        sys, "argv", [str(tmp_path / "bench.py"), "--only", "steps", "--json", str(tmp_path / "out.json")]
    )
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__spec__=None))
    assert kernel_results.command() == "python -m labkit.kernels.bench --only steps --json out.json"
    assert provenance("cpu")["command"] == "bench.py --only steps --json out.json"
