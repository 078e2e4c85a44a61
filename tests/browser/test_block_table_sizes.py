"""The block table of small and large pools, in wide and narrow windows, and how it keeps up with a running cell."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from lab import NotebookPage
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import expect

ENGINE = """
from time import sleep
from labkit.core import Engine
from labkit.memory import KVCacheManager
from labkit.observe import Trace
from labkit.scheduling import Request, SamplingParams, Scheduler, SchedulerConfig
from labkit.simulation import SimulatedExecutor
from labkit.widgets import BlockTable

def new_engine(num_blocks, num_requests, length):
    scheduler = Scheduler(SchedulerConfig(64, 65536, num_blocks * 16), KVCacheManager(num_blocks, 16))
    engine = Engine(scheduler, SimulatedExecutor(), Trace(num_blocks, 16))
    for i in range(num_requests):
        engine.add_request(Request(f"r{i}", [i] * length, SamplingParams(max_tokens=100, ignore_eos=True)))
    return engine

def steps(engine, pause=0.0):
    while engine.has_unfinished:
        yield engine.step()
        sleep(pause)
"""


def write(path: Path, *cells: str) -> str:
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(new_notebook(cells=[new_code_cell(cell) for cell in cells], metadata={"kernelspec": kernel}), path)
    return path.name


def test_the_table_fills_while_the_cell_runs(notebook: NotebookPage, lab_folder: Path) -> None:
    engine = ENGINE + "engine = new_engine(65536, 32, 30 * 16)\ntable = BlockTable.live(engine)\ntable"
    name = write(lab_folder / "paced.ipynb", engine, "for _ in table.watch(steps(engine, 0.03)): pass")
    notebook.open(name)
    notebook.page.evaluate(
        """() => { window.__seen = [];
            new MutationObserver(() => {
                const text = document.querySelector('.labkit-summary')?.textContent;
                if (text && text !== window.__seen.at(-1)) window.__seen.push(text);
            }).observe(document.body, { subtree: true, childList: true, characterData: true }); }"""
    )
    notebook.run_all()
    summary = notebook.page.locator(".labkit-summary")
    expect(summary).to_contain_text("0 of 65,536 blocks in use")
    seen = notebook.page.evaluate("() => window.__seen")
    running = [text for text in seen if "32 running" in text]
    assert len(running) > 10, "the picture did not move while the engine ran"
    assert len(set(running)) == len(running), "a running engine never goes back"


@pytest.mark.parametrize(("num_blocks", "num_requests"), [(8, 1), (512, 24), (65536, 60)])
def test_any_pool_fits_any_window_and_nothing_jumps(
    notebook: NotebookPage, lab_folder: Path, num_blocks: int, num_requests: int
) -> None:
    length = num_blocks * 16 // num_requests - 100 if num_blocks > 8 else 20
    run = f"engine = new_engine({num_blocks}, {num_requests}, {length})\nfor _ in steps(engine): pass\n"
    show = "BlockTable.from_trace(engine.trace)"
    notebook.open(write(lab_folder / f"pool{num_blocks}.ipynb", ENGINE + run + show))
    notebook.run_command("application:toggle-left-area")
    notebook.run_all()
    table = notebook.page.locator(".labkit-blocks")
    canvas, slider = table.locator("canvas.labkit-canvas"), table.get_by_role("slider", name="step")
    slider.press("ArrowRight")
    for width in (1280, 620, 1900):
        notebook.page.set_viewport_size({"width": width, "height": 900})
        frame, picture = notebook.steady_box(table), notebook.steady_box(canvas)
        assert picture["width"] <= frame["width"] and picture["height"] <= 400
        assert picture["width"] * picture["height"] >= num_blocks, "every block has a pixel"
        heights = set()
        for key in ("Home", "PageUp", "PageUp", "End"):
            slider.press(key)
            heights.add(notebook.steady_box(table)["height"])
        assert len(heights) == 1, f"{frame['width']} pixels wide, it changes its height while it plays: {heights}"
    colours = notebook.canvas_colours("canvas.labkit-canvas")
    held = {"Home": 0, "End": 0}
    for key in held:
        slider.press(key)
        colours = notebook.canvas_colours("canvas.labkit-canvas")
        held[key] = sum(count for colour, count in colours.items() if colour.endswith("ff"))
    assert held["Home"] > 0 and held["End"] == 0, "the first step holds blocks, the last has given all back"
