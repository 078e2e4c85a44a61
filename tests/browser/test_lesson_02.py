"""Lesson 02 as a reader works through it: it runs, its tables are drawn, and an exercise is done in two attempts."""

from __future__ import annotations

import pytest
from lab import NotebookPage
from playwright.sync_api import expect

ATTEMPT = """class FreeList:
    def __init__(self, num_blocks):
        self.ids = list(range(num_blocks))

    def allocate(self, count):
        return [self.ids.pop() for _ in range(count)]

    def free(self, block_ids):
        self.ids.extend({given_back})


exercises.check("02-free-list", FreeList)"""


@pytest.mark.slow
def test_it_runs_and_an_exercise_opens_the_block_table_where_it_went_wrong(notebook: NotebookPage) -> None:
    notebook.open("02_fragmentation.ipynb")
    notebook.run_all()
    tables = notebook.page.locator(".labkit-blocks canvas.labkit-canvas")
    assert tables.count() >= 2
    for at in range(2):
        assert len(notebook.shown_colours(tables.nth(at))) > 5, "several requests hold blocks"

    index = next(i for i, cell in enumerate(sources(notebook)) if "class FreeList" in cell)
    output = notebook.cell(index).locator(".jp-OutputArea")
    expect(output).to_contain_text("(open)")
    notebook.rewrite_and_run(index, ATTEMPT.format(given_back="block_ids * 2"))
    expect(output).to_contain_text("(not yet)", timeout=30_000)
    picture = output.locator("canvas.labkit-canvas")
    assert len(notebook.shown_colours(picture.first)) > 2
    notebook.rewrite_and_run(index, ATTEMPT.format(given_back="block_ids"))
    expect(output).to_contain_text("(passed)", timeout=30_000)


def sources(notebook: NotebookPage) -> list[str]:
    return notebook.page.evaluate(
        "() => window.jupyterapp.shell.currentWidget.content.widgets.map(cell => cell.model.sharedModel.getSource())"
    )
