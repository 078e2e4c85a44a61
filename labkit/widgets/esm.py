"""A widget's script from several files: a notebook's browser takes one module and knows no addresses."""

from __future__ import annotations

import re
from pathlib import Path

_IMPORT = re.compile(r"^import [^;]*;\n", re.MULTILINE)
_EXPORT = re.compile(r"^export (?=const|function|async|class)", re.MULTILINE)


def joined_modules(folder: Path, *names: str) -> str:
    """Modules of ``folder`` as one, each after those that it imports: without the imports and their exports.

    What they declare stands in one scope, so names must differ. Only the last may have a default export.
    """
    sources = [(folder / name).read_text(encoding="utf-8") for name in names]
    return "\n".join(_EXPORT.sub("", _IMPORT.sub("", source)) for source in sources)
