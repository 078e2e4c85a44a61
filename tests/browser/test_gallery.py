"""Every widget in one page, operated as a reader would: by keys and mouse, in wide and narrow windows, in both themes.

The page is opened once; each test puts back what it changed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from gallery import CELLS, write_gallery
from lab import NotebookPage
from playwright.sync_api import Browser, expect

REPOSITORY = Path(__file__).parents[2]
AT = {name: index for index, name in enumerate(CELLS)}
GREEN, BLUE, ORANGE, RED = "#009e73", "#0072b2", "#e69f00", "#d55e00"

WRONG = """
def bytes_per_token(num_layers, num_kv_heads, head_dim, bytes_per_value):
return num_layers * num_kv_heads * head_dim * bytes_per_value

exercises.check("01-bytes-per-token", bytes_per_token)"""


@pytest.fixture(scope="module")
def gallery(browser: Browser, lab_address: str, lab_folder: Path) -> Iterator[NotebookPage]:
    page = browser.new_page(viewport={"width": 1250, "height": 1400})
    notebook = NotebookPage(page, lab_address)
    notebook.open(write_gallery(lab_folder / "gallery.ipynb"))
    notebook.run_command("application:toggle-left-area")
    notebook.run_all()
    yield notebook
    page.close()


@pytest.fixture(autouse=True)
def picture(gallery: NotebookPage, request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    gallery.screenshot(REPOSITORY / "test-results" / f"{request.node.name}.png")


def test_each_widget_is_drawn(gallery: NotebookPage) -> None:
    planner = gallery.shown_colours(gallery.cell(AT["planner"]).locator(".jp-OutputArea-output").first)
    assert planner[GREEN] > 2000 and planner[RED] > 2000, "weights, and a batch that does not fit"
    canvases = gallery.cell(AT["microscope"]).locator("canvas")
    assert canvases.count() == 3
    for at in range(3):
        assert len(gallery.shown_colours(canvases.nth(at))) > 10
    monitor = gallery.shown_colours(gallery.cell(AT["monitor"]).locator(".labkit-monitor"))
    assert monitor[GREEN] > 50 and monitor[BLUE] > 200, "weights, and the history of live tokens"
    blocks = gallery.shown_colours(gallery.cell(AT["player"]).locator("canvas.labkit-canvas"))
    assert blocks[BLUE] > 100 and blocks[ORANGE] > 100, "the first two requests"


def test_the_planner_by_keyboard_and_mouse(gallery: NotebookPage) -> None:
    planner = gallery.cell(AT["planner"])
    result = planner.locator("[role=status]")
    expect(result).to_contain_text("does not fit: 3 is the most")
    planner.get_by_label("GPU", exact=True).select_option("h200")
    expect(result).to_contain_text("H200")
    expect(result).to_contain_text(": fits, ")
    context = planner.get_by_role("slider").first
    context.focus()
    context.press("ArrowRight")
    expect(result).to_contain_text("4 x 8,192 tokens")
    context.press("ArrowLeft")
    batch = planner.get_by_label("batch")
    batch.fill("100000")
    batch.press("Enter")
    expect(result).to_contain_text("does not fit")
    planner.get_by_label("model", exact=True).select_option("llama-2-70b")
    planner.get_by_label("GPU", exact=True).select_option("l4")
    expect(result).to_contain_text("Does not fit.")
    for label, value in (("GPU", "a100-40gb"), ("model", "llama-2-13b")):
        planner.get_by_label(label, exact=True).select_option(value)
    batch.fill("4")
    batch.press("Enter")
    expect(result).to_contain_text("does not fit: 3 is the most")


def test_the_microscope_by_keyboard_and_mouse(gallery: NotebookPage) -> None:
    microscope = gallery.cell(AT["microscope"])
    status, canvas = microscope.locator(".labkit-microscope-status"), microscope.locator("canvas").first
    expect(status).to_contain_text("relative error")
    before = status.text_content()
    canvas.press("ArrowDown")
    expect(status).to_contain_text("token 1, channel 0: value ")
    canvas.press("ArrowRight")
    expect(status).to_contain_text("token 1, channel 1: value ")
    box = canvas.bounding_box()
    assert box
    canvas.hover(position={"x": 7.5 / 64 * box["width"], "y": 3.5 / 32 * box["height"]})
    expect(status).to_contain_text("token 3, channel 7: value ")
    microscope.get_by_label("format").select_option("int4 with offset, a scale a channel")
    expect(status).not_to_contain_text("channel 7")
    assert status.text_content() != before
    microscope.get_by_label("tile").select_option("small")
    expect(status).to_contain_text("8 tokens down, 32 channels across")
    microscope.get_by_label("tile").select_option("with an outlier")
    microscope.get_by_label("format").select_option("int4 symmetric, a scale a token")


def test_the_monitor_follows_a_run_and_stops_it(gallery: NotebookPage) -> None:
    status = gallery.cell(AT["monitor"]).locator(".labkit-monitor-status")
    expect(status).to_contain_text(re.compile(r"^idle · \d+ tokens generated, [\d.]+ tokens/s on average"))
    stop = gallery.cell(AT["monitor"]).get_by_role("button", name="stop the run")
    expect(stop).to_be_hidden()
    gallery.rewrite_and_run(AT["run"], "monitor.run(llm.stream(prompts * 2, params))")
    expect(status).to_contain_text(
        re.compile(r"^running · [1-9]\d* running, \d+ waiting · [\d.]+ tokens/s"), timeout=20_000
    )
    stop.press("Enter")
    expect(status).to_contain_text(re.compile("^idle"), timeout=20_000)
    gallery.rewrite_and_run(AT["wait"], "print(sum(len(o.outputs[0].token_ids) for o in monitor.wait()) < 6 * 40)")
    expect(gallery.cell(AT["wait"]).locator(".jp-OutputArea-output")).to_have_text("True\n")


def test_the_scrubber(gallery: NotebookPage) -> None:
    player = gallery.cell(AT["player"])
    label, slider = player.locator(".labkit-label"), player.get_by_role("slider", name="step")
    slider.press("End")
    last = re.findall(r"step (\d+) of (\d+)", label.text_content() or "")[0]
    assert last[0] == last[1]
    box = slider.bounding_box()
    assert box
    gallery.page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    middle = int(re.findall(r"step (\d+) of", label.text_content() or "")[0])
    assert 0.3 * int(last[1]) < middle < 0.7 * int(last[1])
    slider.press("Home")


def test_an_exercise_first_wrong_then_right(gallery: NotebookPage) -> None:
    report = gallery.cell(AT["exercise"]).locator(".jp-OutputArea")
    expect(report).to_contain_text("(open)")
    gallery.rewrite_and_run(AT["exercise"], WRONG.replace("\nreturn", "\n    return"))
    expect(report).to_contain_text("(not yet)", timeout=20_000)
    expect(report).to_contain_text("Smallest case")
    gallery.rewrite_and_run(AT["exercise"], WRONG.replace("\nreturn", "\n    return 2 *"))
    expect(report).to_contain_text("(passed)", timeout=20_000)


@pytest.mark.parametrize("theme", ["JupyterLab Light", "JupyterLab Dark"])
def test_nothing_overflows_and_text_is_readable(gallery: NotebookPage, theme: str) -> None:
    change = "theme => window.jupyterapp.commands.execute('apputils:change-theme', { theme })"
    light = str(theme.endswith("Light")).lower()
    try:
        gallery.page.evaluate(change, theme)
        gallery.page.wait_for_selector(f"body[data-jp-theme-light={light}]", state="attached")
        for width in (1250, 700):
            gallery.page.set_viewport_size({"width": width, "height": 1400})
            for name in ("planner", "microscope", "monitor", "player"):
                cell = gallery.cell(AT[name])
                cell.scroll_into_view_if_needed()
                assert gallery.becomes_empty(TOO_WIDE, cell) == [], f"{name} at {width} pixels"
                assert gallery.becomes_empty(PALE_TEXTS, cell) == [], f"{name} in {theme}"
                gallery.screenshot(REPOSITORY / "test-results" / f"gallery-{name}-{width}-{theme.split()[1]}.png")
    finally:
        gallery.page.set_viewport_size({"width": 1250, "height": 1400})
        gallery.page.evaluate(change, "JupyterLab Light")
        gallery.page.wait_for_selector("body[data-jp-theme-light=true]", state="attached")


# What sticks out of the output area to the right.
TOO_WIDE = """cell => {
    const area = cell.querySelector('.jp-OutputArea').getBoundingClientRect();
    return [...cell.querySelectorAll('.jp-OutputArea-output *')]
        .filter(e => e.getClientRects().length && e.getBoundingClientRect().right > area.right + 1)
        .map(e => `${e.tagName}.${e.className} ${Math.round(e.getBoundingClientRect().right - area.right)} px`);
}"""

# Texts whose contrast to the page is below 4.5 to 1 (WCAG AA).
PALE_TEXTS = """cell => {
    const channels = text => text.match(/[\\d.]+/g).map(Number);
    const light = ([r, g, b]) => {
        const [x, y, z] = [r, g, b].map(c => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
        return 0.2126 * x + 0.7152 * y + 0.0722 * z;
    };
    const behind = element => {
        for (let e = element; e; e = e.parentElement) {
            const found = channels(getComputedStyle(e).backgroundColor);
            if (found[3] !== 0) return found;
        }
        return [255, 255, 255];
    };
    return [...cell.querySelectorAll('.jp-OutputArea-output *')]
        .filter(e => e.getClientRects().length && [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()))
        .filter(e => e.tagName !== 'OPTION')
        .map(e => [e, light(channels(getComputedStyle(e).color)), light(behind(e))])
        .filter(([, a, b]) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05) < 4.5)
        .map(([e, a, b]) => `${e.textContent.trim().slice(0, 40)} ${a.toFixed(2)} on ${b.toFixed(2)}`);
}"""
