"""Can I do it?

The graded tasks of the lessons. A reader writes a function or class with the package's interface and passes it to
:func:`check`, which runs it where the lab would run its own and says in words what is missing. :func:`hint` says more
each time; :func:`solution` shows what passes.

    from labkit import exercises
    exercises.check("01-bytes-per-token", my_function)
"""

from __future__ import annotations

from typing import Any

from . import (
    lesson_01,
    lesson_02,
    lesson_03,
    lesson_04,
    lesson_05,
    lesson_06,
    lesson_07,
    lesson_08,
    lesson_09,
    lesson_10,
)
from .exercise import Exercise, Failed, Report, solution_source

_LESSONS = (
    lesson_01,
    lesson_02,
    lesson_03,
    lesson_04,
    lesson_05,
    lesson_06,
    lesson_07,
    lesson_08,
    lesson_09,
    lesson_10,
)
EXERCISES: dict[str, Exercise] = {exercise.id: exercise for lesson in _LESSONS for exercise in lesson.EXERCISES}
_hints_given: dict[str, int] = {}


def get(exercise_id: str) -> Exercise:
    """The exercise of that id. Raises ValueError, naming those of the same lesson, if there is none."""
    if exercise_id not in EXERCISES:
        near = [known for known in EXERCISES if known[:2] == str(exercise_id)[:2]] or list(EXERCISES)
        raise ValueError(f"exercise_id must be one of {', '.join(near)}, got {exercise_id!r}")
    return EXERCISES[exercise_id]


def check(exercise_id: str, attempt: Any) -> Report:
    """Judge an attempt; a stub that is still empty gets the task. Never raises what the attempt raises."""
    return get(exercise_id).check(attempt)


def hint(exercise_id: str, level: int | None = None) -> str:
    """The next hint, or that of ``level`` 1 to 3. Raises ValueError for another level."""
    hints = get(exercise_id).hints
    if level is None:
        level = min(_hints_given.get(exercise_id, 0) + 1, len(hints))
        _hints_given[exercise_id] = level
    if not 1 <= level <= len(hints):
        raise ValueError(f"level must be within 1 to {len(hints)}, got {level}")
    return f"Hint {level} of {len(hints)}: {hints[level - 1]}"


def solution(exercise_id: str) -> Any:
    """The highlighted source of a solution that passes."""
    return solution_source(get(exercise_id))


__all__ = ["EXERCISES", "Exercise", "Failed", "Report", "check", "get", "hint", "solution"]
