"""The quantisation microscope: one tile of K or V, its codes in a format, and what is lost."""

from __future__ import annotations

import struct
import zlib
from base64 import b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets
import numpy as np
import torch
import traitlets

from labkit.kv_math import PER_CHANNEL, PER_TOKEN_HEAD, KVFormat, ScaleLayout
from labkit.quant import dequantise, hadamard, quantise, unpack_int4

FORMATS: dict[str, KVFormat] = {
    "int8, a scale a token": KVFormat("int8", PER_TOKEN_HEAD),
    "int4 symmetric, a scale a token": KVFormat("int4", ScaleLayout(tokens=1, scale_bits=16)),
    "int4 with offset, a scale a token": KVFormat("int4", ScaleLayout(tokens=1, scale_bits=16, zero_point_bits=16)),
    "int4 with offset, a scale for 32 channels": KVFormat(
        "int4", ScaleLayout(tokens=1, channels=32, scale_bits=16, zero_point_bits=16)
    ),
    "int4 with offset, a scale a channel": KVFormat(
        "int4", ScaleLayout(tokens="block", channels=1, scale_bits=16, zero_point_bits=16)
    ),
    "fp8 e4m3": KVFormat("fp8_e4m3"),
    "int8, a scale a channel": KVFormat("int8", PER_CHANNEL),
}


class _Tile(anywidget.AnyWidget):
    """Three pictures of a tile; all traits change in one message."""

    _esm = Path(__file__).with_name("quant_microscope.js")

    shape = traitlets.List(traitlets.Int(), [1, 1]).tag(sync=True)
    values = traitlets.Bytes(b"\0\0\0\0").tag(sync=True)
    codes = traitlets.Bytes(b"\0\0\0\0").tag(sync=True)
    errors = traitlets.Bytes(b"\0\0\0\0").tag(sync=True)
    summary = traitlets.Unicode("").tag(sync=True)


class QuantMicroscope(ipywidgets.VBox):
    """Menus for tile, format and rotation above the three pictures.

    ``tiles`` are [num_tokens, head_dim] by name: a block of one head. ``relative_error`` is that of what is shown.
    """

    relative_error: float

    def __init__(self, tiles: Mapping[str, torch.Tensor], *, format: str = "int4 symmetric, a scale a token") -> None:
        """Raises ValueError if there is no tile, one is not [num_tokens, head_dim], or ``format`` is unknown."""
        for name, tile in tiles.items():
            if tile.ndim != 2:
                raise ValueError(f"tiles must be [num_tokens, head_dim], {name!r} has shape {tuple(tile.shape)}")
        if not tiles:
            raise ValueError("tiles must hold at least one, got none")
        if format not in FORMATS:
            raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {format!r}")
        self._tiles = {name: tile.detach().float().cpu() for name, tile in tiles.items()}
        wide: dict[str, Any] = dict(layout=ipywidgets.Layout(width="380px"), style={"description_width": "60px"})
        self.tile: Any = ipywidgets.Dropdown(options=list(tiles), description="tile", **wide)
        self.format: Any = ipywidgets.Dropdown(options=list(FORMATS), value=format, description="format", **wide)
        self.rotate: Any = ipywidgets.Checkbox(False, description="rotate (Hadamard)", indent=False)
        self._picture = _Tile()
        for control in (self.tile, self.format, self.rotate):
            control.observe(self._update, "value")
        menus = ipywidgets.Box(
            [self.tile, self.format, self.rotate], layout=ipywidgets.Layout(flex_flow="row wrap", grid_gap="2px 12px")
        )
        super().__init__([menus, self._picture])
        self._update(None)

    def _update(self, _change: Any) -> None:
        tile, format = self._tiles[self.tile.value], FORMATS[self.format.value]
        if self.rotate.value:
            tile = tile @ hadamard(tile.shape[1])
        stored = quantise(tile[:, None], format, block_size=tile.shape[0])
        codes = unpack_int4(stored.codes, tile.shape[1]) if format.dtype == "int4" else stored.codes
        codes = codes.float()
        if format.dtype == "int4" and format.scales and not format.scales.zero_point_bits:
            codes -= 8  # nibbles are unsigned, and 8 stands for 0: shown with their sign, as int8 is
        error = tile - dequantise(stored)[:, 0]
        self.relative_error = float(error.norm() / tile.norm().clamp_min(1e-30))
        bits = 8 * stored.num_bytes / tile.numel()
        with self._picture.hold_sync():
            self._picture.shape = list(tile.shape)
            self._picture.values = tile.numpy().tobytes()
            self._picture.codes = codes[:, 0].numpy().tobytes()
            self._picture.errors = error.numpy().tobytes()
            self._picture.summary = (
                f"{bits:.2f} bits a value, scales included; relative error {self.relative_error:.2%}"
            )

    def __repr__(self) -> str:
        return f"QuantMicroscope({self.tile.value}, {self.format.value}): {self._picture.summary}"

    def to_png(self) -> bytes:
        """A still picture: values, codes and errors side by side, 4 pixels a cell, in the colours of the widget."""
        picture = self._picture
        panels = []
        for data, end in ((picture.values, None), (picture.codes, None), (picture.errors, (213, 94, 0))):
            panel = _shades(np.frombuffer(data, np.float32).reshape(picture.shape), end)
            panels += [panel.repeat(4, 0).repeat(4, 1), np.full((4 * len(panel), 12, 3), 255, np.uint8)]
        return _png(np.concatenate(panels[:-1], axis=1))

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """With a picture and a line of text beside the widget, for pages that run no kernel."""
        bundle = super()._repr_mimebundle_(**kwargs)
        return bundle and bundle | {"text/plain": repr(self), "image/png": b64encode(self.to_png()).decode()}


def _shades(cells: np.ndarray, end: tuple[int, int, int] | None) -> np.ndarray:
    """uint8 RGB of cells: from white at 0 to ``end`` at the largest; None: blue below 0, orange above."""
    share = np.abs(cells) / max(np.abs(cells).max(), 1e-30)
    ends = np.where(cells[..., None] < 0, (0, 114, 178), (230, 159, 0)) if end is None else np.array(end)
    return np.rint(255 + (ends - 255) * share[..., None]).astype(np.uint8)


def _png(pixels: np.ndarray) -> bytes:
    """uint8 [height, width, 3] as a PNG file: signature, header, one compressed chunk, end."""
    height, width, _ = pixels.shape
    rows = np.pad(pixels.reshape(height, -1), ((0, 0), (1, 0)))  # each row begins with its filter: 0, none

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(rows.tobytes())) + chunk(b"IEND", b"")
