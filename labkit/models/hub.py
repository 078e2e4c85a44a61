"""From "org/name" to a local folder, by way of huggingface_hub's cache."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import constants, model_info, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

_CONFIG = ["config.json", "generation_config.json"]
_TOKENIZER = ["*token*", "vocab*", "merges.txt", "added_tokens.json", "*.jinja", "*.model", "chat_template*"]
_WEIGHTS = ["*.safetensors", "*.safetensors.index.json"]
_NOT_WANTED = ["consolidated*", "original/*", "onnx/*"]  # the same weights in another layout
_SECONDS_TO_ANSWER = 10


def model_folder(name: str, revision: str | None, with_code: bool) -> Path:
    """The folder of a whole model: from the local cache if it is complete there, else downloaded.

    Raises ValueError if the hub does not have it, or not as safetensors; ConnectionError, saying what to do, if the
    hub cannot be reached.
    """
    return _snapshot(name, revision, [*_CONFIG, *_TOKENIZER, *_WEIGHTS], with_code, has_all_weights)


def config_folder(name: str, revision: str | None, with_code: bool) -> Path:
    """Like :func:`model_folder`, with the config alone."""
    return _snapshot(name, revision, _CONFIG, with_code, lambda folder: (folder / "config.json").exists())


def tokenizer_folder(name: str, revision: str | None, with_code: bool) -> Path:
    """Like :func:`model_folder`, with the tokenizer alone."""
    return _snapshot(name, revision, [*_CONFIG, *_TOKENIZER], with_code, lambda folder: any(folder.glob("*token*")))


def has_all_weights(folder: Path) -> bool:
    """Whether config and every safetensors file that the folder's index names are there."""
    if not (folder / "config.json").exists():
        return False
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return (folder / "model.safetensors").exists()
    return all((folder / file).exists() for file in set(json.loads(index.read_text())["weight_map"].values()))


def _snapshot(
    name: str, revision: str | None, patterns: list[str], with_code: bool, is_complete: Callable[[Path], bool]
) -> Path:
    patterns = [*patterns, "*.py"] if with_code else patterns
    try:
        folder = Path(snapshot_download(name, revision=revision, local_files_only=True))
        if is_complete(folder):
            return folder
    except HFValidationError as error:
        raise ValueError(f"{name!r} is neither a local folder nor a hub name of the form 'org/name'") from error
    except LocalEntryNotFoundError:
        pass
    _require_on_hub(name, revision, wants_weights="*.safetensors" in patterns)
    # Any file that is missing after this is one the repository does not have, and loading will name it.
    return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=_NOT_WANTED))


def _require_on_hub(name: str, revision: str | None, wants_weights: bool) -> None:
    """Ask once, without the retries of a download, whether the hub is there and has the model."""
    if constants.HF_HUB_OFFLINE:
        raise ConnectionError(_unreachable(name, "HF_HUB_OFFLINE is set"))
    try:
        info = model_info(name, revision=revision, timeout=_SECONDS_TO_ANSWER)
    except GatedRepoError as error:
        raise ValueError(f"{name!r} needs its licence accepted on the hub, and `hf auth login` here") from error
    except RevisionNotFoundError as error:
        raise ValueError(f"revision {revision!r} of {name!r} does not exist on the hub") from error
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"{name!r} is neither a local folder nor on the hub (private? then `hf auth login`)"
        ) from error
    except Exception as error:  # whatever the HTTP library of this huggingface_hub raises
        raise ConnectionError(_unreachable(name, f"{type(error).__name__}: {error}")) from error
    files = [sibling.rfilename for sibling in info.siblings or ()]
    if wants_weights and not any(file.endswith(".safetensors") for file in files):
        raise ValueError(f"{name!r} has no safetensors weights on the hub, and pickle files are not loaded")


def _unreachable(name: str, why: str) -> str:
    return (
        f"{name!r} is not wholly in the local hub cache, and the hub cannot be reached ({why}). Do one of these:\n"
        f"  - download it where there is a connection (`hf download {name} --local-dir FOLDER`) and pass the folder;\n"
        f"  - set HF_HOME to a folder whose hub cache holds it;\n"
        f"  - leave the name out: load_model() and LLM() then use the embedded model."
    )
