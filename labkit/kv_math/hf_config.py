"""Reads what each layer caches from a Hugging Face config, without importing transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

_WITH_KV_CACHE = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
_WRAPPED = ("text_config", "llm_config", "language_config")


class LayerShape(NamedTuple):
    """KV heads, size of a key and size of a value in one layer."""

    num_kv_heads: int
    head_dim: int
    head_dim_v: int


def read_kv_layers(hf_config: Any) -> tuple[list[LayerShape], object]:
    """The shapes of all layers that have a KV cache of their own, and the config's dtype (None if it names none).

    Raises ValueError if the config is of a model whose layers do not all have a KV cache, or lacks a needed size.
    """
    text = _text_config(hf_config)
    _refuse_other_layers(text)
    num_layers = _need(text, "num_hidden_layers", "n_layer", "n_layers", "num_transformer_layers", "num_layers")
    num_cached = num_layers - (_get(text, "num_kv_shared_layers") or 0)  # the last ones read an earlier layer's cache
    shapes = [_layer_shape(_config_of_layer(text, i), i) for i in range(num_cached)]
    return shapes, _dtype(text) or _dtype(hf_config)


def _layer_shape(config: Any, index: int) -> LayerShape:
    def of_layer(value: Any) -> Any:
        return value[index] if isinstance(value, list | tuple) else value

    num_heads = of_layer(_need(config, "num_attention_heads", "n_head", "n_heads", "num_heads", "num_query_heads"))
    if (rope_dim := _get(config, "qk_rope_head_dim")) and _get(config, "kv_lora_rank"):
        # MLA, expanded: every head has its own key (no-position part + rotary part) and value.
        return LayerShape(num_heads, _need(config, "qk_nope_head_dim") + rope_dim, _need(config, "v_head_dim"))
    head_dim = of_layer(_get(config, "head_dim", "kv_channels"))
    if head_dim is None:
        hidden = _need(config, "hidden_size", "n_embd", "d_model", "model_dim")
        if hidden % num_heads:
            raise ValueError(
                f"{_name(config)}: hidden_size {hidden} is no multiple of {num_heads} heads, and head_dim is not given"
            )
        head_dim = hidden // num_heads
    return LayerShape(_num_kv_heads(config, of_layer, num_heads), head_dim, head_dim)


def _num_kv_heads(config: Any, of_layer: Any, num_heads: int) -> int:
    if _get(config, "multi_query_attention"):  # chatglm
        return _need(config, "multi_query_group_num")
    multi_query = _get(config, "multi_query")
    if multi_query and not _get(config, "new_decoder_architecture"):  # gpt_bigcode, falcon-7b
        return 1
    if multi_query is False:  # said outright; falcon's num_kv_heads counts only in its new architecture
        return of_layer(_get(config, "num_kv_heads") or num_heads)
    stated = _get(config, "num_key_value_heads_per_layer", "num_key_value_heads", "num_kv_heads")
    if stated is None and (attn_config := _get(config, "attn_config")) is not None:  # dbrx
        stated = _get(attn_config, "kv_n_heads")
    return num_heads if stated is None else of_layer(stated)


def _text_config(config: Any) -> Any:
    """The part of a multimodal config that describes the decoder."""
    for name in _WRAPPED:
        if (inner := _get(config, name)) is not None:
            return _text_config(inner)
    return config


def _config_of_layer(config: Any, index: int) -> Any:
    """The config of one layer, for models that let sizes differ by layer (gemma4)."""
    per_layer = _get(config, "per_layer_config")
    if per_layer is None:
        return config
    if not isinstance(config, Mapping):
        return per_layer[index]
    changes = {int(i): changed for i, changed in per_layer.items()}  # a config.json lists the differences only
    return {**config, **changes.get(index, {})}


def _refuse_other_layers(config: Any) -> None:
    if _get(config, "is_encoder_decoder"):
        raise ValueError(
            f"{_name(config)}: encoder-decoder models have a cross-attention cache, which is not counted here"
        )
    if _get(config, "cross_attention_layers"):
        raise ValueError(f"{_name(config)}: cross-attention layers have no KV cache that grows with the text")
    kinds = _get(config, "layer_types", "layers_block_type") or []
    if other := ", ".join(sorted({str(kind) for kind in kinds} - _WITH_KV_CACHE)):
        raise ValueError(f"{_name(config)}: layers of kind {other} have no KV cache that grows by the token")


def _dtype(config: Any) -> object:
    if isinstance(config, Mapping):
        return _get(config, "dtype", "torch_dtype")
    return _get(config, "dtype" if hasattr(config, "dtype") else "torch_dtype")  # the old name warns where both exist


def _name(config: Any) -> str:
    return str(_get(config, "model_type") or type(config).__name__)


def _get(config: Any, *names: str) -> Any:
    """The first of ``names`` that the config has and that is not None."""
    for name in names:
        value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        if value is not None:
            return value
    return None


def _need(config: Any, *names: str) -> Any:
    value = _get(config, *names)
    if value is None:
        raise ValueError(f"{_name(config)}: the config has none of {', '.join(names)}")
    return value
