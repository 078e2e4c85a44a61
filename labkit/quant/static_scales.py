"""Scales that are fixed before a run, as a safetensors file.

layers.3.key.scales   layers.3.key.zero_points   layers.3.value.scales   ...        metadata: the format of each
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from labkit.kv_math import KVFormat

from .policy import KVPolicy
from .scales import Scales

_VERSION = "1"


@dataclass(frozen=True, slots=True)
class LayerScales:
    """Scales of K and V of one layer; None where that side has none that are fixed."""

    key: Scales | None
    value: Scales | None


def save_scales(path: str | Path, scales: Mapping[int, LayerScales], policy: KVPolicy) -> None:
    """Write the scales of every layer, 0 to len(scales) - 1, measured for ``policy``.

    Raises ValueError if layers are missing, or if scales are there where the format has none that are fixed
    (``tokens="layer"``), or the other way round.
    """
    num_layers = len(scales)
    if sorted(scales) != list(range(num_layers)) or not num_layers:
        raise ValueError(f"scales must have the layers 0 to n - 1, got {sorted(scales)}")
    tensors: dict[str, torch.Tensor] = {}
    for name, format in _formats(policy, num_layers).items():
        _, layer, side = name.split(".")
        stored: Scales | None = getattr(scales[int(layer)], side)
        if (stored is not None) != (format.scales is not None and format.scales.tokens == "layer"):
            raise ValueError(f"scales of {name} must be given if and only if its format has fixed ones: {format}")
        if stored is not None:
            tensors[f"{name}.scales"] = stored.scales.clone()
            if stored.zero_points is not None:
                tensors[f"{name}.zero_points"] = stored.zero_points.clone()
    formats = {name: str(format) for name, format in _formats(policy, num_layers).items()}
    metadata = {"version": _VERSION, "formats": json.dumps(formats), "rotate": json.dumps(policy.rotate)}
    save_file(tensors, path, metadata=metadata)


def load_scales(path: str | Path, policy: KVPolicy) -> dict[int, LayerScales]:
    """The scales of every layer, by number.

    Raises ValueError if the file is no scales file, or was measured for another policy; OSError if it cannot be read.
    """
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        if metadata.get("version") != _VERSION:
            raise ValueError(f"{path} is not a file of scales of version {_VERSION}")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    measured_for = json.loads(metadata["formats"])
    num_layers = len(measured_for) // 2
    for name, format in _formats(policy, num_layers).items():
        if measured_for[name] != str(format):
            raise ValueError(f"{path} was measured for {name} as {measured_for[name]}, not as {format}")
    if json.loads(metadata["rotate"]) != policy.rotate:
        raise ValueError(f"{path} was measured with rotate={not policy.rotate}, not {policy.rotate}")

    def side(name: str) -> Scales | None:
        found = tensors.get(f"{name}.scales")
        return None if found is None else Scales(found, tensors.get(f"{name}.zero_points"))

    return {n: LayerScales(side(f"layers.{n}.key"), side(f"layers.{n}.value")) for n in range(num_layers)}


def _formats(policy: KVPolicy, num_layers: int) -> dict[str, KVFormat]:
    """Format by "layers.3.key", "layers.3.value" and so on."""
    named = {}
    for layer in range(num_layers):
        named[f"layers.{layer}.key"], named[f"layers.{layer}.value"] = policy.formats(layer, num_layers)
    return named
