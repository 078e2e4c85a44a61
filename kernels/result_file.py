"""A file of measurements: where they come from, and JSON that is whole whenever the process that writes it dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import triton


def write_results(path: Path, document: dict[str, Any]) -> None:
    """``document`` as JSON in place of what the file held."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(document, indent=1) + "\n")
    os.replace(unfinished, path)


def command() -> str:
    """What was typed; in a notebook the arguments are Jupyter's, and none of ours."""
    if (ipython := sys.modules.get("IPython")) and ipython.get_ipython() is not None:
        return "in a notebook"
    # An absolute path would tell of the machine, not of the measurement.
    arguments = [Path(argument).name if os.path.isabs(argument) else argument for argument in sys.argv[1:]]
    return " ".join(["python -m labkit.kernels.bench", *arguments])


def provenance() -> dict[str, str]:
    """Where a measurement comes from: GPU, driver, versions, commit, command, date."""

    def ask(*command: str) -> str:
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return "unknown"

    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": os.environ.get("LABKIT_COMMIT")
        or ask("git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"),
        "command": command(),
        "date": time.strftime("%Y-%m-%d"),
    }
