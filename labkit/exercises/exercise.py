"""A task, how it is checked, and what `check` has to say."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from dis import get_instructions
from html import escape
from inspect import isfunction
from io import StringIO
from typing import Any

from labkit.figures import show

from .attempt import TookTooLong, in_words, on_copies, shown, time_limit

TIME_LIMIT = 15.0
"""Seconds after which an attempt is stopped; a solution takes one or two."""

TOO_LONG = f"stopped after {TIME_LIMIT:g} s, when it was still running: does a loop never end?"


class Failed(Exception):
    """An attempt gives a wrong answer: in words, with the smallest case that shows it.

    ``picture`` is shown below the words: a widget that stands at the first step that differs, or a figure. ``printed``
    is what the attempt printed in that case.
    """

    def __init__(self, words: str, *, case: object = None, picture: object = None, printed: str = "") -> None:
        super().__init__(words)
        self.words, self.case, self.picture, self.printed = words, case, picture, printed


@dataclass(frozen=True, slots=True)
class Exercise:
    """One task of a lesson.

    Attributes:
        id: number of the lesson and a name: "02-first-fit".
        title: a line.
        task: what to write, in Markdown: signature, meaning, target.
        hints: three, each saying more than the one before.
        judge: runs an attempt in the lab's own tests or engine; raises :class:`Failed`.
        solution: what the lab itself does, or would; passes the judge.
    """

    id: str
    title: str
    task: str
    hints: tuple[str, str, str]
    judge: Callable[[Any], None]
    solution: Callable[..., Any]

    def check(self, attempt: Any) -> Report:
        """Judge an attempt. Whatever it raises is reported, never passed on: the rest of a notebook runs.

        It gets :data:`TIME_LIMIT` seconds. What it prints is reported for the case that fails.
        """
        if is_unfilled(attempt):
            return Report(self, "open", self.task + _still_empty(attempt))
        if not callable(attempt):
            return Report(self, "not yet", f"pass the function or class itself, not {shown(attempt)}")
        printed = StringIO()
        try:
            with redirect_stdout(printed), time_limit(TIME_LIMIT):
                self.judge(on_copies(attempt) if isfunction(attempt) else attempt)
        except Failed as failure:
            words = failure.words if failure.case is None else f"{failure.words}\n\nSmallest case: {failure.case}"
            return Report(self, "not yet", words + _quoted(failure.printed or printed.getvalue()), failure.picture)
        except NotImplementedError as error:
            return Report(self, "open", f"{self.task}\n\n{error}")
        except TookTooLong:
            return Report(self, "not yet", TOO_LONG + _quoted(printed.getvalue()))
        except (Exception, SystemExit) as error:
            return Report(self, "not yet", in_words(error) + _quoted(printed.getvalue()))
        return Report(self, "passed", "All cases pass.")


@dataclass(frozen=True, slots=True)
class Report:
    """What `check` returns: ``state`` is "open" (nothing written yet), "not yet" or "passed"."""

    exercise: Exercise
    state: str
    words: str
    picture: object = field(default=None, repr=False)

    @property
    def passed(self) -> bool:
        """Whether the attempt passed."""
        return self.state == "passed"

    def __str__(self) -> str:
        return f"[{self.state}] {self.exercise.id}: {self.exercise.title}\n{self.words}"

    def _repr_html_(self) -> str:
        mark, colour = {"open": ("○", "#808080"), "not yet": ("✗", "#d55e00"), "passed": ("✓", "#009e73")}[self.state]
        words = "".join(
            f"<p style='margin:4px 0;white-space:pre-wrap'>{escape(p)}</p>" for p in self.words.split("\n\n")
        )
        head = f"<b>{mark} {escape(self.exercise.title)}</b> <span>({self.state})</span>"
        return f"<div style='border-left:4px solid {colour};padding-left:10px'>{head}{words}</div>"

    def _ipython_display_(self) -> None:
        from IPython.display import HTML, display

        display(HTML(self._repr_html_()), metadata={})
        if self.picture is not None:
            display(self.picture)


def is_unfilled(attempt: Any) -> bool:
    """Whether a stub was left as it was: a function, or a method of a class, whose body is ``...``."""
    if isinstance(attempt, type):
        return any(is_unfilled(member) for member in vars(attempt).values() if isfunction(member))
    if not isfunction(attempt):
        return False
    steps = [step for step in get_instructions(attempt) if step.opname not in ("RESUME", "NOP")]
    return all(step.opname in ("LOAD_CONST", "RETURN_VALUE", "RETURN_CONST") and step.argval is None for step in steps)


def _still_empty(attempt: Any) -> str:
    """The methods of a class that have no body yet, if others have one."""
    methods = [member for member in vars(attempt).values() if isfunction(member)] if isinstance(attempt, type) else []
    empty = [method.__name__ for method in methods if is_unfilled(method)]
    return f"\n\nStill empty: {', '.join(empty)}." if len(empty) < len(methods) else ""


def _quoted(printed: str) -> str:
    """The beginning of what was printed, as a paragraph."""
    text = printed.strip()
    return f"\n\nIt printed: {text[:500]}{' ...' if len(text) > 500 else ''}" if text else ""


def solution_source(exercise: Exercise) -> Any:
    """The highlighted source of the solution."""
    return show(exercise.solution)
