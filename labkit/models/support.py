"""Which models the paged engine can run, and why not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

_KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention"}
_SPECIAL_MASKS = {
    "llama4": "attends in chunks",
    "llama4_text": "attends in chunks",
    "phimoe": "drops its window when attention is replaced",
    "doge": "adds a learned mask to attention",
    "deepseek_v4": "selects keys with a mask",
}
_RECURRENT_MARKS = ("mamba", "ssm", "rwkv", "recurrent", "linear_attn", "linear_attention", "conv")
_BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}


@dataclass(frozen=True, slots=True)
class SupportReport:
    """Whether a model can be served. ``reasons`` say why not; empty if it can."""

    model_type: str
    reasons: tuple[str, ...]

    @property
    def supported(self) -> bool:
        return not self.reasons

    def __str__(self) -> str:
        verdict = "supported" if self.supported else "not supported: " + "; ".join(self.reasons)
        return f"{self.model_type}: {verdict}"


def check_support(model: PreTrainedModel | PreTrainedConfig) -> SupportReport:
    """Look at a model, or at its config alone, for everything that a packed batch over a paged cache would break."""
    config = model.config if isinstance(model, PreTrainedModel) else model
    text = config.get_text_config()
    reasons = [*_config_reasons(config, text)]
    if isinstance(model, PreTrainedModel):
        if not getattr(model, "_supports_attention_backend", False):
            reasons.append("does not call attention through transformers' interface, so its cache cannot be paged")
        reasons += _module_reasons(model)
    return SupportReport(config.model_type, tuple(reasons))


def require_supported(model: PreTrainedModel | PreTrainedConfig) -> None:
    """Raise ValueError, naming the architecture and the reasons, unless the model can be served."""
    report = check_support(model)
    if not report.supported:
        name = type(model).__name__ if isinstance(model, PreTrainedModel) else report.model_type
        raise ValueError(f"{name} (model_type {report.model_type!r}) is not supported: {'; '.join(report.reasons)}")


def explain_support(name: str | Path | None) -> SupportReport:
    """The report for a model by name, from its config alone: nothing else is downloaded."""
    if name is None:
        from .embedded import fetch

        name = fetch()
    if str(name).endswith(".gguf"):
        from .gguf import GGUFFile
        from .gguf_llama import llama_config

        return check_support(llama_config(GGUFFile(name)))
    return check_support(AutoConfig.from_pretrained(name))


def _config_reasons(config: Any, text: Any) -> list[str]:
    reasons = []
    if getattr(config, "is_encoder_decoder", False):
        reasons.append("is an encoder-decoder: its cross-attention has no paged cache")
    if getattr(text, "is_decoder", None) is False and getattr(text, "type_vocab_size", None):
        reasons.append("is a bidirectional encoder: it has no causal KV cache")
    if getattr(text, "use_bidirectional_attention", False) in (True, "all"):
        reasons.append("attends in both directions, which a causal cache cannot serve")
    if getattr(text, "is_causal", True) is False:
        reasons.append("is not causal")
    if text.model_type in _SPECIAL_MASKS:
        reasons.append(f"{_SPECIAL_MASKS[text.model_type]}, and such a mask does not reach paged attention")
    unknown = sorted(set(getattr(text, "layer_types", None) or ()) - _KNOWN_LAYER_TYPES)
    if unknown:
        reasons.append(f"has layers of type {', '.join(unknown)}; only full and sliding-window attention can be paged")
    if getattr(text, "attention_chunk_size", None):
        reasons.append("attends in chunks, and such a mask does not reach paged attention")
    kinds = sorted(_rope_types(text) & _BATCH_DEPENDENT_ROPE)
    if kinds and _rope_can_change(text, kinds):
        reasons.append(
            f"its {kinds[0]!r} position encoding depends on the longest request in the batch, so requests would "
            "change each other"
        )
    return reasons


def _rope_types(text: Any) -> set[str]:
    """The kinds of rotary encoding that a config names, whichever way its version of transformers writes it."""
    parameters = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    tables = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return {str(table.get("rope_type", table.get("type", "default"))) for table in tables}


def _rope_can_change(text: Any, kinds: list[str]) -> bool:
    """longrope switches its factors only beyond the original length; without one it always may."""
    parameters = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    original = parameters.get("original_max_position_embeddings") or getattr(
        text, "original_max_position_embeddings", None
    )
    return kinds != ["longrope"] or not original or text.max_position_embeddings > original


def _module_reasons(model: PreTrainedModel) -> list[str]:
    """State besides the KV cache, seen in the classes of the model's own modules."""
    names = {type(module).__name__.lower() for module in model.modules()}
    own = {name for name in names if not name.startswith(("conv1d", "conv2d", "conv3d"))}  # GPT-2's Conv1D is a Linear
    marks = sorted({mark for mark in _RECURRENT_MARKS for name in own if mark in name})
    if marks:
        return [f"has recurrent layers ({', '.join(marks)}), whose state would leak from one request into the next"]
    return []
