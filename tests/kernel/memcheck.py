"""The kernels' tests under compute-sanitizer's memcheck, on a machine with a GPU:

    python tests/kernel/memcheck.py memcheck.json [seconds]

Every kernel runs on small, odd shapes whose unused slots and table entries are poison. Groups run side by side, each
for at most `seconds` (default 150); every tensor is an allocation of its own, so that one number beyond its end counts.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
GROUPS = {  # name: file of tests, which of them (pytest -k)
    "attention, bf16": ("test_paged_attention_gpu.py", "bfloat16 or window_softcap_sinks"),
    "attention, block sizes": ("test_paged_attention_gpu.py", "block_sizes"),
    "attention, masks and padding": ("test_paged_attention.py", "together or padded_rows or float16 or workspace"),
    "decode of quantised pages": ("test_quantised_attention.py", "test_every_format_on_a_gpu"),
    "prefill of quantised pages": ("test_quantised_attention.py", "test_prefill_of_every_format and not on_a_gpu"),
    "quantised writes": ("test_write_quantised.py", "not on_a_gpu"),
    "write, copy, swap": ("test_write_and_copy.py", "not nothing"),
    "norm, rotary position, activation": ("test_elementwise.py", "not compile and not transformers and not bad"),
}


def sanitizer() -> str | None:
    """Path of compute-sanitizer, where there is one."""
    return shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")


def pytest_command(group: str) -> list[str]:
    file, chosen = GROUPS[group]
    return [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(HERE / file), "-k", chosen]


def check(tool: str, group: str, seconds: float) -> dict[str, Any]:
    """{"group", "errors", "passed", "failed", "seconds"}; "not_run" says why where there is no verdict."""
    limit = ["timeout", "-k", "5", str(seconds)]  # ends what the tool started, too
    command = [*limit, tool, "--tool", "memcheck", "--report-api-errors", "no", *pytest_command(group)]
    begin = time.monotonic()
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    text = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env).stdout
    print(text[-3000:], flush=True)
    errors = re.search(r"ERROR SUMMARY: (\d+) error", text)
    if errors is None:
        return {"group": group, "not_run": f"no summary within {seconds:.0f} s: {text[-200:]}"}
    passed, failed = (re.search(rf"(\d+) {word}", text) for word in ("passed", "failed"))
    row = {"group": group, "errors": int(errors[1]), "passed": int(passed[1]) if passed else 0}
    return row | {"failed": int(failed[1]) if failed else 0, "seconds": round(time.monotonic() - begin, 1)}


def main() -> None:
    from labkit.kernels.result_file import provenance

    out, seconds = Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 150.0
    result = {"provenance": provenance() | {"command": "python tests/kernel/memcheck.py"}}
    tool = sanitizer()
    if tool is None:
        result["rows"] = [{"group": group, "not_run": "compute-sanitizer is not installed"} for group in GROUPS]
    else:
        with ThreadPoolExecutor(len(GROUPS)) as pool:
            result["rows"] = list(pool.map(lambda group: check(tool, group, seconds), GROUPS))
    out.write_text(json.dumps(result, indent=1) + "\n")
    print("memcheck: " + "; ".join(f"{r['group']}: {r.get('errors', r.get('not_run'))}" for r in result["rows"]))


if __name__ == "__main__":
    main()
