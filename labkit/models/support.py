"""Which models the paged engine can run, and why not.

The engine packs the tokens of many requests into one row, gives each token its position, and answers the attention
calls itself, from block tables. A model is right under that treatment if attention is its only memory, if it sends
every attention call through transformers' interface, and if causality and a sliding window are the whole of its mask.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

_PAGEABLE_LAYERS = {"full_attention", "sliding_attention"}
_BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}
_RECURRENT = re.compile(
    "mamba|rwkv|recurrent|deltanet|linearattention|lightningattention|shortconv|xlstm", re.IGNORECASE
)
# What no attribute of class or config tells.
_SPECIAL_MASKS = {
    "doge": "adds a learned mask to attention",
    "deepseek_v4": "selects keys with a mask",
}


@dataclass(frozen=True, slots=True)
class SupportReport:
    """Whether a model can be served. ``reasons`` say why not (empty if it can), ``notes`` what is special about it."""

    model_type: str
    reasons: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def supported(self) -> bool:
        return not self.reasons

    def __str__(self) -> str:
        verdict = "supported" if self.supported else "not supported: " + "; ".join(self.reasons)
        return f"{self.model_type}: {verdict}" + "".join(f"\n  note: {note}" for note in self.notes)


def check_support(model: PreTrainedModel | PreTrainedConfig) -> SupportReport:
    """Look for everything that a packed batch over a paged cache would break.

    A config alone suffices: its model is then built without memory for weights (about 0.2 s for a 70B).
    """
    config = model.config if isinstance(model, PreTrainedModel) else model
    text = config.get_text_config(decoder=True)
    reasons, notes = list(_config_reasons(config, text)), list(_notes(text))
    if isinstance(model, PreTrainedModel):
        reasons += _module_reasons(model, text)
    elif hasattr(config, "auto_map") and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        notes.append("comes with its own code, which was not looked at: its config only")
    elif type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        reasons.append("is no causal language model of transformers")
    elif not reasons:
        try:
            with torch.device("meta"):
                weightless = AutoModelForCausalLM.from_config(config)
        except Exception as error:  # a config can be wrong in any way
            reasons.append(f"cannot be built from its config ({type(error).__name__}: {error})")
        else:
            reasons += _module_reasons(weightless, text)
    return SupportReport(config.model_type, tuple(reasons), tuple(notes))


def require_supported(model: PreTrainedModel | PreTrainedConfig) -> None:
    """Raise ValueError, naming the architecture and the reasons, unless the model can be served."""
    report = check_support(model)
    if not report.supported:
        name = type(model).__name__ if isinstance(model, PreTrainedModel) else report.model_type
        raise ValueError(f"{name} (model_type {report.model_type!r}) is not supported: {'; '.join(report.reasons)}")


# ---------------------------------------------------------------- what the config tells


def _config_reasons(config: Any, text: Any) -> Iterator[str]:
    if getattr(config, "is_encoder_decoder", False):
        yield "is an encoder-decoder: its cross-attention has no paged cache"
    if (
        getattr(text, "use_bidirectional_attention", False) in (True, "all")
        or getattr(text, "is_causal", True) is False
    ):
        yield "attends in both directions, which a causal cache cannot serve"
    unknown = sorted(set(getattr(text, "layer_types", None) or ()) - _PAGEABLE_LAYERS)
    if unknown:
        yield f"has layers of type {', '.join(unknown)}; only full and sliding-window attention can be paged"
    if getattr(text, "attention_chunk_size", None) and "chunked_attention" not in unknown:
        yield "attends in chunks, and such a mask does not reach paged attention"
    if special := _SPECIAL_MASKS.get(text.model_type):
        yield f"{special}, and such a mask does not reach paged attention"
    if getattr(text, "cross_attention_layers", None):
        yield "has cross-attention layers, whose cache does not grow with the text"
    if kind := _batch_dependent_rope(text):
        yield (
            f"its {kind!r} position encoding depends on the longest request in the batch, so requests would change "
            "each other"
        )


def _batch_dependent_rope(text: Any) -> str | None:
    """The kind of rotary encoding, if its frequencies follow the largest position of the whole batch.

    longrope has two sets of frequencies and takes the second one beyond the original length: a model that never goes
    there is safe. The table may be one for all layers or one for each type of layer.
    """
    parameters = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    for table in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        kind = table.get("rope_type", table.get("type"))
        if kind in _BATCH_DEPENDENT_ROPE:
            original = table.get("original_max_position_embeddings") or getattr(
                text, "original_max_position_embeddings", None
            )
            if kind != "longrope" or not original or text.max_position_embeddings > original:
                return kind
    return None


def _notes(text: Any) -> Iterator[str]:
    if window := _window(text):
        yield f"some or all layers see the newest {window} tokens only; their older blocks are kept nevertheless"
    if shared := getattr(text, "num_kv_shared_layers", None):
        yield f"the last {shared} layers read the KV cache of earlier ones"
    if "kv_lora_rank" in text.to_dict():
        yield "multi-head latent attention: keys and values are cached per head, not as the smaller latent"


def _window(text: Any) -> int | None:
    """The sliding window that changes what some layer sees within the model's length, or None."""
    window = getattr(text, "sliding_window", None)
    layer_types = getattr(text, "layer_types", None)
    if not isinstance(window, int) or window <= 0 or getattr(text, "use_sliding_window", True) is False:
        return None
    if layer_types and "sliding_attention" not in layer_types:
        return None
    return window if window < (getattr(text, "max_position_embeddings", None) or window + 1) else None


# ---------------------------------------------------------------- what the modules tell


def _module_reasons(model: PreTrainedModel, text: Any) -> Iterator[str]:
    classes = {type(module) for module in model.modules()}
    if getattr(model, "_is_stateful", False) or any(_RECURRENT.search(cls.__name__) for cls in classes):
        yield "has recurrent or convolutional layers, whose state would leak from one request into the next"
    # Layers of the decoder know their number; those of a vision or audio tower do not.
    attention = [module for module in model.modules() if hasattr(module, "layer_idx") and _is_attention(module)]
    if not any("ALL_ATTENTION_FUNCTIONS" in inspect.getsource(type(module).forward) for module in attention):
        yield "does not call attention through transformers' interface, so its cache cannot be paged"
    elif any(getattr(module, "is_causal", True) is False for module in attention):
        yield "has attention that is not causal (bidirectional, or to an encoder), which a causal cache cannot serve"
    elif any(_attends_twice(module) for module in attention):
        yield "runs attention more than once in a layer, and the caches of one layer cannot be told apart"
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        yield "takes no position_ids, so the requests of a packed batch would be numbered as one"
    window = _window(text)
    if window and not any("sliding_window" in inspect.getsource(type(module)) for module in attention):
        yield f"applies its sliding window of {window} by a mask alone, which does not reach paged attention"


def _is_attention(module: torch.nn.Module) -> bool:
    return hasattr(module, "is_causal") or re.search(r"Attention|MLA$", type(module).__name__) is not None


def _attends_twice(module: torch.nn.Module) -> bool:
    """Whether a layer has two caches: it calls attention twice (diffllama), or is run again with another cache."""
    source = inspect.getsource(type(module).forward)
    return source.count("attention_interface(") > 1 or "self.layer_idx + " in source


# ---------------------------------------------------------------- by name


def explain_support(name: str | Path | None) -> SupportReport:
    """The report for a model by name; no weights are fetched or read. Raises as :func:`read_config` does."""
    return check_support(read_config(name))


def read_config(name: str | Path | None) -> PreTrainedConfig:
    """The config of a model by hub name, folder or .gguf file; None is the embedded model.

    Raises as :func:`load_model` does if there is no such model.
    """
    # Loading asks this module before it fetches weights, so it can be imported only now.
    from .embedded import SHAPE_NAME
    from .gguf import GGUFFile
    from .gguf_llama import llama_config
    from .loading import checked_path, load_config
    from .random_weights import config_of_shape

    if name is None:
        from labkit.kv_math import model_shape

        return config_of_shape(model_shape(SHAPE_NAME))
    if (path := checked_path(name)).suffix == ".gguf":
        return llama_config(GGUFFile(path))
    return load_config(name)
