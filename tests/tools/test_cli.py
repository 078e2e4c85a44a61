"""The `labkit` command in a terminal: what it prints, and how it ends on bad input."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


def test_run_refuses_an_empty_prompt() -> None:
    done = labkit("run", "")
    assert done.returncode == 2
    assert "prompt" in done.stderr and "Traceback" not in done.stderr
