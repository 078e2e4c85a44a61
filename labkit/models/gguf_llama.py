"""From a GGUF file of the llama architecture to what transformers needs: config, weights, tokenizer."""

from __future__ import annotations

import re

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from .gguf import GGUFFile

_LAYER_TENSORS = {
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
_TOP_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_CONTROL_TOKEN = 3


def llama_config(file: GGUFFile) -> LlamaConfig:
    """The model's config. Raises ValueError if the file holds another architecture."""
    meta = file.metadata
    architecture = meta.get("general.architecture")
    if architecture != "llama":
        raise ValueError(
            f"GGUF architecture {architecture!r} is not supported, only 'llama': load it with transformers "
            "(AutoModelForCausalLM.from_pretrained(folder, gguf_file=...)) and pass the model object"
        )
    num_heads = meta["llama.attention.head_count"]
    hidden_size = meta["llama.embedding_length"]
    return LlamaConfig(
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden_size,
        intermediate_size=meta["llama.feed_forward_length"],
        num_hidden_layers=meta["llama.block_count"],
        num_attention_heads=num_heads,
        num_key_value_heads=meta.get("llama.attention.head_count_kv", num_heads),
        head_dim=meta.get("llama.attention.key_length", hidden_size // num_heads),
        max_position_embeddings=meta["llama.context_length"],
        rms_norm_eps=meta["llama.attention.layer_norm_rms_epsilon"],
        rope_theta=meta.get("llama.rope.freq_base", 10000.0),
        tie_word_embeddings="output.weight" not in file.tensors,
        bos_token_id=meta.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=meta.get("tokenizer.ggml.eos_token_id"),
        pad_token_id=meta.get("tokenizer.ggml.padding_token_id"),
    )


def llama_weights(file: GGUFFile, config: LlamaConfig) -> dict[str, torch.Tensor]:
    """The state dict in float32, under transformers' names."""
    weights = {}
    for name in file.tensors:
        tensor = torch.from_numpy(file.tensor(name))
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
        if match is None:
            if name not in _TOP_TENSORS:
                raise ValueError(f"tensor {name!r} has no place in a Llama model")
            weights[_TOP_TENSORS[name]] = tensor
            continue
        layer, part, kind = match.groups()
        if part == "attn_q":
            tensor = _rotate_half_order(tensor, config.num_attention_heads)
        elif part == "attn_k":
            tensor = _rotate_half_order(tensor, config.num_key_value_heads)
        weights[f"model.layers.{layer}.{_LAYER_TENSORS[part]}.{kind}"] = tensor
    return weights


def _rotate_half_order(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of q or k from llama.cpp's order, where rotated pairs are neighbours, to transformers', half a head apart.

    llama.cpp:  0 0' 1 1' 2 2' ...      transformers:  0 1 2 ... 0' 1' 2' ...
    """
    pairs = weight.reshape(num_heads, -1, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)


def gguf_tokenizer(file: GGUFFile) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer from the file's vocabulary and merges.

    For SmolLM's pre-tokenizer digits are split one by one before the byte-level step, as llama.cpp does for the type
    that the file names. Raises ValueError for other kinds of tokenizer.
    """
    meta = file.metadata
    model, pre = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre", "default")
    if model != "gpt2" or pre not in ("smollm", "gpt-2", "default"):
        raise ValueError(
            f"the tokenizer of this GGUF file ({model!r}, {pre!r}) is not supported: pass tokenizer= with the name or "
            "folder of the model's own"
        )
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre == "smollm":
        byte_level = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    backend.pre_tokenizer = byte_level
    backend.decoder = decoders.ByteLevel()
    kinds = meta.get("tokenizer.ggml.token_type", [])
    special = [token for token, kind in zip(tokens, kinds, strict=False) if kind == _CONTROL_TOKEN]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])

    def named(key: str) -> str | None:
        token_id = meta.get(f"tokenizer.ggml.{key}_token_id")
        return None if token_id is None else tokens[token_id]

    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=named("bos"),
        eos_token=named("eos"),
        unk_token=named("unknown"),
        pad_token=named("padding") or named("eos"),
        model_max_length=meta["llama.context_length"],
        chat_template=meta.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
    )
