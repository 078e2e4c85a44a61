"""Block tables side by side on one clock, jumps from event to event, the outlines of sharers, and arena maps."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from lab import NotebookPage
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import Locator, expect

RUNS = """
from labkit.core import Engine
from labkit.memory import ContiguousKVManager, KVCacheManager, reserve_power_of_two
from labkit.observe import Trace
from labkit.scheduling import Request, SamplingParams, Scheduler, SchedulerConfig, StaticScheduler
from labkit.simulation import SimulatedExecutor, simulate
from labkit.widgets import BlockTable

def run(scheduler_class, kv, tokens=40):
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=128, watermark=0)
    requests = [
        Request(f"r{i}", [*range(16), *[i] * 8], SamplingParams(max_tokens=8 + tokens * (i % 2), ignore_eos=True))
        for i in range(8)
    ]
    executor = SimulatedExecutor(lambda plan: 0.05)
    return simulate(requests, scheduler_class(config, kv), executor, trace=Trace(kv.num_blocks, kv.block_size)).trace
"""
COMPARED = (
    RUNS
    + """
BlockTable.compare({
    "static": run(StaticScheduler, ContiguousKVManager(64, 8, reserve_power_of_two)),
    "continuous": run(Scheduler, KVCacheManager(64, 8)),
})
"""
)
SHARED = RUNS + "BlockTable.from_trace(run(Scheduler, KVCacheManager(20, 8)))"


def show(notebook: NotebookPage, lab_folder: Path, name: str, code: str) -> Locator:
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    cells = new_notebook(cells=[new_code_cell(code)], metadata={"kernelspec": kernel})
    nbformat.write(cells, lab_folder / f"{name}.ipynb")
    notebook.open(f"{name}.ipynb")
    notebook.run_all()
    return notebook.page.locator(".labkit-blocks")


def number(text: str | None, pattern: str) -> float:
    found = re.search(pattern, text or "")
    assert found, text
    return float(found[1])


def test_two_traces_run_on_one_clock(notebook: NotebookPage, lab_folder: Path) -> None:
    table = show(notebook, lab_folder, "compared", COMPARED)
    titles, label = table.locator(".labkit-title"), table.locator(".labkit-label")
    slider = table.get_by_role("slider", name="time")
    boxes = [pool.bounding_box() for pool in table.locator(".labkit-pool").all()]
    assert boxes[0] and boxes[1] and boxes[0]["y"] == boxes[1]["y"], "side by side where there is room"

    expect(label).to_have_text(re.compile(r"^0\.05 s of "))
    slider.press("PageUp")
    notebook.wait_drawn()
    seconds = number(label.text_content(), r"^([\d.]+) s")
    for title in titles.all():
        assert abs(number(title.text_content(), r"step (\d+)") - seconds / 0.05) <= 1
    table.get_by_role("button", name="step forward").press("Enter")
    assert 0 < number(label.text_content(), r"^([\d.]+) s") - seconds <= 0.0501

    slider.press("End")
    expect(table.locator(".labkit-summary").nth(0)).to_contain_text("0 of 64 blocks in use")
    steps = [number(title.text_content(), r"step (\d+)") for title in titles.all()]
    assert steps[0] > steps[1], "the static batches take longer"
    table.get_by_role("button", name=re.compile("^play$")).press("Space")
    expect(table.get_by_role("button", name="pause")).to_be_visible()
    table.get_by_role("button", name="pause").press("Space")
    slider.press("Home")
    for _ in range(2):
        slider.press("PageUp")
    notebook.page.set_viewport_size({"width": 620, "height": 1000})
    boxes = [pool.bounding_box() for pool in table.locator(".labkit-pool").all()]
    assert boxes[0] and boxes[1] and boxes[0]["y"] < boxes[1]["y"], "one below the other where there is none"
    notebook.page.set_viewport_size({"width": 1280, "height": 1000})


def test_an_arena_shows_runs_and_what_is_reserved(notebook: NotebookPage, lab_folder: Path) -> None:
    table = show(notebook, lab_folder, "arena", COMPARED)
    legends = table.locator(".labkit-legend")
    expect(legends.nth(0)).to_contain_text("reserved, not written")
    expect(legends.nth(1)).to_contain_text("held, not written")
    first_gap = "canvas => canvas.getContext('2d').getImageData(30, 25, 2, 1).data.join()"
    arena, paged = table.locator("canvas.labkit-canvas").all()
    assert arena.evaluate(first_gap) == "0,114,178,255,0,114,178,255", "blocks 0 and 1 are of one run"
    assert paged.evaluate(first_gap) == "0,0,0,0,0,0,0,0", "pages stay apart"


def test_jumping_from_event_to_event(notebook: NotebookPage, lab_folder: Path) -> None:
    table = show(notebook, lab_folder, "jumps", SHARED)
    label, kind = table.locator(".labkit-label"), table.get_by_role("combobox", name="event")
    kinds = kind.evaluate("menu => [...menu.options].map(option => option.text)")
    assert [text.split()[0] for text in kinds] == ["preemption", "eviction", "sharing", "finish"]
    kind.select_option(label=kinds[-1])
    steps = []
    for _ in range(int(number(kinds[-1], r"\((\d+)\)"))):
        table.get_by_role("button", name="next event").press("Enter")
        steps.append(number(label.text_content(), r"step (\d+)"))
    assert steps == sorted(set(steps))
    table.get_by_role("button", name="next event").press("Enter")
    assert number(label.text_content(), r"step (\d+)") == steps[-1], "after the last there is no next"
    table.get_by_role("button", name="previous event").press("Enter")
    assert number(label.text_content(), r"step (\d+)") == steps[-2]


@pytest.mark.parametrize("by", ["pointer", "keyboard"])
def test_all_who_share_a_block_are_outlined(notebook: NotebookPage, lab_folder: Path, by: str) -> None:
    table = show(notebook, lab_folder, "shared", SHARED)
    kind = table.get_by_role("combobox", name="event")
    kind.select_option(index=kind.evaluate("menu => [...menu.options].findIndex(o => o.text.startsWith('sharing'))"))
    table.get_by_role("button", name="next event").press("Enter")
    canvas, tip, chips = table.get_by_role("img"), table.locator(".labkit-tip"), table.locator(".labkit-chosen")
    if by == "keyboard":
        canvas.press("ArrowRight")
    else:
        canvas.click(position={"x": 10, "y": 20})
        notebook.page.mouse.move(0, 0)
    expect(tip).to_contain_text(re.compile(r"block 0 · request r0 · .* ref_cnt [23] · shared with r\d"))
    sharers = 1 + len((tip.text_content() or "").partition("shared with ")[2].partition(" · ")[0].split(","))
    expect(chips).to_have_count(sharers)
    outlined = notebook.canvas_colours("canvas.labkit-canvas")
    canvas.press("Escape")
    expect(tip).to_be_hidden()
    expect(chips).to_have_count(0)
    assert notebook.canvas_colours("canvas.labkit-canvas") != outlined
