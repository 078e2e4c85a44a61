"""A rank's shard of the model, cut by transformers' own plan."""

from __future__ import annotations

import inspect

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from labkit.models import random_model
from labkit.models.quiet import quiet_transformers

from .source import WeightsSource


def load_shard(source: WeightsSource, size: int, device: torch.device) -> PreTrainedModel:
    """The model on ``device``, its projections cut for this rank of ``size``; torch.distributed is running.

    Each rank loads the weights whole (a folder's into host memory, random ones onto the device, where the same seed
    makes the same everywhere), then keeps its part. transformers wraps the parts as DTensors and puts the all-reduces
    into the forward pass.
    """
    with quiet_transformers():
        if source.random_seed is None:
            model = AutoModelForCausalLM.from_pretrained(
                source.folder,
                dtype=source.dtype or "auto",
                use_safetensors=True,
                trust_remote_code=source.trust_remote_code,
            )
        else:
            config = AutoConfig.from_pretrained(source.folder)
            model = random_model(config, dtype=source.dtype or "auto", device=device, seed=source.random_seed)
    if size > 1:
        with torch.no_grad():
            _cut(model, size, device)
    model = model.to(device).eval()  # type: ignore[arg-type]  # what is not cut
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return model


def _cut(model: PreTrainedModel, size: int, device: torch.device) -> None:
    """Replace every weight that transformers' plan shards by this rank's part, as :func:`from_pretrained` would."""
    mesh = init_device_mesh(device.type, (size,), mesh_dim_names=("tp",))
    tied = _untie(model)
    if "tp_plan" in inspect.signature(apply_tensor_parallelism).parameters:
        plan, _, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=size))
        apply_tensor_parallelism(model, mesh, plan)
    else:  # transformers 5.17 finds the plan itself
        apply_tensor_parallelism(model, mesh)  # type: ignore[call-arg]
    for name, original in tied.items():
        part, same = model.get_parameter(name), model.get_parameter(original)
        if isinstance(part, DTensor) == isinstance(same, DTensor) and part.shape == same.shape:
            _set_parameter(model, name, same)  # cut alike: once is enough


def _untie(model: PreTrainedModel) -> dict[str, str]:
    """Give a weight of two names a parameter for each, over the same memory, since the plan goes by names."""
    once = dict(model.named_parameters())
    names = {id(parameter): name for name, parameter in once.items()}
    tied = {name: names[id(p)] for name, p in model.named_parameters(remove_duplicate=False) if name not in once}
    for name, original in tied.items():
        _set_parameter(model, name, nn.Parameter(once[original].data, requires_grad=False))
    return tied


def _set_parameter(model: PreTrainedModel, name: str, parameter: nn.Parameter) -> None:
    module, _, attribute = name.rpartition(".")
    model.get_submodule(module)._parameters[attribute] = parameter
