"""The source of a part of the lab, where a lesson talks about it."""

from __future__ import annotations

import inspect
import textwrap
from typing import Any

from IPython.display import Code


class Source(Code):
    """Highlighted source whose long lines scroll instead of breaking within words."""

    def _repr_html_(self) -> str:
        style = "<style>.labkit-source pre { white-space: pre; word-break: normal; overflow-x: auto; }</style>"
        return f'{style}<div class="labkit-source">{super()._repr_html_()}</div>'


def show(part: Any) -> Source:
    """The highlighted source of a class, function, method, Triton kernel or module, as it is installed.

    Raises TypeError for something that has no Python source of its own, such as an instance or a built-in.
    """
    try:
        source = inspect.getsource(getattr(part, "fn", part))  # a Triton kernel wraps its function
    except (TypeError, OSError) as error:
        raise TypeError(f"part must be a class, function or module with Python source, got {part!r}") from error
    return Source(textwrap.dedent(source), language="python")
