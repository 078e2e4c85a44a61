"""A file of measurements: JSON that is whole at any moment, whenever the process that writes it dies."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_results(path: Path, document: dict[str, Any]) -> None:
    """``document`` as JSON in place of what the file held."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(document, indent=1) + "\n")
    os.replace(unfinished, path)
