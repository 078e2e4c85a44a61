"""Result files: JSON that is whole at any moment, whenever the process that writes it dies."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def read_results(path: Path, *tables: str) -> dict[str, Any]:
    """What the file at ``path`` holds; {} if there is none.

    Raises ValueError, naming the file, for what is no JSON object, or has one of ``tables`` that is no list of rows.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{path} must be a JSON file of results, but is no JSON: {error}") from error
    if not isinstance(document, dict):
        raise ValueError(f"{path} must hold a JSON object of results, got {type(document).__name__}")
    for name in tables:
        rows = document.get(name)
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError(f'{path} must hold "{name}", a list of rows, and has {", ".join(document) or "nothing"}')
    return document


def write_results(path: Path, document: dict[str, Any]) -> None:
    """``document`` as JSON; folders are made."""
    replace_text(path, json.dumps(document, indent=1) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Put ``text`` into the file at ``path``, which holds at any moment either what it held or all of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)
