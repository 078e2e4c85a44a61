"""Checkpoints of a training run: safetensors and JSON, no pickle files; a complete one or none.

folder/step-00000200/   model.safetensors  optimizer.safetensors  state.json (written last)
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel


def save(
    folder: Path,
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    settings: dict[str, Any],
    losses: list[float],
) -> Path:
    """Write a checkpoint after ``len(losses)`` steps; older ones in ``folder`` go once it is complete."""
    final = folder / f"step-{len(losses):08d}"
    partial = final.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    moments = {
        f"{name}.{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }
    save_file({name: parameter.data for name, parameter in model.named_parameters()}, partial / "model.safetensors")
    save_file(moments, partial / "optimizer.safetensors")
    (partial / "state.json").write_text(json.dumps({"settings": settings, "losses": losses}))
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    for other in folder.glob("step-*"):
        if other != final:
            shutil.rmtree(other)
    return final


def load(
    folder: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer, settings: dict[str, Any]
) -> list[float]:
    """Put the newest checkpoint of ``folder`` into model and optimizer; the losses of the steps it has behind it.

    [] if there is none. Raises ValueError, naming what differs, for a checkpoint of other settings.
    """
    complete = sorted(path for path in folder.glob("step-*") if path.suffix != ".partial")
    if not complete:
        return []
    newest = complete[-1]
    state = json.loads((newest / "state.json").read_text())
    if state["settings"] != settings:
        differing = [
            f"{key} is {settings.get(key)!r}, there {state['settings'].get(key)!r}"
            for key in settings | state["settings"]
            if settings.get(key) != state["settings"].get(key)
        ]
        raise ValueError(f"checkpoint {newest} is of a run with other settings: {'; '.join(differing)}")
    device = str(model.device)
    weights = load_file(newest / "model.safetensors", device=device)
    moments = load_file(newest / "optimizer.safetensors", device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
            keys = ("step", "exp_avg", "exp_avg_sq")
            optimizer.state[parameter] = {key: moments[f"{name}.{key}"] for key in keys}
    return state["losses"]
