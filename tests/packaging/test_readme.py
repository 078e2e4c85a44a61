"""README.md tells the truth: its Python runs, its commands and files exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
README = (REPOSITORY / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


SHELL_LINES = [
    line.split("#")[0].strip()
    for block in blocks("bash")
    for line in block.splitlines()
    if line.strip() and not line.startswith("#")
]


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=250)


@pytest.mark.parametrize("code", blocks("python"), ids=lambda code: code.splitlines()[0])
def test_python_runs(code: str, tmp_path: Path) -> None:
    done = run(sys.executable, "-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("line", [line for line in SHELL_LINES if line.startswith("make ")])
def test_make_targets_exist(line: str) -> None:
    done = run("make", "--dry-run", *re.findall(r"(?<=\s)[a-z]+(?=\s|$)", line)[:1], cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("line", [line for line in SHELL_LINES if line.startswith("labkit ")])
def test_labkit_commands_exist(line: str) -> None:
    words = re.match(r"labkit((?: [a-z]+)+)", line)
    assert words
    done = run(sys.executable, "-m", "labkit.cli", *words[1].split(), "--help", cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr


def test_every_command_is_of_a_kind_that_is_checked() -> None:
    assert [line for line in SHELL_LINES if not line.startswith(("make ", "labkit ", "pip ", "conda "))] == []


@pytest.mark.parametrize("target", re.findall(r"\]\((?!https?:|#)([^)]+)\)", README))
def test_linked_files_exist(target: str) -> None:
    assert (REPOSITORY / target).exists()


@pytest.mark.parametrize("name", re.findall(r"^\| `([\w/.]+)` \|", README, re.MULTILINE))
def test_rooms_in_the_table_exist(name: str) -> None:
    assert (REPOSITORY / "labkit" / name).exists() or (REPOSITORY / name).exists()
