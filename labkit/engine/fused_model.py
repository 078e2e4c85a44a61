"""Fused layers for as long as an engine needs them."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from labkit.models import FusionReport, fuse_decoder_layers
from labkit.models.fused import AllReduce

from .attention import attend_fused


class FusedModel:
    """Swaps a model's decoder layers for fused ones that attend through the engine; :meth:`undo` puts its own back.

    A model whose layers cannot be fused stays as it is, and ``report.reason`` says why.
    """

    def __init__(self, model: PreTrainedModel, all_reduce: AllReduce | None = None) -> None:
        """``all_reduce`` is given for one rank's part of a model; :meth:`undo` does not bring its wrappers back."""
        self._base: Any = model.base_model
        self._layers = list(getattr(self._base, "layers", ()))
        self._norm = getattr(self._base, "norm", None)
        self._rotary = getattr(self._base, "rotary_emb", None)
        self._hooks = set(self._base._forward_pre_hooks)
        self.report: FusionReport = fuse_decoder_layers(model, attend_fused, all_reduce)

    def undo(self) -> None:
        """Give the model its own layers back. Their weights were views of the merged ones and stay valid."""
        if not self.report.num_fused:
            return
        for i, layer in enumerate(self._layers):
            self._base.layers[i] = layer
        self._base.norm, self._base.rotary_emb = self._norm, self._rotary
        for hook in set(self._base._forward_pre_hooks) - self._hooks:
            del self._base._forward_pre_hooks[hook]
