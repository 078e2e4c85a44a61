"""Loading models: the embedded one, the hub's, a folder's, a GGUF file's, or random weights of a named shape."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.utils import logging as hf_logging

from labkit.kv_math import ModelShape, model_shape

from .embedded import fetch
from .gguf import GGUFFile
from .gguf_llama import gguf_tokenizer, llama_model

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
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a decoder and its tokenizer.

    Args:
        name: None for the embedded SmolLM2-135M-Instruct; "org/name" on the hub (the local cache is looked at first);
            a folder; or a .gguf file of the llama architecture.
        dtype: "auto", or a floating-point type. "auto" on a GPU is bfloat16 for the embedded model and GGUF files
            and what the checkpoint says otherwise; on a CPU it is float32.
        device: default "cuda" if there is one, else "cpu".
        tokenizer: another tokenizer than the model's own.

    Weights are read from safetensors only, never from pickle files, and code from the hub runs only with
    ``trust_remote_code``. Raises ValueError for a bad argument, OSError, saying what to do, for a model that cannot
    be reached.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    chosen = resolve_dtype(dtype, device)
    if name is None:
        name = fetch()
        chosen = chosen or torch.bfloat16
    path = Path(name)
    if path.suffix == ".gguf":
        model, own_tokenizer = _load_gguf(path, chosen or torch.bfloat16, tokenizer is None)
    else:
        options = {"revision": revision, "trust_remote_code": trust_remote_code}
        with _explained(str(name)), _quiet():
            model = AutoModelForCausalLM.from_pretrained(name, dtype=chosen or "auto", use_safetensors=True, **options)
            own_tokenizer = AutoTokenizer.from_pretrained(name, **options) if tokenizer is None else None
    if isinstance(tokenizer, str | Path):
        with _explained(str(tokenizer)):
            own_tokenizer = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=trust_remote_code)
    elif tokenizer is not None:
        own_tokenizer = tokenizer
    return model.to(device).eval(), own_tokenizer  # type: ignore[return-value]


def resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype | None:
    """The torch dtype that is meant; None leaves it to the checkpoint ("auto" on a GPU).

    Raises ValueError for names that are no floating-point type.
    """
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else None
    if isinstance(dtype, str) and dtype in _DTYPES:
        return _DTYPES[dtype]
    if isinstance(dtype, torch.dtype) and dtype in _DTYPES.values():
        return dtype
    raise ValueError(f"dtype must be 'auto', {', '.join(map(repr, _DTYPES))} or the torch dtype, got {dtype!r}")


def random_model(
    shape: str | ModelShape,
    *,
    dtype: str | torch.dtype = torch.bfloat16,
    device: str | torch.device | None = None,
    seed: int = 0,
) -> PreTrainedModel:
    """A Llama-structured model of a named shape with random weights, made on the device: for measuring speed.

    Raises ValueError for an unknown name (see ``labkit.kv_math.MODEL_SHAPES``) or a mixture of experts.
    """
    known = model_shape(shape) if isinstance(shape, str) else shape
    if known.num_experts > 1:
        raise ValueError(f"random_model makes dense models only, {known.name} has {known.num_experts} experts")
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    config_class, model_class = (Qwen2Config, Qwen2ForCausalLM) if known.qkv_bias else (LlamaConfig, LlamaForCausalLM)
    config = config_class(
        vocab_size=known.vocab_size,
        hidden_size=known.hidden_size,
        intermediate_size=known.intermediate_size,
        num_hidden_layers=known.num_layers,
        num_attention_heads=known.num_heads,
        num_key_value_heads=known.num_kv_heads,
        head_dim=known.head_dim,
        max_position_embeddings=known.max_model_len,
        tie_word_embeddings=known.tied_embeddings,
    )
    config.name_or_path = f"random weights of {known.name}"
    with torch.device("meta"):
        model = model_class(config)
    model = model.to(dtype=resolve_dtype(dtype, device) or torch.bfloat16).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02, generator=generator)
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.zero_()
    # to_empty leaves buffers undefined; the rotary frequencies are the only ones.
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    model.tie_weights()
    return model.eval()


def _load_gguf(
    path: Path, dtype: torch.dtype, wants_tokenizer: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}")
    file = GGUFFile(path)
    return llama_model(file, dtype), gguf_tokenizer(file) if wants_tokenizer else None


@contextlib.contextmanager
def _explained(name: str) -> Iterator[None]:
    """Say what to do about the errors with which loading usually fails."""
    try:
        yield
    except OSError as error:
        if Path(name).is_dir():
            hint = "the folder needs config.json and safetensors weights; pickle files (.bin, .pt) are not read"
        else:
            hint = (
                "no such folder here, and the hub could not be reached or does not have it: check the name and the "
                "connection, download it elsewhere and pass the folder, or leave the name out for the embedded model"
            )
        raise OSError(f"could not load {name!r}: {hint}\n{error}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the loader's own progress bar: a small model loads faster than the bar can be read."""
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()
