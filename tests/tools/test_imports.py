"""What `import labkit...` loads, and what it must not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import labkit


def run_python(code: str, cwd: Path) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_control_plane_loads_without_torch(tmp_path: Path) -> None:
    code = """
import sys, time
start = time.perf_counter()
import labkit.memory, labkit.scheduling, labkit.core, labkit.kv_math
print(f"{time.perf_counter() - start:.3f} s")
heavy = {"torch", "triton", "transformers", "pandas", "plotly"} & set(sys.modules)
assert not heavy, heavy
"""
    print("labkit.memory, .scheduling, .core and .kv_math import in", run_python(code, tmp_path))


def test_simulation_and_observe_load_without_torch(tmp_path: Path) -> None:
    run_python("import sys, labkit.simulation, labkit.observe; assert 'torch' not in sys.modules", tmp_path)


@pytest.mark.parametrize("name", labkit.__all__)
def test_each_exported_name_exists(name: str) -> None:
    assert getattr(labkit, name).__name__ == name
    assert name in dir(labkit)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'LLMM'"):
        labkit.LLMM  # noqa: B018


def test_the_kernels_are_no_top_level_package(tmp_path: Path) -> None:
    """`kernels` is the name of a package that transformers looks for."""
    code = "import importlib.util as u; assert u.find_spec('kernels') is None; import labkit.kernels"
    run_python(code, tmp_path)
