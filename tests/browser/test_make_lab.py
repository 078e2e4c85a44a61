"""`make lab` ends in a JupyterLab that shows the first lesson, with the options that LAB_ARGS passes on."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from lab import NotebookPage, free_port, server_options, serving
from playwright.sync_api import Browser

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.skipif(not (REPOSITORY / ".venv/.installed").exists(), reason="the environment was not made by make")
def test_make_lab_shows_the_first_lesson(browser: Browser, tmp_path: Path) -> None:
    port = free_port()
    command = ["make", "lab", f"LAB_ARGS={' '.join(server_options(port))}"]
    started = time.monotonic()
    with serving(command, port, REPOSITORY, tmp_path) as address:
        print(f"make lab was up in {time.monotonic() - started:.1f} s")
        notebook = NotebookPage(browser.new_page(), address)
        notebook.open("notebooks/00_start_here.ipynb")
        assert notebook.page.locator(".jp-Notebook .jp-MarkdownCell h1").count() > 0
        notebook.page.close()
