"""What this machine is, and what labkit will do on it: `env_report()` in a notebook, `labkit doctor` in a terminal."""

from __future__ import annotations

import html
import os
import platform
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from labkit import __version__

GIB = 1 << 30

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "numpy",
    "plotly",
    "jupyterlab",
    "ipykernel",
    "ipywidgets",
    "anywidget",
)


@dataclass(frozen=True, slots=True)
class GPU:
    """One NVIDIA GPU as its driver reports it; memory in bytes."""

    name: str
    total_bytes: int
    free_bytes: int
    driver: str
    compute_capability: tuple[int, int]

    def __str__(self) -> str:
        major, minor = self.compute_capability
        return (
            f"{self.name}, {self.free_bytes / GIB:.1f} of {self.total_bytes / GIB:.1f} GiB free, "
            f"sm_{major}{minor}, driver {self.driver}"
        )


@dataclass(frozen=True, slots=True)
class Backend:
    """Where tensors live and which paged attention runs there, with the reason in words."""

    device: str
    attention: str
    reason: str


@dataclass(frozen=True, slots=True)
class EnvironmentReport:
    """A machine and its software; prints as text and shows as a table in a notebook."""

    versions: dict[str, str]
    cpu: str
    ram: str
    gpus: tuple[GPU, ...]
    backend: Backend
    model: str
    hints: tuple[str, ...]

    def rows(self) -> list[tuple[str, str]]:
        """(label, text) pairs in the order in which they are shown."""
        gpus = [("GPU", str(gpu)) for gpu in self.gpus] or [("GPU", "none that an NVIDIA driver reports")]
        return [
            *self.versions.items(),
            ("CPU", self.cpu),
            ("memory", self.ram),
            *gpus,
            ("attention", f"{self.backend.attention} on {self.backend.device}: {self.backend.reason}"),
            ("model", self.model),
        ]

    def __repr__(self) -> str:
        lines = [f"{label:<13}{text}" for label, text in self.rows()]
        lines += [f"-> {hint}" for hint in self.hints] or ["Everything needed is here."]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        # JupyterLab styles tables and sets the colours for its theme; only alignment is ours.
        cell = 'style="text-align:left"'
        table = "".join(
            f"<tr><th {cell}>{html.escape(label)}</th><td {cell}>{html.escape(text)}</td></tr>"
            for label, text in self.rows()
        )
        hints = "".join(f"<li>{html.escape(hint)}</li>" for hint in self.hints)
        notes = f"<p><b>To do</b></p><ul>{hints}</ul>" if hints else "<p>Everything needed is here.</p>"
        return f"<table>{table}</table>{notes}"


def env_report() -> EnvironmentReport:
    """Look at the machine: versions, CPU, memory, GPUs, the attention backend that will run, the embedded model.

    Imports torch (seconds, the first time). Never raises for something missing: it says so, and how to get it.
    """
    gpus = list_gpus()
    backend, torch_hints = default_backend(gpus)
    model, model_hints = _embedded_model()
    return EnvironmentReport(
        versions={"labkit": _labkit_version(), "python": platform.python_version()}
        | {name: _version(name) for name in PACKAGES},
        cpu=f"{_usable_cores()} cores usable of {os.cpu_count()}, {platform.machine()}",
        ram=_ram(),
        gpus=gpus,
        backend=backend,
        model=model,
        hints=(*_missing_packages(), *torch_hints, *model_hints, *_other_jupyter()),
    )


def prepare_kernels() -> None:
    """Let Triton kernels run here: without a GPU, in Triton's interpreter (right answers, meaningless times).

    Triton decides when it is first imported, so call this before. Raises RuntimeError if that has happened already.
    """
    if list_gpus() or os.environ.get("TRITON_INTERPRET") == "1":
        return
    if "triton" in sys.modules:
        raise RuntimeError("triton is loaded already: restart the kernel and call prepare_kernels() first")
    os.environ["TRITON_INTERPRET"] = "1"


def list_gpus() -> tuple[GPU, ...]:
    """The NVIDIA GPUs of this machine, asked from the driver (NVML); empty without a driver."""
    try:
        import pynvml
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        driver = str(pynvml.nvmlSystemGetDriverVersion())
        return tuple(_read_gpu(i, driver) for i in range(pynvml.nvmlDeviceGetCount()))
    finally:
        pynvml.nvmlShutdown()


def _read_gpu(index: int, driver: str) -> GPU:
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return GPU(
        name=str(pynvml.nvmlDeviceGetName(handle)),
        total_bytes=int(memory.total),
        free_bytes=int(memory.free),
        driver=driver,
        compute_capability=(major, minor),
    )


def default_backend(gpus: tuple[GPU, ...]) -> tuple[Backend, list[str]]:
    """The backend that `LLM()` takes by default on this machine, and what to do if a GPU is left unused."""
    try:
        import torch

        from labkit.engine.backends import choose_backend
    except (ImportError, OSError) as error:
        advice = "Install labkit again with all its dependencies: pip install ."
        return Backend("cpu", "none", f"the engine cannot be imported ({error})"), [advice]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    backend = Backend(device, *choose_backend(device))
    if device == "cuda" or not gpus:
        return backend, []
    if torch.version.cuda is None:
        advice = "There is a GPU, but this torch is a build without CUDA: install one with CUDA to use it."
    else:
        advice = f"There is a GPU: update its driver ({gpus[0].driver}) to one that supports CUDA {torch.version.cuda}."
    return backend, [advice]


def _embedded_model() -> tuple[str, list[str]]:
    try:
        from labkit.models.embedded import NAME, PACKAGE, cached, installed_gguf
    except (ImportError, OSError) as error:
        return f"labkit.models cannot be imported ({error})", []
    if folder := cached():
        return f"{NAME} in {folder}", []
    if installed_gguf():
        return f"{NAME} from the installed package {PACKAGE}, converted at first use", []
    return f"{NAME}, not fetched yet", ["Get the embedded model, once, about 90 MB: labkit models fetch"]


def _missing_packages() -> list[str]:
    missing = [name for name in PACKAGES if _version(name) == "not installed"]
    if sys.platform != "linux" and "triton" in missing:
        missing.remove("triton")  # it exists for Linux only, and is needed for CUDA kernels only
    return [f"Missing: pip install {' '.join(missing)}"] if missing else []


def _other_jupyter() -> list[str]:
    """Advice for a kernel whose JupyterLab runs elsewhere, where the front end of widgets may be missing."""
    import psutil

    parent = os.environ.get("JPY_PARENT_PID", "")  # set by Jupyter for the kernels that it starts
    if not parent.isdigit() or not psutil.pid_exists(int(parent)):
        return []
    try:
        server = Path(psutil.Process(int(parent)).cmdline()[0])
    except (psutil.Error, IndexError):
        return []
    if not server.is_absolute() or server.parent == Path(sys.executable).parent:
        return []
    advice = (
        "widgets and figures show only if it has ipywidgets, anywidget and plotly too. `make lab` starts one that does"
    )
    return [f"JupyterLab runs from another environment ({server.parent}): {advice}."]


def _labkit_version() -> str:
    try:
        return metadata.version("kv-labkit")
    except metadata.PackageNotFoundError:
        return f"from a checkout: {__version__}"


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _ram() -> str:
    import psutil

    memory = psutil.virtual_memory()
    return f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB available"
