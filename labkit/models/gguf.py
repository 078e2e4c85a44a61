"""Reading GGUF files (version 3): metadata, dequantised tensors, and a Llama model and tokenizer made from them.

Layout of a file, all little-endian:

    "GGUF" | version u32 | number of tensors u64 | number of metadata u64
    metadata:     key, type u32, value                         strings are a length u64 and UTF-8 bytes
    tensor infos: name, number of dims u32, dims u64 (innermost first), type u32, offset u64
    padding to general.alignment | tensor data

Source: the GGUF specification in ggml's docs/gguf.md; block formats in ggml's ggml-common.h.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_BLOCK = 32  # weights that share a scale


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies; ``shape`` outermost first, as numpy has it."""

    shape: tuple[int, ...]
    kind: int
    start: int

    @property
    def num_values(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


class GGUFFile:
    """An open GGUF file: ``metadata`` by key, ``tensors`` by name, and their values on request."""

    def __init__(self, path: str | Path) -> None:
        """Read the header. Raises ValueError if ``path`` is no GGUF file of version 3, or is cut off."""
        with open(path, "rb") as file:
            try:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError as error:
                raise ValueError(f"{path} is empty") from error
        self._position = 0
        if self._data[:4] != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file")
        self._position = 4
        try:
            version, num_tensors, num_metadata = self._unpack("IQQ")
            if version != 3:
                raise ValueError(f"{path} is GGUF version {version}; version 3 is supported")
            self.metadata: dict[str, Any] = {}
            for _ in range(num_metadata):
                key = self._string()
                self.metadata[key] = self._value(self._unpack("I")[0])
            infos = [self._tensor_info() for _ in range(num_tensors)]
        except struct.error as error:
            raise ValueError(f"{path} is cut off in its header") from error
        alignment = self.metadata.get("general.alignment", 32)
        data_start = -(-self._position // alignment) * alignment
        self.tensors = {name: TensorInfo(shape, kind, data_start + offset) for name, shape, kind, offset in infos}

    def tensor(self, name: str) -> np.ndarray:
        """A tensor's values as float32 (a copy). Raises ValueError for a format that is not supported."""
        info = self.tensors[name]
        if info.kind not in _FORMATS:
            known = ", ".join(fmt.name for fmt in _FORMATS.values())
            raise ValueError(f"tensor {name!r} has GGUF type {info.kind}, which is not supported; supported: {known}")
        fmt = _FORMATS[info.kind]
        num_bytes = info.num_values // fmt.values_per_block * fmt.bytes_per_block
        raw = np.frombuffer(self._data, dtype=np.uint8, count=num_bytes, offset=info.start)
        return fmt.dequantise(raw).reshape(info.shape)

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + layout, self._data, self._position)
        self._position += struct.calcsize("<" + layout)
        return values

    def _string(self) -> str:
        (length,) = self._unpack("Q")
        start = self._position
        self._position += length
        return self._data[start : self._position].decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item_kind, count = self._unpack("IQ")
            if item_kind in _SCALARS:
                return list(self._unpack(f"{count}{_SCALARS[item_kind]}"))
            return [self._value(item_kind) for _ in range(count)]
        return self._unpack(_SCALARS[kind])[0]

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (num_dims,) = self._unpack("I")
        dims = self._unpack(f"{num_dims}Q")
        kind, offset = self._unpack("IQ")
        return name, tuple(reversed(dims)), kind, offset


@dataclass(frozen=True, slots=True)
class _Format:
    name: str
    values_per_block: int
    bytes_per_block: int
    dequantise: Callable[[np.ndarray], np.ndarray]


def _scales(blocks: np.ndarray, start: int) -> np.ndarray:
    """The float16 at byte ``start`` of every block, as a column of float32."""
    return blocks[:, start : start + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """[blocks, 16] bytes to [blocks, 32] numbers 0..15: all low halves first, then all high halves."""
    return np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float32)


def _bf16(raw: np.ndarray) -> np.ndarray:
    return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _q4_0(raw: np.ndarray) -> np.ndarray:
    """scale f16, 16 bytes of nibbles: scale * (q - 8)."""
    blocks = raw.reshape(-1, 18)
    return _scales(blocks, 0) * (_nibbles(blocks[:, 2:]) - 8)


def _q4_1(raw: np.ndarray) -> np.ndarray:
    """scale f16, minimum f16, 16 bytes of nibbles: scale * q + minimum."""
    blocks = raw.reshape(-1, 20)
    return _scales(blocks, 0) * _nibbles(blocks[:, 4:]) + _scales(blocks, 2)


def _q8_0(raw: np.ndarray) -> np.ndarray:
    """scale f16, 32 signed bytes: scale * q."""
    blocks = raw.reshape(-1, 34)
    return _scales(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


_FORMATS = {
    0: _Format("F32", 1, 4, lambda raw: raw.view(np.float32).copy()),
    1: _Format("F16", 1, 2, lambda raw: raw.view(np.float16).astype(np.float32)),
    2: _Format("Q4_0", _BLOCK, 18, _q4_0),
    3: _Format("Q4_1", _BLOCK, 20, _q4_1),
    8: _Format("Q8_0", _BLOCK, 34, _q8_0),
    30: _Format("BF16", 1, 2, _bf16),
}
