"""Finding the smallest case that an attempt gets wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy

from .exercise import Failed

Case = TypeVar("Case")


def on_all(
    cases: SearchStrategy[Case], compare: Callable[[Case], None], *, num_cases: int = 100, about: str = ""
) -> None:
    """Run ``compare`` on many cases; raise :class:`Failed` with the smallest that fails.

    ``compare`` raises Failed, or whatever the attempt raises. Cases are the same on every run; hypothesis makes them
    and shrinks the one that fails.
    """
    last: list[tuple[Case, Exception]] = []

    @settings(
        max_examples=num_cases,
        derandomize=True,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=tuple(HealthCheck),  # type: ignore[arg-type]
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
    )
    @given(cases)
    def run(case: Case) -> None:
        try:
            compare(case)
        except Exception as error:
            last[:] = [(case, error)]
            raise

    try:
        run()
    except Exception:
        case, error = last[0]
        if isinstance(error, NotImplementedError):
            raise error from None
        words = error.words if isinstance(error, Failed) else f"{type(error).__name__}: {error}"
        picture = error.picture if isinstance(error, Failed) else None
        raise Failed(f"{about}{words}", case=case, picture=picture) from None


def same(got: Any, expected: Any, what: str = "the result") -> None:
    """Raise :class:`Failed` in words unless both are equal."""
    if got != expected:
        got_text = "nothing (None): is a return missing?" if got is None else repr(got)
        raise Failed(f"{what} should be {expected!r}, got {got_text}")
