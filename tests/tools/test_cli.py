"""The `labkit` command in a terminal: what it prints, and how it ends on bad input."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from labkit.cli import main
from labkit.observe import Trace


def labkit(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "labkit.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


def test_plan_prints_blocks_and_requests() -> None:
    done = labkit("plan", "h200", "llama-3-8b", "--max-model-len", "4096")
    assert done.returncode == 0, done.stderr
    assert "131,072 B" in done.stdout  # 2 x 32 layers x 8 KV heads x 128 x 2 bytes a token
    assert "requests of 4,096 tokens" in done.stdout


def test_bad_input_is_one_line_and_exit_code_2() -> None:
    done = labkit("plan", "h200", "llama-3-8b", "--gpu-memory-utilization", "1.5")
    assert done.returncode == 2
    assert done.stderr.strip() == "labkit: gpu_memory_utilization must be in (0, 1], got 1.5"


def test_run_prints_the_text_and_saves_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "paris.trace"
    done = labkit("run", "The capital of France is", "--max-tokens", "4", "--trace", str(path), "--stats")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "generated_tokens" in done.stderr
    assert len(Trace.load(path)) >= 4


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ("plan h2000 llama-3-8b", "'h2000'"),
        ("plan h200 lama-3-8b", "'lama-3-8b'"),
        ("plan h200 llama-3-8b --max-model-len -5", "max_model_len"),
        ("plan h200 llama-3-8b --kv-dtype int3", "'int3'"),
        ("run x --model FOLDER", "config.json"),
        ("run x --model FOLDER/none", "FOLDER/none"),
        ("run x --model FOLDER/empty.gguf", "empty.gguf"),
        ("run x --trace FOLDER", "is a directory"),
        ("run x --max-tokens 0", "max_tokens"),
        ("doctor --model FOLDER/empty.gguf", "empty.gguf"),
        ("bench serve --num-requests -3", "--num-requests"),
        ("experiment simulate --trace FOLDER/empty.trace", "empty.trace"),
        ("experiment calibrate FOLDER/out --text FOLDER/none", "--text"),
        ("experiment sensitivity --tokens -1", "--tokens"),
    ],
)
def test_bad_input_is_named_and_ends_with_code_2(
    arguments: str, names: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("empty.gguf", "empty.trace"):
        (tmp_path / name).touch()
    words = [word.replace("FOLDER", str(tmp_path)) for word in arguments.split()]
    monkeypatch.setattr(sys, "argv", ["labkit", *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())  # typer frames what it finds wrong itself
    assert names.replace("FOLDER", str(tmp_path)) in said and "Traceback" not in said


def test_run_refuses_an_empty_prompt() -> None:
    done = labkit("run", "")
    assert done.returncode == 2
    assert "prompt" in done.stderr and "Traceback" not in done.stderr
