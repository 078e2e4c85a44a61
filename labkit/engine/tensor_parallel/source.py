"""Where ranks read their weights from: always a folder in transformers' layout, made first where there is none."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from labkit.kv_math import model_shape
from labkit.models import RandomWeights, convert_kv_heads, load_model, read_config, require_supported
from labkit.models.loading import load_tokenizer, resolve_device, resolve_dtype, weights_folder
from labkit.models.quiet import quiet_transformers
from labkit.models.random_weights import config_of_shape

from ..options import EngineOptions
from .checks import require_devices, require_shardable, require_supported_options
from .torchrun import is_on_one_host, is_torchrun, require_world


@dataclass(frozen=True, slots=True)
class WeightsSource:
    """What a rank needs to load its shard.

    folder: config, and safetensors unless ``random_seed`` is given. dtype None is the checkpoint's.
    is_temporary: :meth:`discard` removes the folder, once all ranks have loaded.
    """

    folder: Path
    device_type: str
    dtype: torch.dtype | None
    trust_remote_code: bool = False
    random_seed: int | None = None
    is_temporary: bool = False

    def discard(self) -> None:
        """Remove the folder if it was made for the ranks."""
        if self.is_temporary:
            shutil.rmtree(self.folder, ignore_errors=True)


def resolve_sharded(
    model: str | Path | PreTrainedModel | RandomWeights | None,
    tokenizer: str | Path | PreTrainedTokenizerBase | None,
    dtype: str | torch.dtype,
    device: str | torch.device | None,
    quantization: str | None,
    trust_remote_code: bool,
    options: EngineOptions,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None, WeightsSource]:
    """The model without weights (device "meta"), its tokenizer, and where ranks find the weights.

    A folder or a hub model is read by the ranks themselves, each its shard only. A module, a GGUF file, and a model
    whose KV heads must be copied are first written to a temporary folder. Raises ValueError before anything is loaded.
    """
    size = options.tensor_parallel_size
    require_supported_options(options.swap_space, quantization)
    chosen = resolve_device(device)
    require_devices(chosen, require_world(size) if is_torchrun() else size)
    config = _config_of(model)
    require_supported(config)
    outline = _without_weights(config, trust_remote_code)
    num_kv_heads = require_shardable(outline, size)
    copies_heads = num_kv_heads != config.get_text_config(decoder=True).num_key_value_heads
    wanted_dtype = resolve_dtype(dtype, chosen)

    if isinstance(model, RandomWeights):
        if copies_heads:
            raise ValueError(f"tensor_parallel_size must be <= the KV heads with random weights, got {size}")
        folder = _temporary_folder()
        config.save_pretrained(folder)
        own = load_tokenizer(Path(tokenizer), trust_remote_code) if isinstance(tokenizer, str | Path) else tokenizer
        return outline, own, WeightsSource(folder, chosen.type, model.dtype, random_seed=model.seed, is_temporary=True)

    if isinstance(model, torch.nn.Module):
        if isinstance(tokenizer, str | Path):
            raise ValueError(f"with a module as model, tokenizer must be a tokenizer object or None, got {tokenizer!r}")
        whole, own = model, tokenizer
    else:
        folder = weights_folder(model, trust_remote_code)
        if model is None and wanted_dtype is None:
            wanted_dtype = torch.bfloat16
        if folder is not None and not copies_heads:
            own = _tokenizer(folder, tokenizer, trust_remote_code)
            return outline, own, WeightsSource(folder, chosen.type, wanted_dtype, trust_remote_code)
        whole, own = load_model(
            model,
            tokenizer=tokenizer,
            dtype=wanted_dtype or torch.bfloat16,
            device="cpu",
            trust_remote_code=trust_remote_code,
        )
    if copies_heads:
        whole, _ = convert_kv_heads(whole, num_kv_heads, "repeat")
        outline = _without_weights(whole.config, trust_remote_code)
    folder = _temporary_folder()
    with quiet_transformers():
        whole.save_pretrained(folder)
    return outline, own, WeightsSource(folder, chosen.type, whole.dtype, trust_remote_code, is_temporary=True)


def _config_of(model: str | Path | PreTrainedModel | RandomWeights | None) -> PreTrainedConfig:
    if isinstance(model, RandomWeights):
        return config_of_shape(model_shape(model.shape))
    return model.config if isinstance(model, PreTrainedModel) else read_config(model)


def _without_weights(config: PreTrainedConfig, trust_remote_code: bool) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code).eval()


def _temporary_folder() -> Path:
    if not is_on_one_host():
        raise ValueError(
            "with ranks on several hosts, model must be a hub name or a folder that all of them see, with as many KV "
            "heads as ranks or a multiple"
        )
    return Path(tempfile.mkdtemp(prefix="labkit-ranks-"))


def _tokenizer(
    folder: Path, tokenizer: str | Path | PreTrainedTokenizerBase | None, trust_remote_code: bool
) -> PreTrainedTokenizerBase:
    """The one that was passed or named, else that of the model's folder."""
    if isinstance(tokenizer, PreTrainedTokenizerBase):
        return tokenizer
    return load_tokenizer(folder if tokenizer is None else weights_folder(tokenizer) or folder, trust_remote_code)
