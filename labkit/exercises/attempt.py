"""Running what a reader wrote: on copies, not for ever, and with words for what it raises."""

from __future__ import annotations

import copy
import ctypes
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

_NOT_THEIRS = (str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))


class TookTooLong(BaseException):
    """Raised in an attempt whose time is over; no Exception, so that its ``except Exception`` lets it pass."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise :class:`TookTooLong` in this thread if the block still runs after ``seconds``.

    Python code is stopped wherever it is, in any thread and on any system. A call that stays inside C, such as
    ``time.sleep``, is stopped when it returns.
    """
    here = ctypes.c_ulong(threading.get_ident())
    over = threading.Event()
    one_at_a_time = threading.Lock()

    def watch() -> None:
        while not over.wait(seconds):  # again each time, should a bare "except:" in a loop have swallowed the last one
            with one_at_a_time:
                if not over.is_set():
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(here, ctypes.py_object(TookTooLong))

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        with one_at_a_time:
            over.set()
            ctypes.pythonapi.PyThreadState_SetAsyncExc(here, None)  # one that is set and not yet raised


def on_copies(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which gets copies of its arguments: what it changes in them, no case and no comparison sees."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*copy.deepcopy(args), **copy.deepcopy(kwargs))

    return call


def in_words(error: BaseException) -> str:
    """The error, and the line of the reader's code that raised it."""
    words = f"{type(error).__name__}: {error}"
    theirs = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_NOT_THEIRS)]
    if theirs and theirs[-1].line:
        words += f"\nraised in line {theirs[-1].lineno}: {theirs[-1].line}"
    return words


def shown(value: object) -> str:
    """``value`` as it is written in code, cut where it gets long; None asks for the return statement."""
    if value is None:
        return "nothing (None): is a return missing?"
    try:
        text = repr(value)
    except Exception as error:  # a reader's own class can have a __repr__ that raises
        return f"{type(value).__name__}, whose repr() raises {type(error).__name__}"
    return text if len(text) <= 300 else f"{text[:300]} ..."
