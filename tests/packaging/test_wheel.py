"""The built distribution, installed into an empty environment outside the repository, is complete."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
WIDGET_ASSETS = sorted(p for kind in ("*.js", "*.css") for p in (REPOSITORY / "labkit/widgets").glob(kind))


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(sdist, wheel); the wheel is built from the unpacked sdist, so a file missing there is missing in both."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(REPOSITORY), cwd=out)
    return next(out.glob("*.tar.gz")), next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def python(distributions: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment in which labkit came from the wheel.

    To stay fast and offline, the heavy dependencies are borrowed from the environment that runs the tests, through a
    .pth file. Python runs no .pth file of a folder that is added so; the editable labkit over there stays unseen.
    """
    home = tmp_path_factory.mktemp("empty") / "venv"
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    run(
        *(sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-index", "--no-deps"),
        str(distributions[1]),
        cwd=home,
    )
    site_packages = next(home.glob("lib/python*/site-packages"))
    borrowed = Path(pytest.__file__).parents[1]
    (site_packages / "borrowed.pth").write_text(f"{borrowed}\n")
    return python


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_wheel_and_sdist_hold_kernels_assets_and_data(distributions: tuple[Path, Path]) -> None:
    sdist, wheel = distributions
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    in_wheel = set(zipfile.ZipFile(wheel).namelist())
    kernels = {f"labkit/kernels/{p.name}" for p in (REPOSITORY / "kernels").glob("*.py")}
    assets = {p.relative_to(REPOSITORY).as_posix() for p in WIDGET_ASSETS}
    data = {f"labkit/{p.relative_to(REPOSITORY).as_posix()}" for p in (REPOSITORY / "data").rglob("*") if p.is_file()}
    expected = {"labkit/__init__.py", "labkit/py.typed", *kernels, *assets, *data}
    assert expected <= in_wheel
    assert expected <= in_sdist
    assert not any(name.startswith(("kernels/", "data/", "tests/")) for name in in_wheel)


def test_installed_package_is_whole(python: Path, tmp_path: Path) -> None:
    code = f"""
import importlib.util
from importlib.resources import files
from pathlib import Path
import labkit, labkit.kernels, labkit.widgets
home = Path({str(python.parents[1])!r})
assert home in Path(labkit.__file__).parents, labkit.__file__
assert home in Path(labkit.kernels.__file__).parents, labkit.kernels.__file__
assert importlib.util.find_spec("kernels") is None
assert all((files("labkit.widgets") / name).is_file() for name in {[p.name for p in WIDGET_ASSETS]!r})
assert (files("labkit") / "data" / "README.md").is_file()
"""
    run(str(python), "-c", code, cwd=tmp_path)


def test_installed_package_generates(python: Path, tmp_path: Path) -> None:
    code = """
from labkit import LLM, SamplingParams
[output] = LLM().generate("The capital of France is", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
print(output.outputs[0].text)
"""
    assert "Paris" in run(str(python), "-c", code, cwd=tmp_path)


def test_installed_command(python: Path, tmp_path: Path) -> None:
    assert "doctor" in run(str(python.parent / "labkit"), "--help", cwd=tmp_path)
