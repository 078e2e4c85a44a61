"""The block table widget in a real JupyterLab: its pixels, its keys, both themes, and the first lesson."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from lab import NotebookPage
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import Locator, expect

# Four steps of two requests in 8 blocks of 16 tokens, chosen so that every state of a block is seen.
TRACE = """
from labkit.observe import (
    BlocksAllocated, BlocksCached, BlocksFreed, BlocksShared, BlocksSwappedOut, StepRecord, Trace
)
trace = Trace(8, 16)
def step(tokens, before, after=()):
    n = len(trace)
    trace.record(StepRecord(n, n / 10, (n + 1) / 10, tuple(tokens), tuple(tokens.values()), (), len(tokens), 0,
                            len(before), (*before, *after)))
step({"a": 40}, [BlocksAllocated("a", 0, (0, 1, 2))], [BlocksCached((0, 1))])
step({"b": 4}, [BlocksShared("b", 0, (0,), 16), BlocksAllocated("b", 1, (3,))])
step({"b": 8}, [BlocksFreed("a", (0, 1, 2))])
step({}, [BlocksSwappedOut("b", (0, 3), (0, 1)), BlocksFreed("b", (0, 3))])
"""
PLAYER = TRACE + "from labkit.widgets import BlockTable\nBlockTable.from_trace(trace)"

LIVE = """
from labkit.core import Engine
from labkit.memory import KVCacheManager
from labkit.observe import Trace
from labkit.scheduling import Request, SamplingParams, Scheduler, SchedulerConfig
from labkit.simulation import SimulatedExecutor
from labkit.widgets import BlockTable

scheduler = Scheduler(SchedulerConfig(64, 512, 2048), KVCacheManager(4096, 16))
engine = Engine(scheduler, SimulatedExecutor(), Trace(4096, 16))
table = BlockTable.live(engine)
table
"""
# Far more steps than a browser can show; one request is left running.
RUN = """
engine.add_request(Request("long", [1, 2, 3], SamplingParams(max_tokens=2000, ignore_eos=True)))
for i in range(20):
    engine.add_request(Request(f"r{i}", [i] * 20, SamplingParams(max_tokens=300, ignore_eos=True)))
def steps():
    for _ in range(1990):
        yield engine.step()
for _ in table.watch(steps()):
    pass
print(repr(table))
"""

SIDE = 30  # pixels of a block when there is room: 32 from one to the next, 2 between them
BLOCK = SIDE * SIDE
EDGE = 2 * SIDE - 3  # the outline above a half-filled block: top, left and right of its upper half
A, B = "#0072b2ff", "#e69f00ff"


def write(path: Path, *cells: str) -> str:
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(new_notebook(cells=[new_code_cell(cell) for cell in cells], metadata={"kernelspec": kernel}), path)
    return path.name


def player(notebook: NotebookPage, lab_folder: Path) -> Locator:
    notebook.open(write(lab_folder / "player.ipynb", PLAYER))
    notebook.run_all()
    table = notebook.page.locator(".labkit-blocks")
    expect(table.locator(".labkit-label")).to_have_text("step 1 of 4 · 0.10 s")
    return table


def pixels(notebook: NotebookPage, at: int = 0) -> dict[str, int]:
    notebook.page.locator("canvas.labkit-canvas").nth(at).evaluate(f"canvas => canvas.dataset.at = {at}")
    return notebook.canvas_colours(f"canvas[data-at='{at}']")


def with_alpha(colours: dict[str, int], alpha: int) -> int:
    return sum(count for colour, count in colours.items() if colour.endswith(f"{alpha:02x}"))


def test_every_state_of_a_block_has_its_pixels(notebook: NotebookPage, lab_folder: Path) -> None:
    table = player(notebook, lab_folder)
    slider = table.get_by_role("slider", name="step")
    free, cached, reserved = 30, 90, 70  # alpha of the three kinds of pale

    colours = pixels(notebook)
    half = SIDE // 2
    assert colours[A] == 2 * BLOCK + half * SIDE + SIDE + 2 * (half - 1), "two full blocks, one half full and outlined"
    assert with_alpha(colours, reserved) == (half - 1) * (SIDE - 2)
    assert with_alpha(colours, free) == 5 * BLOCK
    assert with_alpha(colours, cached) == 0 and B not in colours

    slider.press("ArrowRight")
    expect(table.locator(".labkit-label")).to_have_text("step 2 of 4 · 0.20 s")
    colours = pixels(notebook)
    assert colours["#000000ff"] + colours["#ffffffff"] == (SIDE // 3) ** 2, "block 0 is marked as shared"
    quarter = round(SIDE / 4)
    assert colours[B] == quarter * SIDE + SIDE + 2 * (SIDE - quarter - 1)
    assert with_alpha(colours, free) == 4 * BLOCK

    slider.press("ArrowRight")
    colours = pixels(notebook)
    assert with_alpha(colours, cached) == BLOCK, "block 1 is known to the prefix cache only"
    assert with_alpha(colours, free) == 5 * BLOCK
    assert A not in colours and "#000000ff" not in colours
    assert colours[B] > BLOCK, "block 0 belongs to the other request now"
    expect(table.locator(".labkit-summary")).to_have_text(
        "2 of 8 blocks in use · 28 live tokens · fragmentation 12.5 % · 1 cached · 5 free · 1 running, 0 waiting"
    )

    slider.press("ArrowRight")
    colours = pixels(notebook)
    assert colours[B] == 2 * BLOCK // 3, "two blocks on their way to host memory are striped"
    expect(table.locator(".labkit-summary")).to_contain_text("0 of 8 blocks in use · 0 live tokens")
    expect(table.locator(".labkit-summary")).to_contain_text("1 cached · 2 in flight · 5 free")


def test_the_player_obeys_the_keyboard_and_outlives_its_kernel(notebook: NotebookPage, lab_folder: Path) -> None:
    table = player(notebook, lab_folder)
    label, play = table.locator(".labkit-label"), table.get_by_role("button", name=re.compile("^play|pause$"))
    notebook.shutdown_kernel()
    table.get_by_role("button", name="step forward").press("Enter")
    expect(label).to_have_text(re.compile("step 2 of 4"))
    table.get_by_role("button", name="step back").press("Enter")
    expect(label).to_have_text(re.compile("step 1 of 4"))
    play.press("Space")
    expect(label).to_have_text(re.compile("step 4 of 4"), timeout=10_000)
    expect(play).to_have_attribute("aria-label", "play")
    table.get_by_role("slider", name="step").press("Home")
    expect(label).to_have_text(re.compile("step 1 of 4"))
    assert pixels(notebook)[A] > 2 * BLOCK


def test_a_block_tells_what_it_holds(notebook: NotebookPage, lab_folder: Path) -> None:
    table = player(notebook, lab_folder)
    table.get_by_role("slider", name="step").press("ArrowRight")
    canvas, tip = table.get_by_role("img"), table.locator(".labkit-tip")
    canvas.hover(position={"x": 3 * 32 + 10, "y": 10})
    expect(tip).to_have_text("block 3 · request b · logical block 1 · 4 of 16 tokens · ref_cnt 1")
    notebook.page.mouse.move(0, 0)
    expect(tip).to_be_hidden()
    canvas.press("ArrowRight")
    expect(tip).to_have_text(
        "block 0 · request a · logical block 0 · 16 of 16 tokens · ref_cnt 2 · shared with b · in the prefix cache"
    )
    for _ in range(4):
        canvas.press("ArrowRight")
    expect(tip).to_have_text("block 4 · free")
    canvas.press("Escape")
    expect(tip).to_be_hidden()
    expect(canvas).to_have_attribute("aria-label", re.compile(r"Block table at step 2: 4 of 8 blocks in use"))
    expect(table.locator("[aria-live=polite]")).to_have_text(re.compile("at step 2"), timeout=3000)


def test_a_live_table_shows_the_last_of_many_steps(notebook: NotebookPage, lab_folder: Path) -> None:
    notebook.open(write(lab_folder / "live.ipynb", LIVE, RUN))
    notebook.run_all()
    printed = notebook.outputs()[1][0]["text"]
    in_use, free = re.findall(r"step 1990: (\d+) of 4096 blocks in use.* (\d+) free", printed)[0]
    summary = notebook.page.locator(".labkit-summary")
    expect(summary).to_have_text(
        re.compile(f"^{in_use} of 4,096 blocks in use.* {int(free):,} free · 1 running, 0 waiting")
    )
    colours = pixels(notebook)
    side = round((with_alpha(colours, 30) / int(free)) ** 0.5)
    assert with_alpha(colours, 30) == int(free) * side**2
    assert abs(colours[A] - int(in_use) * side**2) < side**2, "one request is left; its last block is not full"


def test_a_change_of_theme_is_followed(notebook: NotebookPage, lab_folder: Path) -> None:
    def free_is_light() -> bool:
        free = max((c for c in pixels(notebook) if c.endswith("1e")), key=lambda c: pixels(notebook)[c])
        return int(free[1:3], 16) > 128

    player(notebook, lab_folder)
    assert not free_is_light()
    change = "theme => window.jupyterapp.commands.execute('apputils:change-theme', { theme })"
    notebook.page.evaluate(change, "JupyterLab Dark")
    notebook.page.wait_for_selector("body[data-jp-theme-light=false]", state="attached")
    try:
        assert free_is_light()
    finally:
        notebook.page.evaluate(change, "JupyterLab Light")
        notebook.page.wait_for_selector("body[data-jp-theme-light=true]", state="attached")


@pytest.mark.slow
def test_the_first_lesson_runs_and_its_tables_show_the_run(notebook: NotebookPage) -> None:
    notebook.open("00_start_here.ipynb")
    notebook.run_all()
    live, replay = notebook.page.locator(".labkit-blocks").nth(0), notebook.page.locator(".labkit-blocks").nth(1)
    emptied = re.compile(r"^0 of 64 blocks in use · 0 live tokens · .* [1-9]\d* cached")
    expect(live.locator(".labkit-summary")).to_have_text(emptied)
    colours = pixels(notebook, 0)
    cached, free = re.findall(r"(\d+) cached · (\d+) free", live.locator(".labkit-summary").text_content() or "")[0]
    assert with_alpha(colours, 30) == int(free) * BLOCK
    assert with_alpha(colours, 90) == int(cached) * BLOCK

    slider = replay.get_by_role("slider", name="step")
    slider.press("PageUp")  # a tenth of the run
    colours = pixels(notebook, 1)  # waits until picture and summary, which change in one frame, are drawn
    in_use = int((replay.locator(".labkit-summary").text_content() or "").split()[0])
    assert in_use > 0
    assert with_alpha(colours, 30) + with_alpha(colours, 90) == (64 - in_use) * BLOCK
    chips = replay.locator(".labkit-chip:not(.labkit-state)")
    assert chips.count() == 7, "six prompts, one of them with two continuations"
    fills = {colour for colour, count in pixels(notebook, 1).items() if colour.endswith("ff") and count > SIDE}
    assert len(fills) >= chips.count()
