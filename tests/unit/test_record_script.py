"""The script that records GPU results: its parts exist, and the checklist names each."""

import re
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "data" / "results" / "h200" / "record.sh"


def test_parts_are_functions_of_a_script_that_parses_and_stand_in_the_checklist():
    text = SCRIPT.read_text()
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    default = re.search(r"^parts=\$\{\*:-(.+)\}$", text, re.MULTILINE)
    assert default is not None
    functions = re.findall(r"^(\w+)\(\) \{", text, re.MULTILINE)
    table = (SCRIPT.parents[2] / "README.md").read_text().split("## Recording the GPU results anew")[1]
    for part in default[1].split():
        assert part in functions
        assert re.search(rf"\b{part}\b", table), f"data/README.md says nothing of {part}"


def test_modules_that_the_script_runs_exist():
    root = SCRIPT.parents[3]
    for module in re.findall(r"python3 -m (labkit[\w.]+)", SCRIPT.read_text()):
        path = root / Path(*module.split("."))
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
    for kept in re.findall(r"begin_with (\S+)", SCRIPT.read_text()):
        assert (SCRIPT.parents[1] / kept).exists(), kept
