"""The harness itself: a notebook runs in a real JupyterLab, errors are seen, and canvas pixels can be counted."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from lab import NotebookPage
from nbformat.v4 import new_code_cell, new_notebook

SQUARE = '''
import anywidget
class Square(anywidget.AnyWidget):
    _esm = """
    export default { render({ el }) {
        const canvas = document.createElement("canvas");
        canvas.className = "square"; canvas.width = 40; canvas.height = 20;
        const pen = canvas.getContext("2d");
        pen.fillStyle = "#0072b2"; pen.fillRect(0, 0, 10, 20);
        el.append(canvas);
    } }
    """
Square()
'''


def write(path: Path, *cells: str) -> None:
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(new_notebook(cells=[new_code_cell(cell) for cell in cells], metadata={"kernelspec": kernel}), path)


def test_run_all_and_canvas_pixels(notebook: NotebookPage, lab_folder: Path) -> None:
    write(lab_folder / "square.ipynb", "x = 40 + 2\nx", SQUARE)
    notebook.open("square.ipynb")
    notebook.run_all()
    assert notebook.outputs()[0][0]["data"]["text/plain"] == "42"
    assert notebook.canvas_colours("canvas.square") == {"#0072b2ff": 200, "#00000000": 600}


def test_a_failing_cell_fails_the_test(notebook: NotebookPage, lab_folder: Path) -> None:
    write(lab_folder / "wrong.ipynb", "1", "raise ValueError('no such block')")
    notebook.open("wrong.ipynb")
    with pytest.raises(AssertionError, match="cell 1: ValueError: no such block"):
        notebook.run_all()
