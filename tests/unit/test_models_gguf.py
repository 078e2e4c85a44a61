"""The GGUF reader and the Llama model and tokenizer made from a file, on small files written here."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from labkit.models.gguf import GGUFFile
from labkit.models.gguf_llama import gguf_tokenizer, llama_config, llama_model

from .gguf_writer import BF16, F16, F32, LLAMA, Q4_0, Q4_1, Q6_K, Q8_0, as_llama_cpp_writes, write_gguf


def one_tensor(folder: Path, kind: int, shape: tuple[int, ...], raw: bytes) -> np.ndarray:
    path = write_gguf(folder / "one.gguf", {"general.architecture": "llama"}, {"w": (kind, shape, raw)})
    return GGUFFile(path).dequantize("w")


# ---------------------------------------------------------------- dequantisation


def test_plain_types_keep_their_values_and_shape(tmp_path):
    values = np.array([[0.5, -2.0, 3.25], [1e-3, 65504.0, -0.0]], np.float32)
    assert np.array_equal(one_tensor(tmp_path, F32, (2, 3), values.tobytes()), values)
    half = values.astype(np.float16)
    assert np.array_equal(one_tensor(tmp_path, F16, (2, 3), half.tobytes()), half.astype(np.float32))
    brain = torch.from_numpy(values).bfloat16()
    raw = brain.view(torch.int16).numpy().tobytes()
    assert np.array_equal(one_tensor(tmp_path, BF16, (2, 3), raw), brain.float().numpy())


def test_q8_0_is_scale_times_signed_bytes(tmp_path):
    q = np.arange(-32, 32, dtype=np.int8).reshape(2, 32)
    raw = b"".join(np.float16(d).tobytes() + row.tobytes() for d, row in zip((0.5, 2.0), q, strict=True))
    expected = np.array([[0.5], [2.0]]) * q
    assert np.array_equal(one_tensor(tmp_path, Q8_0, (1, 64), raw), expected.reshape(1, 64).astype(np.float32))


@pytest.mark.parametrize(("kind", "minimum"), [(Q4_0, None), (Q4_1, -1.5)])
def test_four_bit_types_put_low_nibbles_first(tmp_path, kind, minimum):
    q = np.array([(7 * i + 3) % 16 for i in range(32)], np.uint8)
    packed = q[:16] | (q[16:] << 4)
    scales = np.float16(0.25).tobytes() + (b"" if minimum is None else np.float16(minimum).tobytes())
    expected = 0.25 * (q.astype(np.float32) - 8) if minimum is None else 0.25 * q.astype(np.float32) + minimum
    found = one_tensor(tmp_path, kind, (32,), scales + packed.tobytes())
    assert found.dtype == np.float32 and np.array_equal(found, expected)


# ---------------------------------------------------------------- what cannot be read


def test_a_type_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"'w' has type Q6_K.*F32, F16, Q4_0, Q4_1, Q8_0, BF16"):
        one_tensor(tmp_path, Q6_K, (256,), bytes(210))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a GGUF file"),
        (b"PK\x03\x04" + bytes(60), "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "little-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 5), "truncated or broken"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 60), "truncated or broken"),
    ],
)
def test_files_that_are_not_gguf_or_broken(tmp_path, content, message):
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        GGUFFile(path)


def test_a_file_that_ends_within_a_tensor(tmp_path):
    path = write_gguf(tmp_path / "cut.gguf", {}, {"w": (F32, (64,), bytes(256))})
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="truncated: tensor 'w' lacks its last 100 bytes"):
        GGUFFile(path).dequantize("w")


# ---------------------------------------------------------------- a whole model


@pytest.fixture
def reference() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=9,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        rms_norm_eps=1e-5,
    )
    return LlamaForCausalLM(config).eval()


@torch.inference_mode()
def test_a_llama_file_becomes_the_same_model(tmp_path, reference):
    path = write_gguf(tmp_path / "llama.gguf", LLAMA, as_llama_cpp_writes(reference))
    tokens = torch.arange(9)[None]
    assert torch.equal(llama_model(GGUFFile(path), torch.float32)(tokens).logits, reference(tokens).logits)


def test_the_cast_comes_after_dequantising(tmp_path, reference):
    path = write_gguf(tmp_path / "llama.gguf", LLAMA, as_llama_cpp_writes(reference))
    model = llama_model(GGUFFile(path), torch.bfloat16)
    assert torch.equal(model.lm_head.weight, reference.lm_head.weight.bfloat16())
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32  # positions lose their meaning in 16 bits


@torch.inference_mode()
def test_without_an_output_tensor_the_embeddings_are_tied(tmp_path, reference):
    tensors = as_llama_cpp_writes(reference)
    del tensors["output.weight"]
    model = llama_model(GGUFFile(write_gguf(tmp_path / "tied.gguf", LLAMA, tensors)), torch.float32)
    assert model.config.tie_word_embeddings
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_epsilon_is_a_short_decimal(tmp_path, reference):
    path = write_gguf(tmp_path / "llama.gguf", LLAMA, as_llama_cpp_writes(reference))
    assert llama_config(GGUFFile(path)).rms_norm_eps == 1e-5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "qwen2"}, "architecture 'qwen2'"),
        ({"llama.expert_count": 8}, "llama.expert_count is 8"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type is 'yarn'"),
        ({"llama.rope.dimension_count": 4}, "llama.rope.dimension_count is 4"),
        ({"split.count": 2}, "split.count is 2"),
        ({"llama.block_count": None}, "lacks the metadata key 'llama.block_count'"),
        ({"llama.block_count": 3}, "do not make the model"),
    ],
)
def test_what_would_be_lost_is_refused(tmp_path, reference, changes, message):
    metadata = {key: value for key, value in (LLAMA | changes).items() if value is not None}
    path = write_gguf(tmp_path / "other.gguf", metadata, as_llama_cpp_writes(reference))
    with pytest.raises(ValueError, match=message):
        llama_model(GGUFFile(path), torch.float32)


def test_a_surplus_tensor_is_refused(tmp_path, reference):
    tensors = as_llama_cpp_writes(reference) | {"rope_freqs.weight": (F32, (4,), bytes(16))}
    path = write_gguf(tmp_path / "scaled.gguf", LLAMA, tensors)
    with pytest.raises(ValueError, match=r"'rope_freqs.weight' has no place"):
        llama_model(GGUFFile(path), torch.float32)


# ---------------------------------------------------------------- tokenizer


def _tokenizer(folder: Path, **changes: Any):
    metadata = LLAMA | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return gguf_tokenizer(GGUFFile(write_gguf(folder / "tokenizer.gguf", metadata, {})))


def test_digits_stand_alone_so_whitespace_before_them_is_merged(tmp_path):
    tokenizer = _tokenizer(tmp_path)
    assert tokenizer.tokenize("\n\n5") == ["ĊĊ", "5"]
    assert tokenizer.tokenize("a  5") == ["a", "ĠĠ", "5"]


def test_special_tokens_are_never_split_and_ids_are_those_of_the_file(tmp_path):
    tokenizer = _tokenizer(tmp_path)
    assert tokenizer("ab<|end|>a")["input_ids"] == [8, 0, 4]
    assert tokenizer.decode([8, 0, 4], skip_special_tokens=True) == "aba"
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id) == (0, 0, None)
    assert tokenizer.model_max_length == 64
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "ab"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama"}, "kind 'llama'"),
        ({"pre": "llama-bpe"}, "pre-tokenizer 'llama-bpe'"),
        ({"add_bos_token": True}, "add a first token"),
    ],
)
def test_other_tokenizers_are_refused_with_advice(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message + r".*pass tokenizer="):
        _tokenizer(tmp_path, **changes)
