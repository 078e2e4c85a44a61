"""The `labkit` command: thin wrappers around public functions. Bad input ends with its message and exit code 2."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from labkit.experiments.commands import COMMANDS as SIMULATED
from labkit.experiments.model_commands import COMMANDS as MEASURED

INTERRUPTED = 130  # what typer exits with after Ctrl-C

app = typer.Typer(
    help="A lab about the memory of LLM inference.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
models = typer.Typer(no_args_is_help=True, help="The embedded model.")
app.add_typer(models, name="models")
bench = typer.Typer(no_args_is_help=True, help="Measure, and write what was measured with where it comes from.")
app.add_typer(bench, name="bench")
experiment = typer.Typer(no_args_is_help=True, help="Run a published experiment again.")
app.add_typer(experiment, name="experiment")
for command_name, command in (SIMULATED | MEASURED).items():
    experiment.command(command_name)(command)


@app.command()
def doctor(
    model: Annotated[
        str | None, typer.Option(help="Hub name, folder or .gguf file; the embedded one if left out.")
    ] = None,
) -> None:
    """Say what this machine has and which attention backend will run, and whether a model can be served here.

    Ends with exit code 1 if the model is refused.
    """
    from labkit.environment import env_report

    machine = env_report()
    if model is None:
        typer.echo(repr(machine))
    if machine.backend.attention == "none":  # the engine cannot be imported, and the report has said so
        raise typer.Exit(1)
    from labkit.model_report import model_report

    report = model_report(model)
    typer.echo(repr(report))
    if not report.support.supported:
        raise typer.Exit(1)


@app.command()
def run(
    prompt: Annotated[str, typer.Argument(help="The text to go on from.")],
    model: Annotated[
        str | None, typer.Option(help="Hub name, folder or .gguf file; the embedded one if left out.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample among the likeliest tokens with this much probability.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Repeats a sampled run.")] = None,
    kv_cache_dtype: Annotated[
        str, typer.Option(help="How K and V are stored: auto (as computed), fp8, fp8_e5m2, int8 or int4.")
    ] = "auto",
    trace: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Save what every step did to the block tables here.")
    ] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print the engine's statistics at the end.")] = False,
) -> None:
    """Generate from a prompt, printing the text as it comes."""
    from labkit import LLM, SamplingParams

    if trace is not None:
        trace.parent.mkdir(parents=True, exist_ok=True)  # now, not after a long run
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    llm = LLM(model, kv_cache_dtype=kv_cache_dtype)
    num_shown = 0
    for output in llm.stream(prompt, params):
        text = output.outputs[0].text
        typer.echo(text[num_shown:], nl=False)
        num_shown = len(text)
    typer.echo()
    if stats:
        typer.echo(str(llm.stats), err=True)
    if trace is not None and llm.trace is not None:
        llm.trace.save(trace)
        typer.echo(f"trace of {len(llm.trace)} steps saved to {trace}", err=True)


@app.command()
def plan(
    gpu: Annotated[str, typer.Argument(help="For example H100-SXM; a wrong name lists the known ones.")],
    model: Annotated[str, typer.Argument(help="For example Llama-3-8B; a wrong name lists the known ones.")],
    dtype: Annotated[str, typer.Option(help="Of the weights.")] = "auto",
    kv_dtype: Annotated[str, typer.Option(help="Of the KV cache; auto is that of the weights.")] = "auto",
    block_size: Annotated[
        int | None, typer.Option(help="Tokens in a block; 16 if left out, 32 for int4, whose tokens share scales.")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Tokens of a full request; the model's limit if left out.")
    ] = None,
    num_gpus: Annotated[int, typer.Option(help="GPUs that share the model by tensor parallelism.")] = 1,
    gpu_memory_utilization: Annotated[float, typer.Option(help="Share of the GPU's memory to use, in (0, 1].")] = 0.9,
) -> None:
    """Compute what fits a GPU: weights, KV pool, blocks, requests, and the fastest possible decoding."""
    from labkit import plan_capacity

    capacity = plan_capacity(
        gpu,
        model,
        dtype=dtype,
        kv_dtype=kv_dtype,
        block_size=block_size,
        max_model_len=max_model_len,
        num_gpus=num_gpus,
        gpu_memory_utilization=gpu_memory_utilization,
    )
    typer.echo(str(capacity))


@models.command()
def fetch() -> None:
    """Get the embedded model once (a download of about 90 MB) and say where it is."""
    from labkit.models import embedded

    typer.echo(str(embedded.fetch()))


@bench.command("serve")
def bench_serve_command(
    shape: Annotated[str, typer.Option(help="Random weights of a known model's shape.")] = "smollm2-135m",
    system: Annotated[
        list[str] | None,
        typer.Option(help="labkit, transformers-generate, transformers-cb or vllm; may be repeated; else labkit."),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(help="A shipped length table, such as azure_conv, or one size for all, 128x512; else lognormal."),
    ] = None,
    num_requests: Annotated[int, typer.Option(min=1, help="Requests to serve.")] = 256,
    rate: Annotated[float | None, typer.Option(help="Arrivals a second (Poisson); else all at once.")] = None,
    max_model_len: Annotated[int, typer.Option(min=2, help="Longest request.")] = 1536,
    kv_cache_dtype: Annotated[str, typer.Option(help="How labkit stores K and V: auto, fp8, int8 or int4.")] = "auto",
    tensor_parallel_size: Annotated[
        list[int] | None, typer.Option(help="GPUs that share the model; may be repeated, to compare; else 1.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file to add the rows to.")] = None,
) -> None:
    """Serve the same requests with labkit and with what transformers offers; prints tokens/s and their ratio."""
    from labkit import experiments

    def save(row: experiments.ServeRow) -> None:
        if out is not None:
            experiments.save_rows(out, [row], experiments.provenance())

    workload = (lengths, num_requests, rate, max_model_len)
    rows = []
    for size in tensor_parallel_size or [1]:
        options = {"kv_cache_dtype": kv_cache_dtype, "tensor_parallel_size": size}
        rows += experiments.bench_serve_shape(shape, system or ["labkit"], *workload, on_row=save, **options)
    typer.echo(experiments.table(rows).to_string(index=False, na_rep="not measured"))


@bench.command("kernels")
def bench_kernels_command(
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Groups of ops; an unknown name lists all.")] = None,
    tune: Annotated[
        bool, typer.Option("--tune", help="Time candidate tiles instead, and print the best for kernels/tuning.py.")
    ] = False,
) -> None:
    """What the attention kernels reach on this GPU, beside its own ceilings and the peers that are installed."""
    from labkit.kernels import bench as kernel_bench

    if tune:
        from labkit.kernels import tune as kernel_tune

        kernel_tune.run(only, out)
        return
    kernel_bench.run(only, out=out)


def main() -> None:
    """Entry point of the console script."""
    try:
        app()
    except (ValueError, TypeError, NotImplementedError, RuntimeError, OSError, ImportError) as error:
        typer.echo(f"labkit: {error}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:  # before typer listens
        typer.echo("labkit: interrupted", err=True)
        sys.exit(INTERRUPTED)
    except SystemExit as end:
        if end.code == INTERRUPTED:
            typer.echo("labkit: interrupted", err=True)
        raise


if __name__ == "__main__":
    main()
