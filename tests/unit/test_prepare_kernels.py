"""Without a GPU the kernels run in Triton's interpreter, if somebody asks in time."""

import subprocess
import sys

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("this machine has a GPU: its kernels are compiled", allow_module_level=True)


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PATH": "", "HOME": "/"})


def test_it_must_come_before_triton():
    done = run("import labkit, triton\nlabkit.prepare_kernels()")
    assert done.returncode and "restart the kernel" in done.stderr


def test_kernels_then_run():
    code = """
import labkit
labkit.prepare_kernels()
labkit.prepare_kernels()
import torch
from labkit.kernels import KVPages, write_kv
kv = KVPages(*torch.zeros(2, 2, 1, 16, 16))
write_kv(*torch.ones(2, 1, 1, 16), kv, torch.tensor([17]))
assert kv.k[1, 0, 1].sum() == 16 and kv.k.sum() == 16
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
