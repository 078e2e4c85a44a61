"""Commands of ``labkit experiment`` that run a model: thin wrappers around the experiments on quality and heads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from .commands import results_file

COMPLETED = typer.Option(dir_okay=False, callback=results_file, help="JSON file to complete: its rows are kept.")
WRITTEN = typer.Option(dir_okay=False, callback=results_file, help="JSON file to write.")


def quality_command(
    out: Annotated[Path, COMPLETED] = Path("quality.json"),
    num_tokens: Annotated[int, typer.Option("--tokens", min=2, help="First tokens of the shipped text.")] = 16384,
    policy: Annotated[list[str] | None, typer.Option(help="A policy by name; may be repeated; else all.")] = None,
    device: Annotated[str, typer.Option(help="cpu: about two minutes a policy; cuda: seconds.")] = "cpu",
) -> None:
    """What each KV format costs the embedded model in perplexity, by the reference quantiser in fp32."""
    from .kv_quality import quality_table
    from .recorded_quality import record_quality

    rows = record_quality(out, num_tokens=num_tokens, device=device, only=policy)
    typer.echo(quality_table(rows).to_string(index=False, float_format="{:.4f}".format))


def heads_command(
    out: Annotated[Path, COMPLETED] = Path("heads.json"),
    steps: Annotated[
        int | None, typer.Option(min=1, help="Updates of the long run; else as the device allows.")
    ] = None,
    checkpoints: Annotated[Path | None, typer.Option(help="Folder to resume interrupted training from.")] = None,
) -> None:
    """Fewer KV heads: perplexity before, after conversion, after uptraining; time and memory of a decode layer."""
    from .heads import record_heads
    from .heads_results import heads_tables

    for part, table in heads_tables(record_heads(out, long_steps=steps, checkpoints=checkpoints)).items():
        typer.echo(f"{part}\n{table.to_string(index=False, float_format='{:,.2f}'.format)}\n")


def combined_command(
    model: Annotated[
        str | None,
        typer.Option(help="A shape, with random weights; else the largest that fits, or the embedded model."),
    ] = None,
    memory_limit: Annotated[float | None, typer.Option(help="GiB for weights, KV cache and all else.")] = None,
    context: Annotated[int | None, typer.Option(help="Longest request; else 4096 on a GPU, 256 on a CPU.")] = None,
    lengths: Annotated[
        list[str] | None,
        typer.Option(help="full, or a shipped length table; may be repeated; else full and azure_conv."),
    ] = None,
    rung: Annotated[list[str] | None, typer.Option(help="A rung by name; may be repeated; else all.")] = None,
    window: Annotated[
        float | None, typer.Option(help="Seconds measured (static batches: whole ones); else 10 on a GPU, 2 on a CPU.")
    ] = None,
    out: Annotated[Path | None, COMPLETED] = None,
) -> None:
    """Paging, continuous batching, fewer KV heads, fewer bits: requests at once and tokens/s, rung by rung."""
    from .combined_ladder import combined
    from .combined_report import effects, shown_ladder, whole_ladders
    from .combined_traffic import LENGTHS
    from .result_file import read_results

    rows = combined(
        model, memory_limit, context=context, lengths=lengths or LENGTHS, rungs=rung, window=window, out=out
    )
    whole = rows if out is None else whole_ladders(rows, read_results(out, "rows")["rows"])
    typer.echo(shown_ladder(whole).to_string(index=False, float_format="{:,.3g}".format))
    if len(products := effects(whole)):
        typer.echo(products.to_string(index=False, float_format="{:.2f}".format))
    for name, lengths_of, why in rows[["rung", "lengths", "not_measured"]].dropna().itertuples(index=False):
        typer.echo(f"{name}, {lengths_of}: not measured: {why}")


def sensitivity_command(
    out: Annotated[Path, WRITTEN] = Path("kv_sensitivity.json"),
    format: Annotated[list[str] | None, typer.Option(help="A KV format by name; may be repeated; else int4.")] = None,
    num_tokens: Annotated[int, typer.Option("--tokens", min=2, help="First tokens of the shipped text.")] = 4096,
    device: Annotated[str, typer.Option(help="cpu: some minutes; cuda: seconds.")] = "cpu",
) -> None:
    """What the embedded model loses when one layer's K and V alone are quantised, layer by layer."""
    from .recorded_kv_tables import record_sensitivity

    _print_rows(
        record_sensitivity(out, format or ["int4"], num_tokens=num_tokens, device=device),
        ["format", "layer", "delta_ppl_percent", "dnll", "dnll_se"],
    )


def failures_command(
    out: Annotated[Path, WRITTEN] = Path("kv_failures.json"),
    num_tokens: Annotated[int, typer.Option("--tokens", min=2, help="First tokens of the shipped text.")] = 2048,
    device: Annotated[str, typer.Option(help="cpu: some minutes; cuda: seconds.")] = "cpu",
) -> None:
    """Where a coarse K fails: channels that stick out, and a bias of k_proj that shifts them."""
    from .recorded_kv_tables import record_failures

    tables = record_failures(out, num_tokens=num_tokens, device=device)
    _print_rows(tables["keys"], ["case", "policy", "key_error", "score_error"])
    _print_rows(tables["key_bias"], ["key_bias", "policy", "ppl", "dnll", "dnll_se"])


def fp8_command(
    out: Annotated[Path, WRITTEN] = Path("fp8_ablation.json"),
    num_tokens: Annotated[int, typer.Option("--tokens", min=2, help="First tokens of the shipped text.")] = 16384,
    device: Annotated[str, typer.Option(help="Without fp8 tensor cores the rows are emulated, and say so.")] = "cpu",
) -> None:
    """fp8 weights, an fp8 KV cache, both: perplexity and bytes of the embedded model."""
    from .recorded_kv_tables import record_fp8

    columns = ["weights", "kv_cache", "weights_bytes", "kv_bytes_per_token", "ppl", "dnll", "dnll_se"]
    _print_rows(record_fp8(out, num_tokens=num_tokens, device=device), columns)


def engine_quality_command(
    out: Annotated[Path, WRITTEN] = Path("engine_quality.json"),
    kv_dtype: Annotated[list[str] | None, typer.Option(help="As LLM takes it; else int8 and int4.")] = None,
    num_tokens: Annotated[int, typer.Option("--tokens", min=2, help="First tokens of the shipped text.")] = 16384,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """What the engine itself loses with a quantised KV cache: its pages, its kernels, in fp32."""
    from .recorded_kv_tables import record_engine_quality

    rows = record_engine_quality(out, kv_dtype or ["int8", "int4"], num_tokens=num_tokens, device=device)
    _print_rows(rows, ["kv_cache_dtype", "attention_backend", "bytes_per_token", "ppl", "dnll", "dnll_se"])


def calibrate_command(
    out: Annotated[
        Path, typer.Argument(dir_okay=False, help="safetensors file to write; labkit.quant.load_scales reads it.")
    ],
    text: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="Text that stands for what will be served.")],
    model: Annotated[
        str | None, typer.Option(help="Hub name, folder or .gguf file; the embedded one if left out.")
    ] = None,
    kv_dtype: Annotated[str, typer.Option(help="fp8, fp8_e5m2 or int8.")] = "fp8",
    per_head: Annotated[bool, typer.Option("--per-head", help="One scale a KV head instead of one a layer.")] = False,
    num_tokens: Annotated[int, typer.Option("--tokens", min=2, help="First tokens of the text.")] = 8192,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; what there is if left out.")] = None,
) -> None:
    """Measure the scales of K and V that are fixed before a run, on a text."""
    from .calibration import calibrate_to_file

    policy = calibrate_to_file(out, text, model, kv_dtype, per_head=per_head, num_tokens=num_tokens, device=device)
    typer.echo(f"scales for {policy} saved to {out}")


COMMANDS: dict[str, Callable[..., None]] = {
    "quality": quality_command,
    "heads": heads_command,
    "combined": combined_command,
    "sensitivity": sensitivity_command,
    "failures": failures_command,
    "fp8": fp8_command,
    "engine-quality": engine_quality_command,
    "calibrate": calibrate_command,
}
"""Functions by the names of their commands."""


def _print_rows(rows: list[dict[str, Any]], columns: list[str]) -> None:
    from pandas import DataFrame

    typer.echo(DataFrame(rows)[columns].to_string(index=False, float_format="%.4f"))
