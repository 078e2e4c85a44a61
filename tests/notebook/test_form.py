"""The lessons' files: stripped, on the standard kernel, and without installs or downloads of their own.

That each runs from top to bottom is checked by nbval: pytest notebooks --nbval-lax --nbval-current-env
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


def test_there_are_lessons() -> None:
    assert NOTEBOOKS and NOTEBOOKS[0].name == "00_start_here.ipynb"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_no_outputs_are_stored(path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "nbstripout", "--verify", str(path)], capture_output=True)
    assert done.returncode == 0, f"run: nbstripout {path.name}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_kernel_and_first_cell(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert notebook.cells[0].cell_type == "markdown", "a lesson begins with what the reader will be able to do"
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    assert "env_report()" in code[0]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_no_installs_or_shell_downloads(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    assert not re.search(r"^\s*[!%]\s*(pip|conda|uv|wget|curl|git|apt)", code, re.MULTILINE)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_links_into_the_repository_lead_somewhere(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    targets = [target for target in re.findall(r"\]\(([^)#\s]+)", text) if not re.match(r"https?:", target)]
    assert [target for target in targets if not (path.parent / target).exists()] == []
