"""A small reader of GGUF files (llama.cpp's format): metadata, tensor table, and dequantisation with numpy.

    ┌────────┬─────────┬───────────┬──────────────┬──────────────┬─────┬──────────────────────┐
    │ "GGUF" │ version │ n_tensors │ n_metadata   │ tensor table │ pad │ tensor data, aligned │
    │        │ u32     │ u64, u64  │ key: value … │ name, shape… │     │                      │
    └────────┴─────────┴───────────┴──────────────┴──────────────┴─────┴──────────────────────┘

Everything is little-endian. A quantised tensor is a run of blocks of 32 weights, each block with its own scale
(and, for the `_1` types, its own minimum):

    Q8_0   f16 d           · 32 × i8 q             w = d * q
    Q4_0   f16 d           · 16 bytes, 2 q each    w = d * (q - 8)
    Q4_1   f16 d · f16 m   · 16 bytes, 2 q each    w = d * q + m

The low nibbles of the 16 bytes are weights 0..15 of the block, the high nibbles weights 16..31.

Source: the GGUF specification in ggml's docs/gguf.md.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ALIGNMENT_DEFAULT = 32
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


# ---------------------------------------------------------------- dequantisation: raw bytes -> float32


def _from_f32(raw: np.ndarray) -> np.ndarray:
    return raw.view("<f4").astype(np.float32)


def _from_f16(raw: np.ndarray) -> np.ndarray:
    return raw.view("<f2").astype(np.float32)


def _from_bf16(raw: np.ndarray) -> np.ndarray:
    return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """[blocks, 16] bytes to [blocks, 32] float32 in 0..15."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=1).astype(np.float32)


def _from_q8_0(raw: np.ndarray) -> np.ndarray:
    blocks = raw.reshape(-1, 34)
    d = _from_f16(blocks[:, :2])
    return d * blocks[:, 2:].view(np.int8).astype(np.float32)


def _from_q4_0(raw: np.ndarray) -> np.ndarray:
    blocks = raw.reshape(-1, 18)
    d = _from_f16(blocks[:, :2])
    return d * (_nibbles(blocks[:, 2:]) - 8)


def _from_q4_1(raw: np.ndarray) -> np.ndarray:
    blocks = raw.reshape(-1, 20)
    d, m = _from_f16(blocks[:, :2]), _from_f16(blocks[:, 2:4])
    return d * _nibbles(blocks[:, 4:]) + m


@dataclass(frozen=True, slots=True)
class _TensorType:
    name: str
    block_weights: int
    block_bytes: int
    dequantize: Callable[[np.ndarray], np.ndarray]


_TENSOR_TYPES = {
    0: _TensorType("F32", 1, 4, _from_f32),
    1: _TensorType("F16", 1, 2, _from_f16),
    2: _TensorType("Q4_0", 32, 18, _from_q4_0),
    3: _TensorType("Q4_1", 32, 20, _from_q4_1),
    8: _TensorType("Q8_0", 32, 34, _from_q8_0),
    30: _TensorType("BF16", 1, 2, _from_bf16),
}

# Names only, so that a refusal can say what it met.
_OTHER_TYPE_NAMES = {
    6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K",
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


# ---------------------------------------------------------------- the file


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where a tensor lies. shape: row-major, as numpy and torch count (the file lists the fastest dimension first)."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int

    @property
    def type_name(self) -> str:
        known = _TENSOR_TYPES.get(self.type_id)
        return known.name if known else _OTHER_TYPE_NAMES.get(self.type_id, f"type {self.type_id}")


class GGUFFile:
    """An opened GGUF file: ``metadata`` by key, ``tensors`` by name; tensor data is mapped and read on request."""

    def __init__(self, path: str | Path) -> None:
        """Read the metadata and the tensor table of a file of version 2 or 3.

        Raises FileNotFoundError; ValueError if it is no GGUF file, has another version or is truncated.
        """
        self.path = Path(path)
        with self.path.open("rb") as file:
            if (size := self.path.stat().st_size) < 24:
                raise ValueError(f"{self.path.name} is not a GGUF file: it has only {size} bytes")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        cursor = _Cursor(mapped)
        if (magic := cursor.take_bytes(4)) != b"GGUF":
            raise ValueError(f"{self.path.name} is not a GGUF file: it starts with {magic!r} instead of b'GGUF'")
        if (version := cursor.take("I")) not in (2, 3):
            raise ValueError(f"{self.path.name} has GGUF version {version}; little-endian 2 and 3 can be read")
        try:
            num_tensors, num_metadata = cursor.take("Q"), cursor.take("Q")
            self.metadata: dict[str, Any] = dict(_take_key_value(cursor) for _ in range(num_metadata))
            self.tensors = {tensor.name: tensor for tensor in (_take_tensor(cursor) for _ in range(num_tensors))}
        except (struct.error, UnicodeDecodeError) as error:
            raise ValueError(f"{self.path.name} is truncated or broken near byte {cursor.position}: {error}") from error
        alignment = self.metadata.get("general.alignment", ALIGNMENT_DEFAULT)
        data_start = math.ceil(cursor.position / alignment) * alignment
        self._data = np.frombuffer(mapped, np.uint8)[data_start:]

    def dequantize(self, name: str) -> np.ndarray:
        """The tensor as float32, in the shape that torch would give it.

        Raises KeyError if there is no such tensor; ValueError naming its type if that type cannot be read, or if the
        file ends before the tensor does.
        """
        tensor = self.tensors[name]
        kind = _TENSOR_TYPES.get(tensor.type_id)
        if kind is None:
            readable = ", ".join(t.name for t in _TENSOR_TYPES.values())
            raise ValueError(
                f"{self.path.name}: tensor {name!r} has type {tensor.type_name}, which cannot be read here; "
                f"readable types: {readable}"
            )
        num_weights = math.prod(tensor.shape)
        if tensor.shape[-1] % kind.block_weights:
            raise ValueError(
                f"{self.path.name}: rows of {name!r} have {tensor.shape[-1]} weights, no multiple of "
                f"{kind.name}'s block of {kind.block_weights}"
            )
        end = tensor.offset + num_weights // kind.block_weights * kind.block_bytes
        if end > len(self._data):
            missing = end - len(self._data)
            raise ValueError(f"{self.path.name} is truncated: tensor {name!r} lacks its last {missing} bytes")
        return kind.dequantize(self._data[tensor.offset : end]).reshape(tensor.shape)


def _take_key_value(cursor: _Cursor) -> tuple[str, Any]:
    key = cursor.take_string()
    return key, cursor.take_value(cursor.take("I"))


def _take_tensor(cursor: _Cursor) -> GGUFTensor:
    name = cursor.take_string()
    num_dims = cursor.take("I")
    fastest_first = [cursor.take("Q") for _ in range(num_dims)]
    return GGUFTensor(name, tuple(reversed(fastest_first)), cursor.take("I"), cursor.take("Q"))


class _Cursor:
    """Reads little-endian values one after the other."""

    def __init__(self, buffer: mmap.mmap) -> None:
        self._buffer = buffer
        self.position = 0

    def take(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._buffer, self.position)
        self.position += struct.calcsize("<" + code)
        return value

    def take_bytes(self, count: int) -> bytes:
        if self.position + count > len(self._buffer):
            raise struct.error(f"{count} bytes wanted, {len(self._buffer) - self.position} left")
        self.position += count
        return self._buffer[self.position - count : self.position]

    def take_string(self) -> str:
        return self.take_bytes(self.take("Q")).decode("utf-8")

    def take_value(self, type_id: int) -> Any:
        if type_id == _STRING:
            return self.take_string()
        if type_id == _ARRAY:
            item_type, count = self.take("I"), self.take("Q")
            if item_type in _SCALARS:  # at once: token types and scores have an item a token
                code = _SCALARS[item_type]
                raw = self.take_bytes(count * struct.calcsize("<" + code))
                return list(struct.unpack(f"<{count}{code}", raw))
            return [self.take_value(item_type) for _ in range(count)]
        if type_id not in _SCALARS:
            raise struct.error(f"unknown metadata type {type_id}")
        return self.take(_SCALARS[type_id])
