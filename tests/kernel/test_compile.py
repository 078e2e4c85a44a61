"""Every shipped configuration compiles for its GPU generation on a machine without one, and only prefill may spill."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SHARED_MEMORY = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448}  # bytes a program may use


@pytest.mark.parametrize("capability", [80, 89, 90, 100])
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
            # 8-bit decode on sm_90: values of the whole pair, stored before its tiles and read once after them
            aside = 48 if row["kernel"] == "decode" and row["kv_format"] in ("fp8", "int8") and capability == 90 else 0
            assert row["spill_bytes"] <= aside, row
        elif capability == 90:
            assert row["wgmma"] > 0, row
