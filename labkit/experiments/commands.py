"""Commands of ``labkit experiment`` that need no model: thin wrappers around the simulated experiments."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from .result_file import read_results


def results_file(path: Path | None) -> Path | None:
    """What --out may name: no file yet, or one of results. Nothing else is overwritten, and nothing runs in vain."""
    if path is not None:
        read_results(path)
    return path


Out = Annotated[
    Path | None,
    typer.Option(dir_okay=False, callback=results_file, help="JSON file to write rows and their provenance to."),
]
Folder = Annotated[Path | None, typer.Option(help="Keep each finished run here, to go on from.")]
Workers = Annotated[int | None, typer.Option(help="Local processes; as many as there are cores if left out.")]


def simulate_command(
    trace: Annotated[str, typer.Option(help="A trace file (Azure, Mooncake, BurstGPT, Vidur) or a shipped table.")],
    model: Annotated[str, typer.Option(help="A model shape.")] = "mistral-7b",
    requests: Annotated[int | None, typer.Option(help="Only the first so many.")] = None,
    speed_up: Annotated[float, typer.Option(help="Arrivals come so many times as fast.")] = 1.0,
    kv_dtype: Annotated[str, typer.Option(help="Of the KV cache.")] = "auto",
    block_size: Annotated[int, typer.Option(help="Tokens in a block.")] = 16,
    max_num_seqs: Annotated[int, typer.Option(help="Most requests that run at once.")] = 256,
    out: Out = None,
) -> None:
    """Serve a trace with the real scheduler and allocator on a simulated H200."""
    from .simulated_serving import simulated_serving

    row = simulated_serving(
        workload=trace,
        model=model,
        num_requests=requests,
        speed_up=speed_up,
        kv_dtype=kv_dtype,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        progress=True,
    )
    for name, value in row.items():
        typer.echo(f"{name:26} {value:,.4g}" if isinstance(value, float) else f"{name:26} {value:,}")
    _save(out, [{"workload": Path(trace).name, "model": model} | row])


def fragmentation_command(
    lengths: Annotated[
        list[str] | None, typer.Option(help="Shipped length tables; azure_conv and azure_code if left out.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests of each run.")] = 500,
    folder: Folder = None,
    workers: Workers = None,
    out: Out = None,
) -> None:
    """How much of the KV memory holds tokens: reservations and paging, at final length and over time."""
    import pandas as pd

    from .fragmentation import final_length_utilisation, fragmentation, steady_utilisation

    tables = lengths or ["azure_conv", "azure_code"]
    final = [{"lengths": name} | row for name in tables for row in final_length_utilisation(name)]
    typer.echo(f"At final length\n{_text(pd.DataFrame(final))}\n")
    over_time = fragmentation(tables, folder=folder, workers=workers, num_requests=requests)
    steady = steady_utilisation(over_time)
    typer.echo(f"Over time, while requests wait\n{_text(steady)}")
    _save(out, {"at_final_length": final, "steady": _records(steady), "over_time": _series(over_time)})


def prefix_hits_command(
    trace: Annotated[Path, typer.Argument(help="A Mooncake trace, such as conversation_trace.jsonl.")],
    pool_blocks: Annotated[list[int] | None, typer.Option(help="Pool sizes in blocks of 512 tokens.")] = None,
    out: Out = None,
) -> None:
    """How much of a trace's prompts the prefix cache finds, by the size of the pool."""
    from .prefix_hits import POOL_BLOCKS, prefix_hits, prefix_hits_table

    rows = prefix_hits(trace, pool_blocks or POOL_BLOCKS)
    typer.echo(_text(prefix_hits_table(rows)))
    _save(out, [{"trace": trace.name} | row for row in rows])


def sweep_command(
    vary: Annotated[list[str], typer.Option(help="name=value,value,...: an argument of simulated_serving; repeat.")],
    folder: Folder = None,
    workers: Workers = None,
    ray: Annotated[str | None, typer.Option(help="Address of a Ray cluster to run on instead.")] = None,
    out: Out = None,
) -> None:
    """Simulated serving for every combination of the values, such as --vary block_size=16,64 --vary speed_up=1,2."""
    from .simulated_serving import simulated_serving
    from .sweep import grid, sweep

    values = dict(map(_values, vary))
    table = sweep(simulated_serving, grid(**values), folder=folder, workers=workers, ray_address=ray)
    typer.echo(_text(table))
    _save(out, _records(table))


def simulator_command(out: Out = None) -> None:
    """The simulator's predictions beside what was recorded on an H200."""
    import pandas as pd

    from .simulator_validation import validate

    rows = validate()
    typer.echo(_text(pd.DataFrame(rows)))
    _save(out, rows)


COMMANDS: dict[str, Callable[..., None]] = {
    "simulate": simulate_command,
    "fragmentation": fragmentation_command,
    "prefix-hits": prefix_hits_command,
    "sweep": sweep_command,
    "simulator": simulator_command,
}
"""Functions by the names of their commands."""


def _values(text: str) -> tuple[str, list[Any]]:
    """("block_size", [16, 64]) of "block_size=16,64"; what is no JSON value is a string."""
    name, equals, values = text.partition("=")
    if not equals or not name or not values:
        raise ValueError(f"vary must be name=value,value,..., got {text!r}")
    return name, [_value(value) for value in values.split(",")]


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _records(table: Any) -> list[dict[str, Any]]:
    return json.loads(table.to_json(orient="records"))


def _series(table: Any) -> list[dict[str, Any]]:
    """One record a run, its samples as lists: a tenth of the size; ``DataFrame(...).explode`` undoes it."""
    samples = ["seconds", "num_running", "num_waiting", "live_of_reserved", "live_of_pool"]
    runs = table.round(4).groupby(["lengths", "allocator", "block_size"], sort=False)[samples].agg(list)
    return _records(runs.reset_index())


def _text(table: Any) -> str:
    return table.to_string(index=False, float_format="{:,.4g}".format) if len(table) else "nothing to show"


def _save(out: Path | None, rows: Sequence[dict[str, Any]] | dict[str, Any]) -> None:
    """Write rows, or tables of rows by name, as JSON with one row a line."""
    if out is None:
        return
    from .provenance import provenance
    from .result_file import replace_text

    tables = rows if isinstance(rows, dict) else {"rows": rows}
    parts = [f'"provenance": {json.dumps(provenance("cpu"))}']
    for name, table in tables.items():
        lines = ",\n  ".join(json.dumps(_rounded(row)) for row in table)
        parts.append(f'"{name}": [\n  {lines}\n ]')
    replace_text(out, "{\n " + ",\n ".join(parts) + "\n}\n")


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {name: float(f"{value:.5g}") if isinstance(value, float) else value for name, value in row.items()}
