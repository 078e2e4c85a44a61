"""pyproject.toml, constraints.txt and environment.yml say the same about dependencies."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

REPOSITORY = Path(__file__).parents[2]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
REQUIREMENTS = {r.name: r for r in map(Requirement, PROJECT["dependencies"])}
DEV_REQUIREMENTS = {r.name: r for r in map(Requirement, PROJECT["optional-dependencies"]["dev"])}

# conda-forge's pytorch-gpu is torch, and brings the triton that belongs to it.
CONDA_NAMES = {"torch": "pytorch-gpu"}
NOT_FROM_CONDA = {"triton"}
ONLY_CONDA = {"python", "cuda-version"}


def pins() -> dict[str, str]:
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    return {
        name.lower().replace("_", "-"): version
        for name, version in (line.split("==") for line in lines if line and not line.startswith("#"))
    }


def test_the_tested_versions_lie_in_the_declared_ranges() -> None:
    tested = pins()
    outside = [
        f"{requirement} but {tested.get(name)} in constraints.txt"
        for name, requirement in (REQUIREMENTS | DEV_REQUIREMENTS).items()
        if name != "pip" and (name not in tested or tested[name] not in requirement.specifier)
    ]
    assert not outside


def test_triton_is_the_one_that_the_tested_torch_pins() -> None:
    text = (REPOSITORY / "constraints.txt").read_text()
    pinned_by_torch = dict(re.findall(r"torch ([\d.]+) -> triton==([\d.]+)", text))
    assert pins()["triton"] == pinned_by_torch[pins()["torch"]]
    assert all(triton in REQUIREMENTS["triton"].specifier for triton in pinned_by_torch.values())


def test_conda_users_get_the_same_packages_and_ranges() -> None:
    dependencies = yaml.safe_load((REPOSITORY / "environment.yml").read_text())["dependencies"]
    conda = {r.name: r.specifier for r in map(Requirement, (d for d in dependencies if isinstance(d, str)))}
    wanted = {
        CONDA_NAMES.get(name, name): requirement.specifier
        for name, requirement in REQUIREMENTS.items()
        if name not in NOT_FROM_CONDA
    }
    assert {name: spec for name, spec in conda.items() if name not in ONLY_CONDA} == wanted
    assert conda["python"] == SpecifierSet(PROJECT["requires-python"])
    assert {"pip": ["--editable ."]} in dependencies
