"""Loading a decoder and its tokenizer: the embedded one, the hub's, a folder's, a GGUF file's."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from . import embedded, hub
from .fp8_weights import check_quantization, quantise_weights, require_fp8_weights
from .gguf import GGUFFile
from .gguf_llama import gguf_tokenizer, llama_model
from .quiet import quiet_transformers
from .support import require_supported

_DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "float16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
}


def load_model(
    name: str | Path | None = None,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    tokenizer: str | Path | PreTrainedTokenizerBase | None = None,
    revision: str | None = None,
    quantization: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a decoder, ready for inference, and its tokenizer.

    Args:
        name: None for the embedded SmolLM2-135M-Instruct; "org/name" on the hub (the local cache is looked at first);
            a folder; or a .gguf file of the llama architecture.
        dtype: "auto", or a floating-point type. "auto" on a GPU is bfloat16 for the embedded model and GGUF files
            and what the checkpoint says otherwise; on a CPU it is float32.
        device: default "cuda" if there is one, else "cpu".
        tokenizer: another tokenizer than the model's own: hub name, folder or object.
        revision: branch, tag or commit on the hub.
        quantization: "fp8" rounds the weights, see :mod:`labkit.models.fp8_weights`; it says nothing of the KV cache.

    Weights are read from safetensors only, never from pickle files, and code that comes with a model runs only with
    ``trust_remote_code``. Raises ValueError for a bad argument and for an architecture that the engine cannot run
    (before its weights are fetched); OSError, saying what to do, for a model that cannot be reached.
    """
    chosen_device = resolve_device(device)
    chosen = resolve_dtype(dtype, chosen_device)
    check_quantization(quantization)
    if quantization is not None:
        require_fp8_weights(chosen_device, chosen)
    wants_own_tokenizer = tokenizer is None
    if name is None:
        folder, shown_name = embedded.fetch(), f"{embedded.NAME}, Q4_1 weights dequantised"
        model = _load_folder(folder, chosen or torch.bfloat16, trust_remote_code=False)
        own_tokenizer = load_tokenizer(folder, False) if wants_own_tokenizer else None
    elif (path := checked_path(name)).suffix == ".gguf":
        gguf, shown_name = GGUFFile(path), path.stem
        own_tokenizer = gguf_tokenizer(gguf) if wants_own_tokenizer else None
        model = llama_model(gguf, chosen or torch.bfloat16)
    else:
        if not path.is_dir():
            require_supported(load_config(name, revision=revision, trust_remote_code=trust_remote_code))
            path = hub.model_folder(str(name), revision, trust_remote_code)
        shown_name = str(name)
        model = _load_folder(path, chosen, trust_remote_code)
        own_tokenizer = load_tokenizer(path, trust_remote_code) if wants_own_tokenizer else None
    if isinstance(tokenizer, str | Path):
        folder = Path(tokenizer)
        if not folder.is_dir():
            folder = hub.tokenizer_folder(str(tokenizer), None, trust_remote_code)
        own_tokenizer = load_tokenizer(folder, trust_remote_code)
    elif tokenizer is not None:
        own_tokenizer = tokenizer
    model.config.name_or_path = shown_name
    model = model.to(chosen_device).eval()  # type: ignore[arg-type]
    if quantization is not None:
        quantise_weights(model, quantization)
    return model, own_tokenizer  # type: ignore[return-value]


def load_config(name: str | Path, *, revision: str | None = None, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The config of a folder's or the hub's model, without its weights. Raises as :func:`load_model` does."""
    path = checked_path(name)
    if not path.is_dir():
        path = hub.config_folder(str(name), revision, trust_remote_code)
    if not (path / "config.json").exists():
        raise ValueError(f"{name} has no config.json: it is not the folder of a transformers model")
    return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)


def resolve_device(device: str | torch.device | None) -> torch.device:
    """The torch device that is meant: None is "cuda" if there is one, else "cpu".

    Raises ValueError if there is no such device.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device must be 'cpu', 'cuda' or 'cuda:N', got {device!r}") from error
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device={str(device)!r}: torch sees {torch.cuda.device_count()} CUDA devices here")
    return chosen


def resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype | None:
    """The torch dtype that is meant; None leaves it to the checkpoint ("auto" on a GPU).

    Raises ValueError for what is no floating-point type.
    """
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else None
    if isinstance(dtype, str) and dtype in _DTYPES:
        return _DTYPES[dtype]
    if isinstance(dtype, torch.dtype) and dtype in _DTYPES.values():
        return dtype
    raise ValueError(f"dtype must be 'auto', {', '.join(map(repr, _DTYPES))} or the torch dtype, got {dtype!r}")


def checked_path(name: str | Path) -> Path:
    """``name`` as a path; what is clearly meant as a path must exist."""
    if not isinstance(name, str | Path):
        raise TypeError(f"name must be a hub name, a folder, a .gguf file or None, got {name!r}")
    path = Path(name).expanduser()
    if not str(name):
        raise ValueError("name must be a hub name, a folder, a .gguf file or None, got ''")
    if path.is_file() and path.suffix != ".gguf":
        raise ValueError(f"{name} is a file; only .gguf files can be loaded, or the folder that holds a whole model")
    looks_like_path = isinstance(name, Path) or str(name).startswith((".", "/", "~")) or str(name).count("/") > 1
    if not path.exists() and (looks_like_path or path.suffix == ".gguf"):
        raise FileNotFoundError(f"there is no file or folder {name}")
    return path


def _load_folder(folder: Path, dtype: torch.dtype | None, trust_remote_code: bool) -> PreTrainedModel:
    require_supported(load_config(folder, trust_remote_code=trust_remote_code))
    if not any(folder.glob("*.safetensors")):
        pickles = ", ".join(sorted(file.name for file in folder.iterdir() if file.suffix in (".bin", ".pt", ".pth")))
        found = f"only {pickles}, and pickle files are not loaded: they can run code" if pickles else "no weights"
        raise ValueError(f"{folder} must hold safetensors weights; it has {found}")
    try:
        with quiet_transformers():
            return AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype or "auto", use_safetensors=True, trust_remote_code=trust_remote_code
            )
    except SafetensorError as error:
        raise ValueError(
            f"the safetensors files of {folder} cannot be read, a download may be cut off: {error}"
        ) from error


def weights_folder(name: str | Path | None, trust_remote_code: bool = False) -> Path | None:
    """The folder that :func:`load_model` reads; None for a GGUF file, which has none. Raises as it does."""
    if name is None:
        return embedded.fetch()
    path = checked_path(name)
    if path.suffix == ".gguf":
        return None
    return path if path.is_dir() else hub.model_folder(str(name), None, trust_remote_code)


def load_tokenizer(folder: Path, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder. Raises ValueError if there is none that can be loaded."""
    try:
        with quiet_transformers():
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"no tokenizer can be loaded from {folder}: pass tokenizer= another one ({error})") from error
