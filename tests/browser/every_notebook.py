"""Every lesson in a real browser, from top to bottom, and the gallery in Notebook 7: `make test-browser`, ten minutes.

Screenshots of each lesson in pieces of a window's height are kept in test-results/lessons/, to be looked at.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from gallery import CELLS, write_gallery
from lab import NotebookPage, jupyterlab
from playwright.sync_api import Browser, expect

REPOSITORY = Path(__file__).parents[2]
LESSONS = sorted(path.name for path in (REPOSITORY / "notebooks").glob("*.ipynb"))
DARK = [name for name in LESSONS if name[:2] in ("02", "06")]
CASES = [(name, "Light") for name in LESSONS] + [(name, "Dark") for name in DARK]
HEIGHT = 1400

# What should have been drawn and was not: a widget without size or with one colour only, a plot without marks.
BLANK = """() => {
    const blank = [];
    for (const canvas of document.querySelectorAll('.jp-OutputArea canvas')) {
        const pen = canvas.getContext('2d');
        if (!pen || !canvas.width || !canvas.height || canvas.classList.contains('labkit-usage')) continue;
        const words = new Uint32Array(pen.getImageData(0, 0, canvas.width, canvas.height).data.buffer);
        if (words.every(word => word === words[0])) blank.push(`canvas.${canvas.className}`);
    }
    for (const view of document.querySelectorAll('.jp-OutputArea .jupyter-widgets-view')) {
        const box = view.getBoundingClientRect();
        if (!box.width || !box.height) blank.push(`widget ${view.firstElementChild?.className}`);
    }
    for (const plot of document.querySelectorAll('.jp-OutputArea .js-plotly-plot')) {
        const marks = '.scatterlayer path, .barlayer path, .heatmaplayer image, .pielayer path';
        if (!plot.querySelector(marks)) blank.push('plot');
    }
    const text = document.querySelector('.jp-Notebook').textContent;
    if (/Error displaying widget|Loading widget/.test(text)) blank.push('a widget that did not load');
    return blank;
}"""

TOO_WIDE = """() => [...document.querySelectorAll('.jp-OutputArea-output')]
    .filter(output => output.scrollWidth > output.clientWidth + 2)
    .map(output => `${output.textContent.trim().slice(0, 60)}: ${output.scrollWidth} in ${output.clientWidth} px`)"""

# To a height, and until ten frames have shown the page at one and the same length: what comes into view is drawn then.
SCROLL = """async (element, height) => {
    element.scrollTop = height;
    for (let same = 0, before = -1, frame = 0; same < 10 && frame < 300; frame++) {
        await new Promise(done => requestAnimationFrame(done));
        same = element.scrollHeight === before ? same + 1 : 0;
        before = element.scrollHeight;
    }
}"""


@pytest.fixture
def wide(browser: Browser, lab_address: str) -> Iterator[NotebookPage]:
    page = browser.new_page(viewport={"width": 1250, "height": HEIGHT})
    yield NotebookPage(page, lab_address)
    page.close()


def keep_pictures(notebook: NotebookPage, name: str) -> None:
    for old in (REPOSITORY / "test-results" / "lessons").glob(f"{name}-*.png"):
        old.unlink()  # a page that was longer had more
    scroller = notebook.page.locator(".jp-WindowedPanel-outer").first
    for number in range(40):
        scroller.evaluate(SCROLL, number * (HEIGHT - 150))
        notebook.screenshot(REPOSITORY / "test-results" / "lessons" / f"{name}-{number:02}.png")
        if scroller.evaluate("e => e.scrollTop + e.clientHeight >= e.scrollHeight - 2"):
            return


def use_theme(notebook: NotebookPage, theme: str) -> None:
    change = "theme => window.jupyterapp.commands.execute('apputils:change-theme', { theme })"
    notebook.page.evaluate(change, f"JupyterLab {theme}")
    notebook.page.wait_for_selector(f"body[data-jp-theme-light={str(theme == 'Light').lower()}]", state="attached")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "theme"), CASES, ids=lambda value: value.removesuffix(".ipynb"))
def test_a_lesson_runs_and_shows_all_it_has(wide: NotebookPage, name: str, theme: str) -> None:
    wide.open(name, timeout=120)
    use_theme(wide, theme)
    wide.run_command("application:toggle-left-area")
    try:
        wide.run_all(timeout=600)
        assert wide.becomes_empty(BLANK) == []
        keep_pictures(wide, f"{name.removesuffix('.ipynb')}-{theme}")
        assert wide.becomes_empty(BLANK) == []
        assert wide.becomes_empty(TOO_WIDE) == []
        operate_players(wide)
    finally:
        use_theme(wide, "Light")


def operate_players(notebook: NotebookPage) -> None:
    """The scrubber of each block table goes to its end by keyboard, and to the middle by mouse."""
    at_end = re.compile(r"(?:step )?([\d.]+)(?: s)? of \1\b")  # several traces on one clock count seconds
    for player in notebook.page.locator(".labkit-blocks", has=notebook.page.locator(".labkit-slider")).all():
        slider, label = player.locator(".labkit-slider").first, player.locator(".labkit-label").first
        slider.press("End")
        expect(label).to_have_text(at_end)
        box = slider.bounding_box()
        assert box
        notebook.page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        expect(label).not_to_have_text(at_end)
        slider.press("Home")


@pytest.mark.timeout(600)
def test_the_gallery_works_in_notebook_7(browser: Browser, tmp_path: Path) -> None:
    folder, private = tmp_path / "notebooks", tmp_path / "private"
    folder.mkdir()
    private.mkdir()
    name = write_gallery(folder / "gallery.ipynb")
    with jupyterlab(folder, private, program="notebook") as address:
        page = browser.new_page(viewport={"width": 1250, "height": HEIGHT})
        notebook = NotebookPage(page, address, path="notebooks")
        notebook.open(name)
        notebook.run_all()
        keep_pictures(notebook, "gallery-notebook7")
        assert notebook.becomes_empty(BLANK) == []
        at = list(CELLS).index
        planner = notebook.cell(at("planner"))
        planner.get_by_label("GPU", exact=True).select_option("h200")
        expect(planner.locator("[role=status]")).to_contain_text("H200")
        expect(notebook.cell(at("monitor")).locator(".labkit-monitor-status")).to_contain_text("idle")
        operate_players(notebook)
        page.close()
