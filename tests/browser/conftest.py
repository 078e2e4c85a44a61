"""Fixtures of the browser tests: `lab_folder` and `notebook` give a real JupyterLab in a headless Chromium.

A test that writes its own notebooks puts them in `lab_folder`, which starts as a copy of notebooks/:

    def test_it(notebook, lab_folder):
        nbformat.write(..., lab_folder / "mine.ipynb")
        notebook.open("mine.ipynb")
        notebook.run_all()
        assert notebook.canvas_colours()["#009e73ff"] > 100
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

sys.path.insert(0, str(Path(__file__).parent))  # tests are no package, so that `kernels` stays out of sys.path

from find_browser import find_browser
from lab import NotebookPage, jupyterlab

REPOSITORY = Path(__file__).parents[2]

# The flags after --disable-gpu keep Chromium from calling home.
CHROMIUM_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.browser)
            if os.environ.get("NO_BROWSER") == "1":
                item.add_marker(pytest.mark.skip(reason="NO_BROWSER=1 is set"))


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """A headless Chromium. Fails without one: only NO_BROWSER=1 leaves the browser tests out."""
    executable = find_browser()
    if executable is None:
        pytest.fail("no Chromium or Chrome: run python tests/browser/find_browser.py, or set NO_BROWSER=1")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=executable, headless=True, args=CHROMIUM_FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def lab_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that JupyterLab serves: a copy of notebooks/, free to write to."""
    folder = tmp_path_factory.mktemp("lab") / "notebooks"
    if (REPOSITORY / "notebooks").is_dir():
        shutil.copytree(REPOSITORY / "notebooks", folder)
    else:
        folder.mkdir()
    return folder


@pytest.fixture(scope="session")
def lab_address(lab_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a running JupyterLab that serves `lab_folder` and keeps its settings to itself."""
    with jupyterlab(lab_folder, tmp_path_factory.mktemp("jupyter")) as address:
        yield address


@pytest.fixture
def notebook(browser: Browser, lab_address: str, request: pytest.FixtureRequest) -> Iterator[NotebookPage]:
    """A page ready to open a notebook. After the test its screenshot is test-results/NAME.png."""
    page = browser.new_page(viewport={"width": 1280, "height": 1000})
    view = NotebookPage(page, lab_address)
    yield view
    name = "".join(c if c.isalnum() or c in "-_" else "_" for c in request.node.name)
    view.screenshot(REPOSITORY / "test-results" / f"{name}.png")
    page.close()
