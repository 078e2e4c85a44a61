"""The source of a part of the lab, where a lesson talks about it."""

from __future__ import annotations

import inspect
import textwrap
from typing import Any

from IPython.display import Code


def show(part: Any) -> Code:
    """The highlighted source of a class, function, method or module, as it is installed.

    Raises TypeError for something that has no Python source of its own, such as an instance or a built-in.
    """
    try:
        source = inspect.getsource(part)
    except (TypeError, OSError) as error:
        raise TypeError(f"part must be a class, function or module with Python source, got {part!r}") from error
    return Code(textwrap.dedent(source), language="python")
