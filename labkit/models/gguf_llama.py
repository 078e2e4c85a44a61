"""Models of llama.cpp's "llama" architecture from a GGUF file: config, weights and tokenizer for transformers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from .gguf import GGUFFile

_CONTROL, _USER_DEFINED = 3, 4  # token types that text never splits

_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


# ---------------------------------------------------------------- config


def llama_config(gguf: GGUFFile) -> LlamaConfig:
    """The transformers config of a llama-architecture file.

    Raises ValueError naming the key if the file holds another architecture or a feature that would be lost.
    """
    read = _MetadataReader(gguf)
    architecture = gguf.metadata.get("general.architecture")
    if architecture != "llama":
        raise ValueError(
            f"{gguf.path.name} holds the architecture {architecture!r}; only 'llama' files can be read here: "
            "load the model's safetensors instead"
        )
    read.refuse("split.count", unless=(0, 1), why="it is one part of several")
    read.refuse("llama.expert_count", unless=(0,), why="mixtures of experts are not read")
    read.refuse("llama.rope.scaling.type", unless=("none",), why="scaled rotary positions are not read")
    hidden_size, num_heads = read.need("llama.embedding_length"), read.need("llama.attention.head_count")
    head_dim = read.get("llama.attention.key_length", hidden_size // num_heads)
    read.refuse("llama.rope.dimension_count", unless=(head_dim,), why=f"the rotation must cover the head ({head_dim})")
    read.refuse("llama.attention.value_length", unless=(head_dim,), why=f"keys have {head_dim}")
    eos, pad = read.get("tokenizer.ggml.eos_token_id"), read.get("tokenizer.ggml.padding_token_id")
    return LlamaConfig(
        vocab_size=gguf.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden_size,
        intermediate_size=read.need("llama.feed_forward_length"),
        num_hidden_layers=read.need("llama.block_count"),
        num_attention_heads=num_heads,
        num_key_value_heads=read.get("llama.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_position_embeddings=read.need("llama.context_length"),
        rms_norm_eps=_shortest(read.need("llama.attention.layer_norm_rms_epsilon")),
        rope_parameters={"rope_type": "default", "rope_theta": read.get("llama.rope.freq_base", 10000.0)},
        attention_bias="blk.0.attn_q.bias" in gguf.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in gguf.tensors,
        tie_word_embeddings="output.weight" not in gguf.tensors,
        bos_token_id=read.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=eos,
        pad_token_id=eos if pad is None else pad,
    )


def _shortest(float32_value: float) -> float:
    """The shortest decimal with the same float32 value: 1e-05 rather than 9.999999747378752e-06."""
    return float(str(np.float32(float32_value)))


class _MetadataReader:
    def __init__(self, gguf: GGUFFile) -> None:
        self._gguf = gguf

    def get(self, key: str, default: Any = None) -> Any:
        return self._gguf.metadata.get(key, default)

    def need(self, key: str) -> Any:
        if key not in self._gguf.metadata:
            raise ValueError(f"{self._gguf.path.name} lacks the metadata key {key!r}")
        return self._gguf.metadata[key]

    def refuse(self, key: str, *, unless: tuple[Any, ...], why: str) -> None:
        value = self.get(key)
        if value is not None and value not in unless:
            raise ValueError(f"{self._gguf.path.name}: {key} is {value!r}: {why}")


# ---------------------------------------------------------------- weights


def llama_weights(gguf: GGUFFile, config: LlamaConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """(name in transformers, float32 tensor) for every tensor of the file, in its order.

    llama.cpp rotates neighbouring pairs (0, 1), (2, 3), …; transformers rotates (0, D/2), (1, D/2 + 1), …. The file's
    query and key rows are therefore permuted within each head, and are put back here.

    Raises ValueError naming a tensor that has no place in a Llama model, or whose type cannot be read.
    """
    for name in gguf.tensors:
        hf_name = _hf_name(name, gguf)
        values = gguf.dequantize(name)
        if ".attn_q." in name:
            values = _unpermute(values, config.num_attention_heads)
        elif ".attn_k." in name:
            values = _unpermute(values, config.num_key_value_heads or config.num_attention_heads)
        yield hf_name, torch.from_numpy(np.ascontiguousarray(values))


def _hf_name(name: str, gguf: GGUFFile) -> str:
    if name in _NAMES:
        return _NAMES[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in _LAYER_NAMES:
        raise ValueError(f"{gguf.path.name}: tensor {name!r} has no place in a Llama model and cannot be left out")
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"


def _unpermute(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head from (pair, half) order to (half, pair) order. values: [num_heads * head_dim, …]."""
    rows, rest = values.shape[0], values.shape[1:]
    return values.reshape(num_heads, rows // num_heads // 2, 2, *rest).swapaxes(1, 2).reshape(rows, *rest)


def llama_model(gguf: GGUFFile, dtype: torch.dtype, on_tensor: Callable[[], object] = lambda: None) -> LlamaForCausalLM:
    """The model on the CPU, in evaluation mode, its weights dequantised in float32 and then cast to ``dtype``.

    ``on_tensor`` is called after each tensor. Raises ValueError if tensors are missing, surplus or of wrong shape.
    """
    config = llama_config(gguf)
    config.dtype = dtype
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    weights = {}
    for name, values in llama_weights(gguf, config):
        weights[name] = values.to(dtype)
        on_tensor()
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise ValueError(f"{gguf.path.name}: its tensors do not make the model it describes: {error}") from error
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its frequencies are computed, not in the file
    model.generation_config = GenerationConfig.from_model_config(config)
    return model.eval()


# ---------------------------------------------------------------- tokenizer


def gguf_tokenizer(gguf: GGUFFile) -> PreTrainedTokenizerFast:
    """The byte-level BPE tokenizer that the file's metadata describes, with special tokens and chat template.

    Raises ValueError if the file's tokenizer is of another kind: pass the model's own tokenizer then.
    """
    read = _MetadataReader(gguf)
    instead = "pass tokenizer= with the folder or hub name of the model's own tokenizer"
    if (kind := read.need("tokenizer.ggml.model")) != "gpt2":
        raise ValueError(f"{gguf.path.name}: tokenizers of kind {kind!r} are not read (only byte-level BPE): {instead}")
    tokens = read.need("tokenizer.ggml.tokens")
    merges = [tuple(pair.split(" ")) for pair in read.need("tokenizer.ggml.merges")]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = _pre_tokenizer(read.get("tokenizer.ggml.pre", "default"), gguf.path, instead)
    backend.decoder = decoders.ByteLevel()
    whole = {_CONTROL: [], _USER_DEFINED: []}
    for token, token_type in zip(tokens, read.get("tokenizer.ggml.token_type", []), strict=False):
        if token_type in whole:
            whole[token_type].append(AddedToken(token, special=token_type == _CONTROL, normalized=False))
    backend.add_special_tokens(whole[_CONTROL])
    backend.add_tokens(whole[_USER_DEFINED])

    def token_of(key: str) -> str | None:
        token_id = read.get(f"tokenizer.ggml.{key}_token_id")
        return None if token_id is None else tokens[token_id]

    if read.get("tokenizer.ggml.add_bos_token", False):
        raise ValueError(f"{gguf.path.name}: tokenizers that add a first token by themselves are not read: {instead}")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=token_of("bos"),
        eos_token=token_of("eos"),
        unk_token=token_of("unknown"),
        pad_token=token_of("padding") or token_of("eos"),
        model_max_length=read.need("llama.context_length"),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = read.get("tokenizer.chat_template")
    return tokenizer


def _pre_tokenizer(name: str, path: Path, instead: str) -> pre_tokenizers.PreTokenizer:
    by_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in ("default", "gpt-2"):
        return by_words
    if name == "smollm":  # digits one by one, and so no whitespace is joined to a number
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), by_words])
    raise ValueError(f"{path.name}: the pre-tokenizer {name!r} is not known (default, gpt-2 and smollm are): {instead}")
