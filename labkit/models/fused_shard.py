"""A rank's decoder layers as plain ones, so that they can be fused."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.distributed.tensor import DTensor


class LocalLayers:
    """The layers of a model that transformers cut, with the wrappers taken off: what remains is this rank's part.

    transformers keeps cut weights as DTensors and replaces each projection's forward, to all-reduce after o_proj and
    down_proj. Without that a layer computes a part of the sum only, and its caller must all-reduce: fused layers do.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self._forwards: list[tuple[nn.Module, object]] = []
        self._parameters: list[tuple[nn.Module, str, nn.Parameter]] = []
        for layer in layers:
            for module in layer.modules():
                if "forward" in vars(module):
                    self._forwards.append((module, vars(module).pop("forward")))
                for name, parameter in module._parameters.items():
                    if isinstance(parameter, DTensor):
                        self._parameters.append((module, name, parameter))
                        module._parameters[name] = nn.Parameter(parameter.to_local(), requires_grad=False)

    def restore(self) -> None:
        """Put the wrappers back; only before the layers are fused, which moves the weights."""
        for module, forward in self._forwards:
            module.forward = forward  # type: ignore[method-assign]
        for module, name, parameter in self._parameters:
            module._parameters[name] = parameter
