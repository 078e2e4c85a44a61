"""The fault lab: eight bugs in the real classes, one at a time, to be found from what a run shows.

    from labkit.exercises import faults

    seen = faults.run(3)                    # a small scenario, with bug number 3 in the classes that serve it
    seen                                    # outputs against expected ones, what check() says, the block table
    faults.guess(3, "lost reference")       # says why not, or shows the line

The bug is there while :func:`run` runs, and nowhere else. :data:`NAMES` lists the eight, in another order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from html import escape
from typing import Any

from labkit.figures import show
from labkit.observe import BlocksShared, Trace
from labkit.widgets import BlockTable

from .exercise import Exercise, Report
from .faults_list import FAULTS, Fault, switched_on
from .faults_scenario import Outcome, play

NAMES = tuple(fault.name for fault in FAULTS)
"""What a bug can be."""

_BY_NUMBER = (6, 0, 7, 4, 3, 1, 2, 5)  # which of FAULTS is number 1, 2, ...


@dataclass(frozen=True, slots=True)
class FaultRun:
    """What a run of the scenario with a bug shows.

    Attributes:
        trace: of the run.
        requests: prompt token ids, and n and salt where they are given, by request.
        outputs: tokens that each sequence got; ``expected``: what it gets without the bug.
        check: first complaint of ``KVCacheManager.check()``; empty if it had none.
        error: what ended the run too early; empty if nothing did.
    """

    number: int
    kind: str
    trace: Trace
    requests: dict[str, str]
    outputs: dict[str, list[int]]
    expected: dict[str, list[int]]
    check: str
    error: str

    @property
    def table(self) -> BlockTable:
        """A player for the trace."""
        return BlockTable.from_trace(self.trace)

    def __str__(self) -> str:
        lines = [f"Fault {self.number} on: {self.kind}"]
        for name, prompt, taken, got, expected in self._rows():
            lines.append(f"{name:4} prompt {prompt}" + (f"   takes over blocks {taken}" if taken else ""))
            lines.append(f"     output {got}" + ("" if got == expected else f"\n   expected {expected}"))
        return "\n".join((*lines, *(f"{what}: {said}" for what, said in self._verdicts())))

    def _repr_html_(self) -> str:
        rows = []
        for name, prompt, taken, got, expected in self._rows():
            wrong = "" if got == expected else f"<br><span style='opacity:0.75'>expected {expected}</span>"
            is_cut = got == "none" or f"{expected} ".startswith(f"{got} ")
            mark = "✓" if got == expected else "…" if is_cut else "<b style='color:#d55e00'>✗</b>"
            cells = (escape(name), escape(prompt), taken, mark, f"{got}{wrong}")
            rows.append("".join(f"<td style='text-align:left;vertical-align:top'>{cell}</td>" for cell in cells))
        names = ("sequence", "prompt", "blocks taken over", "", "output")
        head = "".join(f"<th style='text-align:left'>{name}</th>" for name in names)
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        said = "".join(f"<div><b>{escape(what)}:</b> {escape(words)}</div>" for what, words in self._verdicts())
        return (
            f"<div><b>Fault {self.number}</b> · runs on: {escape(self.kind)}</div>"
            f"<div style='overflow-x:auto'><table><tr>{head}</tr>{body}</table></div>{said}"
        )

    def _ipython_display_(self) -> None:
        from IPython.display import HTML, display

        display(HTML(self._repr_html_()))
        display(self.table)

    def _rows(self) -> list[tuple[str, str, str, str, str]]:
        """Sequence, prompt, blocks that it took over, tokens that it got, and those that it should have got."""
        taken: dict[str, list[int]] = {}
        for record in self.trace:
            for event in record.events:
                if isinstance(event, BlocksShared):
                    taken.setdefault(event.request_id, []).extend(event.block_ids)
        return [
            (
                name,
                self.requests.get(name, f"forked from {name.partition('#')[0]}"),
                " ".join(map(str, taken.get(name, ()))),
                " ".join(map(str, self.outputs.get(name, ()))) or "none",
                " ".join(map(str, expected)),
            )
            for name, expected in self.expected.items()
        ]

    def _verdicts(self) -> list[tuple[str, str]]:
        ended = self.error or "all requests ended"
        return [("check()", self.check or "no complaint after any step"), ("the run", ended)]


def run(number: int) -> FaultRun:
    """Run the scenario with bug ``number``, 1 to 8, in the real classes. Raises ValueError for another number."""
    fault = _fault(number)
    expected = _expected(fault.kind)
    with switched_on(fault):
        seen = play(fault.kind)
    return FaultRun(
        number, fault.kind, seen.trace, seen.requests, seen.outputs, expected.outputs, seen.check, seen.error
    )


def guess(number: int, name: Any) -> Report:
    """Whether bug ``number`` is the one called ``name``, one of :data:`NAMES`.

    Right: the line, and how it leads to what was seen. Wrong: what speaks against it. ``...`` gets the task. Raises
    ValueError for another number or name.
    """
    fault = _fault(number)
    task = f"Which bug is number {number}? Run faults.run({number}), then guess one of: {', '.join(NAMES)}."
    exercise = Exercise(f"fault-{number}", f"Fault {number}", task, ("", "", ""), lambda _: None, show)
    if name is ...:
        return Report(exercise, "open", task)
    if name not in NAMES:
        raise ValueError(f"name must be one of {', '.join(NAMES)}, got {name!r}")
    if name != fault.name:
        other = FAULTS[NAMES.index(name)]
        words = f"It is not: {name}.\n\nThat would show: {other.sign}.\n\nLook again: {fault.evidence}."
        return Report(exercise, "not yet", words)
    edits = "\n\n".join(str(edit) for edit in fault.edits)
    return Report(exercise, "passed", f"{fault.name}.\n\n{edits}\n\n{fault.why}", show(fault.edits[0].function))


def _fault(number: int) -> Fault:
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= len(FAULTS):
        raise ValueError(f"number must be within 1 to {len(FAULTS)}, got {number!r}")
    return FAULTS[_BY_NUMBER[number - 1]]


@cache
def _expected(kind: str) -> Outcome:
    """The scenario without a bug."""
    return play(kind)


__all__ = ["NAMES", "FaultRun", "guess", "run", "switched_on"]
