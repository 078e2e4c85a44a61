"""Every shipped configuration compiles for its GPU generation on a machine without one, and only prefill may spill."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SHARED_MEMORY = {80: 166_912, 90: 232_448, 100: 232_448}  # bytes a program may use


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_shipped_configurations_compile(capability):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "labkit.kernels.compile_report", str(capability)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["kernel"] for row in rows} == {"decode", "prefill", "write"}
    for row in rows:
        assert row["shared_bytes"] <= SHARED_MEMORY[capability], row
        if row["kernel"] != "prefill":
            assert row["spill_bytes"] == 0, row
        elif capability == 90:
            assert row["wgmma"] > 0, row
