"""Where a measured number comes from: device, versions, commit, command, date."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def provenance(device: torch.device | str | None = None) -> dict[str, Any]:
    """A JSON-ready record to store beside results. ``device`` defaults to the GPU if there is one."""
    import torch  # only here: simulations do without it until they say where they ran

    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    record: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(chosen) if chosen.type == "cuda" else None,
        "driver": _driver_version() if chosen.type == "cuda" else None,
        "cpu": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
    }
    for package in ("torch", "triton", "transformers"):
        try:
            record[package] = version(package)
        except PackageNotFoundError:
            record[package] = None
    record["commit"] = os.environ.get("LABKIT_COMMIT") or _commit()
    record["command"] = _command()
    record["date"] = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    return record


def _command() -> str:
    """What was typed; in a notebook the arguments are Jupyter's, and none of ours."""
    if (ipython := sys.modules.get("IPython")) and ipython.get_ipython() is not None:
        return "in a notebook"
    # An absolute path would tell of the machine, not of the measurement.
    arguments = [Path(argument).name if os.path.isabs(argument) else argument for argument in sys.argv[1:]]
    return " ".join([_program(), *arguments])


def _program() -> str:
    """What was typed before the arguments: a script, or ``python -m`` and a module."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is None:
        return Path(sys.argv[0]).name
    module = spec.name.removesuffix(".__main__")
    return "labkit" if module == "labkit.cli" else f"python -m {module}"


def _driver_version() -> str | None:
    import pynvml

    try:
        pynvml.nvmlInit()
        driver = pynvml.nvmlSystemGetDriverVersion()
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None
    return driver if isinstance(driver, str) else driver.decode()


def _commit() -> str | None:
    """The checkout's commit, with "+" if files differ from it; None outside a checkout."""
    root = Path(__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=root, capture_output=True, text=True)
        changed = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=root, capture_output=True, text=True)
    except OSError:
        return None
    if head.returncode != 0:
        return None
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")
