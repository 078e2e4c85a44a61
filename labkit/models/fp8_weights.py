"""Weights in fp8 by torchao: half the bytes to keep and to read. This is not the fp8 KV cache.

                      what is rounded                            when            argument of LLM
    weights           the projections of every decoder layer,    once, at load   quantization="fp8"
                      and their inputs on the way in             every call
    KV cache          K and V of every token                     every write     kv_cache_dtype="fp8"

Each row of a weight and each token of its input have one scale; the product runs on fp8 tensor cores. Embeddings, LM
head, norms and the KV cache stay as they are. Either works without the other, and
:func:`labkit.experiments.fp8_quality.fp8_ablation` measures what each costs.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

_MULTIPLE = 16  # what fp8 matrix products ask of both sizes of a weight


def require_fp8_weights(device: torch.device, dtype: torch.dtype | None) -> None:
    """Raise ValueError, naming the device and what to do, where fp8 weights cannot run; ImportError without torchao.

    ``dtype`` of the model, None if its checkpoint says.
    """
    argument = "quantization='fp8' needs a GPU with fp8 tensor cores (sm_89 or newer)"
    advice = "leave it out, or make the KV cache smaller instead: kv_cache_dtype='int8'"
    if device.type != "cuda":
        raise ValueError(f"{argument}, the model would run on the {device.type.upper()}: {advice}")
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        raise ValueError(f"{argument}, {torch.cuda.get_device_name(device)} is sm_{major}{minor}: {advice}")
    if dtype not in (None, torch.bfloat16):
        raise ValueError(f"quantization='fp8' needs dtype='bfloat16' for what stays unquantised, got {dtype}")
    _torchao()


def quantise_weights(model: PreTrainedModel, quantization: str = "fp8") -> int:
    """Replace the weights of the decoder layers' projections by fp8 ones, in place; returns their number.

    Raises ValueError for another ``quantization``, where fp8 cannot run (see :func:`require_fp8_weights`), and for a
    model with weights that would silently stay as they are: sizes that are no multiple of 16, experts in one tensor.
    """
    check_quantization(quantization)
    require_fp8_weights(model.device, model.dtype)
    chosen = projections(model)
    torchao = _torchao()
    config = torchao.Float8DynamicActivationFloat8WeightConfig(granularity=torchao.PerRow(), set_inductor_config=False)
    torchao.quantize_(model, config, filter_fn=lambda module, name: name in chosen)
    return len(chosen)


def check_quantization(quantization: str | None) -> None:
    """Raise ValueError unless it is None or "fp8"."""
    if quantization not in (None, "fp8"):
        raise ValueError(f"quantization must be None or 'fp8', got {quantization!r}")


def projections(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """The linear layers that are quantised, by name: all but the LM head.

    Raises ValueError for a model with weights that fp8 products cannot take.
    """
    head = model.get_output_embeddings()
    found = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head
    }
    for name, module in found.items():
        if module.in_features % _MULTIPLE or module.out_features % _MULTIPLE:
            size = f"{module.out_features} x {module.in_features}"
            raise ValueError(f"quantization='fp8' needs weights whose sizes are multiples of 16, {name} is {size}")
    for name, parameter in model.named_parameters():
        if parameter.ndim > 2:
            raise ValueError(
                f"quantization='fp8' takes linear layers only, and {name} holds {parameter.shape[0]} matrices in one "
                "tensor: such experts are not supported"
            )
    return found


def _torchao() -> Any:
    try:
        return import_module("torchao.quantization")
    except ImportError as error:
        raise ImportError("quantization='fp8' needs torchao: pip install 'kv-labkit[fp8]' (or torchao)") from error
