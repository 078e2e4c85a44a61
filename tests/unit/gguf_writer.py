"""Writes small GGUF files for tests: any tensors, or a tiny llama as llama.cpp would write it."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import torch

F32, F16, Q4_0, Q4_1, Q8_0, Q6_K, BF16 = 0, 1, 2, 3, 8, 14, 30


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> bytes:
    """Type id and value; a bool is type 7, an int u32, a float f32, a list an array of its first item's type."""
    if isinstance(value, list):
        return (
            struct.pack("<I", 9)
            + _value(value[0])[:4]
            + struct.pack("<Q", len(value))
            + b"".join(_value(item)[4:] for item in value)
        )
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    return struct.pack("<I", 8) + _string(value)


def write_gguf(
    path: Path, metadata: dict[str, Any], tensors: dict[str, tuple[int, tuple[int, ...], bytes]], version: int = 3
) -> Path:
    """tensors: name -> (type, shape as numpy counts, raw bytes)."""
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    header += b"".join(_string(key) + _value(value) for key, value in metadata.items())
    data = b""
    for name, (kind, shape, raw) in tensors.items():
        dims = struct.pack(f"<{len(shape)}Q", *reversed(shape))
        header += _string(name) + struct.pack("<I", len(shape)) + dims + struct.pack("<IQ", kind, len(data))
        data += raw + bytes(-len(raw) % 32)
    path.write_bytes(header + bytes(-len(header) % 32) + data)
    return path


LLAMA = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 48,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 5000.0,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": ["<|end|>", "Ċ", "ĊĊ", "5", "a", "Ġ", "ĠĠ", "b", "ab"],
    "tokenizer.ggml.token_type": [3, 1, 1, 1, 1, 1, 1, 1, 1],
    "tokenizer.ggml.merges": ["Ċ Ċ", "Ġ Ġ", "a b"],
    "tokenizer.ggml.eos_token_id": 0,
    "tokenizer.chat_template": "{{ messages[0]['content'] }}",
}


def as_llama_cpp_writes(model: torch.nn.Module) -> dict[str, tuple[int, tuple[int, ...], bytes]]:
    """A Llama model's tensors under llama.cpp's names, q and k rows in its order of rotated pairs."""
    renamed = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers.": "blk.",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    tensors = {}
    for name, values in model.state_dict().items():
        heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
        if heads:  # within a head, (half, pair) order becomes (pair, half) order
            values = values.reshape(heads, 2, -1, values.shape[-1]).transpose(1, 2).reshape(values.shape)
        for ours, theirs in renamed.items():
            name = name.replace(ours, theirs)
        tensors[name] = (F32, tuple(values.shape), values.contiguous().numpy().tobytes())
    return tensors
