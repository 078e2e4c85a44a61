"""Finding the smallest case that an attempt gets wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from numbers import Real
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy

from .attempt import TookTooLong, in_words, shown
from .exercise import TOO_LONG, Failed

Case = TypeVar("Case")


def on_all(
    cases: SearchStrategy[Case], compare: Callable[[Case], None], *, num_cases: int = 100, about: str = ""
) -> None:
    """Run ``compare`` on many cases; raise :class:`Failed` with the smallest that fails.

    ``compare`` raises Failed, or whatever the attempt raises. Cases are the same on every run; hypothesis makes them
    and shrinks the one that fails. One that takes too long is reported as it is: to shrink it takes as long again.
    """
    last: list[tuple[Case, BaseException, str]] = []

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
        printed = StringIO()
        try:
            with redirect_stdout(printed):
                compare(case)
        except (Exception, SystemExit) as error:
            last[:] = [(case, error, printed.getvalue())]
            raise
        except TookTooLong as error:
            if not last:  # else it came while a wrong answer was shrunk, which says more
                last[:] = [(case, error, printed.getvalue())]
            raise

    try:
        run()
    except (Exception, SystemExit, TookTooLong) as ended:
        if not last:
            raise ended from None
        case, error, text = last[0]
        if isinstance(error, NotImplementedError):
            raise error from None
        if isinstance(error, Failed):
            words, picture = error.words, error.picture
        else:
            words, picture = TOO_LONG if isinstance(error, TookTooLong) else in_words(error), None
        raise Failed(f"{about}{words}", case=case, picture=picture, printed=text) from None


def same(got: Any, expected: Any, what: str = "the result") -> None:
    """Raise :class:`Failed` in words unless both are equal."""
    try:
        equal = bool(got == expected)
    except Exception:  # tensors and arrays of several values have no truth
        equal = False
    if not equal:
        raise Failed(f"{what} should be {expected!r}, got {shown(got)}")


def close(got: Any, expected: float, what: str = "the result", *, rel_tol: float = 1e-9) -> None:
    """Raise :class:`Failed` in words unless ``got`` is a number that is close to ``expected``."""
    if not isinstance(got, Real):
        raise Failed(f"{what} should be a number, {expected:.6g}, got {shown(got)}")
    if not math.isclose(got, expected, rel_tol=rel_tol, abs_tol=1e-9):
        raise Failed(f"{what} should be {expected:.6g}, got {got!r}")


def as_list(got: Any, what: str = "the result") -> list[Any]:
    """``got`` as a list; raises :class:`Failed` in words for what is no list or tuple."""
    if not isinstance(got, list | tuple):
        raise Failed(f"{what} should be a list, got {shown(got)}")
    return list(got)
