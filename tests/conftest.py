"""What every test needs: the Triton interpreter where there is no CUDA, no hub, and GPU tests skipped with a reason."""

from __future__ import annotations

import os
from importlib import metadata

import pytest

from labkit.environment import list_gpus

# Asked from the driver and from torch's version instead of torch itself, which takes seconds to import.
HAS_CUDA = bool(list_gpus()) and not metadata.version("torch").endswith("+cpu")

# Triton reads this when a kernel is defined, so it must be set before any test imports labkit.kernels.
# The kernels of notebooks started by nbval inherit it.
if not HAS_CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may depend on a hub
# Threads that wait for each other by spinning make a busy machine several times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_CUDA:
        return
    no_cuda = pytest.mark.skip(reason="needs a CUDA device, and this machine has none that torch can use")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(no_cuda)
