"""python -m labkit.experiments.claims --shape llama-2-7b --out claims.json      measures what the claims ask for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer

from labkit.kv_math import model_shape
from labkit.models import random_model

from ..provenance import provenance
from . import measurements as m


def main(
    out: Annotated[Path, typer.Option(help="JSON file to write")],
    shape: Annotated[str, typer.Option(help="model shape, random weights")] = "llama-2-7b",
    bandwidth: Annotated[float, typer.Option(help="measured read bandwidth of the GPU, GB/s")] = 4604.0,
) -> None:
    """Measure on this GPU; figures that need none are computed anywhere."""
    rows: list[m.Row] = []

    def add(name: str, measure) -> None:
        rows.extend(m.timed(measure, name, typer.echo))
        out.write_text(json.dumps({"provenance": provenance(), "rows": rows}, indent=1), encoding="utf-8")

    add("FLOPs by KV heads", m.attention_flops)
    add("gain by spread of lengths", m.gain_by_spread)
    if not torch.cuda.is_available():
        typer.echo("no CUDA device: times and memory of a GPU were not measured")
        return
    device = torch.device("cuda")
    add("pool of the 13B", lambda: m.pool_allocation(model_shape("llama-2-13b"), 2048 * 32, device))
    add("joined or paged", lambda: m.joined_against_paged(40, 128, 32, 2048, device))
    model = random_model(shape, device=device)
    add("caches of transformers", lambda: m.cache_peaks(model, [128, 256, 512, 1024] * 2, 32))
    add("activations", lambda: m.activation_peaks(model, [512, 2048, 8192, 16384]))
    add("decode steps", lambda: m.decode_steps(model, bandwidth * 1e9))


if __name__ == "__main__":
    typer.run(main)
