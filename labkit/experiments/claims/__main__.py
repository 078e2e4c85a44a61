"""python -m labkit.experiments.claims --shape llama-2-7b --out claims.json      measures what the claims ask for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer

from labkit.kv_math import model_shape
from labkit.models import random_model

from ..provenance import provenance
from ..result_file import read_results, write_results
from . import measurements as m


def main(
    out: Annotated[Path, typer.Option(help="JSON file to write")],
    shape: Annotated[str, typer.Option(help="model shape, random weights")] = "llama-2-7b",
    bandwidth: Annotated[float, typer.Option(help="measured read bandwidth of the GPU, GB/s")] = 4604.0,
) -> None:
    """Measure on this GPU; figures that need none are computed anywhere. Rows of other claims in the file stay."""
    rows: list[m.Row] = read_results(out, "rows").get("rows", [])
    failed = []

    def add(name: str, measure: Callable[[], list[m.Row]]) -> None:
        try:
            new = m.timed(measure, name, typer.echo)
        except Exception as error:  # whatever it is, the others are still to come
            failed.append(name)
            typer.echo(f"{name}: not measured: {type(error).__name__}: {error}")
            return
        claims = {row["claim"] for row in new}
        rows[:] = [row for row in rows if row["claim"] not in claims] + new
        write_results(out, {"provenance": provenance(), "rows": rows})

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
    add("share of the KV cache", lambda: m.kv_share(model))
    add("decode steps", lambda: m.decode_steps(model, bandwidth * 1e9))
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
