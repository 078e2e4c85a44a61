"""The `labkit` command: thin wrappers around public functions. Bad input ends with its message and exit code 2."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from labkit.experiments.commands import COMMANDS as SIMULATED

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
for command_name, command in SIMULATED.items():
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
    trace: Annotated[Path | None, typer.Option(help="Save what every step did to the block tables here.")] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print the engine's statistics at the end.")] = False,
) -> None:
    """Generate from a prompt, printing the text as it comes."""
    from labkit import LLM, SamplingParams

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
    num_requests: Annotated[int, typer.Option(help="Requests to serve.")] = 256,
    rate: Annotated[float | None, typer.Option(help="Arrivals a second (Poisson); else all at once.")] = None,
    max_model_len: Annotated[int, typer.Option(help="Longest request.")] = 1536,
    kv_cache_dtype: Annotated[str, typer.Option(help="How labkit stores K and V: auto, fp8, int8 or int4.")] = "auto",
    tensor_parallel_size: Annotated[
        list[int] | None, typer.Option(help="GPUs that share the model; may be repeated, to compare; else 1.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file to add the rows to.")] = None,
) -> None:
    """Serve the same requests with labkit and with what transformers offers; prints tokens/s and their ratio."""
    from labkit import experiments

    workload = (lengths, num_requests, rate, max_model_len)
    rows = []
    for size in tensor_parallel_size or [1]:
        options = {"kv_cache_dtype": kv_cache_dtype, "tensor_parallel_size": size}
        rows += experiments.bench_serve_shape(shape, system or ["labkit"], *workload, **options)
    typer.echo(experiments.table(rows).to_string(index=False, na_rep="not measured"))
    if out is not None:
        experiments.save_rows(out, rows, experiments.provenance())


@bench.command("kernels")
def bench_kernels_command(
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Groups of ops; an unknown name lists all.")] = None,
    tune: Annotated[
        bool, typer.Option("--tune", help="Time candidate tiles instead, and print the best for kernels/tuning.py.")
    ] = False,
) -> None:
    """What the attention kernels reach on this GPU, beside its own ceilings and the peers that are installed."""
    import json

    from labkit.kernels import bench as kernel_bench

    if tune:
        from labkit.kernels import tune as kernel_tune

        kernel_tune.run(only, out)
        return
    results = kernel_bench.run(only)
    if out is not None:
        out.write_text(json.dumps(results, indent=1) + "\n")


@experiment.command("quality")
def experiment_quality_command(
    out: Annotated[Path, typer.Option(help="JSON file to complete: its rows are kept.")] = Path("quality.json"),
    num_tokens: Annotated[int, typer.Option("--tokens", help="First tokens of the shipped text.")] = 16384,
    policy: Annotated[list[str] | None, typer.Option(help="A policy by name; may be repeated; else all.")] = None,
    device: Annotated[str, typer.Option(help="cpu: about two minutes a policy; cuda: seconds.")] = "cpu",
) -> None:
    """What each KV format costs the embedded model in perplexity, by the reference quantiser in fp32."""
    from labkit.experiments.kv_quality import quality_table
    from labkit.experiments.recorded_quality import record_quality

    rows = record_quality(out, num_tokens=num_tokens, device=device, only=policy)
    typer.echo(quality_table(rows).to_string(index=False, float_format="{:.4f}".format))


@experiment.command("heads")
def experiment_heads_command(
    out: Annotated[Path, typer.Option(help="JSON file to complete: its rows are kept.")] = Path("heads.json"),
    steps: Annotated[int | None, typer.Option(help="Updates of the long run; else as the device allows.")] = None,
    checkpoints: Annotated[Path | None, typer.Option(help="Folder to resume interrupted training from.")] = None,
) -> None:
    """Fewer KV heads: perplexity before, after conversion, after uptraining; time and memory of a decode layer."""
    from labkit.experiments.heads import record_heads
    from labkit.experiments.heads_results import heads_tables

    for part, table in heads_tables(record_heads(out, long_steps=steps, checkpoints=checkpoints)).items():
        typer.echo(f"{part}\n{table.to_string(index=False, float_format='{:,.2f}'.format)}\n")


@experiment.command("combined")
def experiment_combined_command(
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
    window: Annotated[float | None, typer.Option(help="Seconds measured; else 10 on a GPU, 2 on a CPU.")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file to complete: its rows are kept.")] = None,
) -> None:
    """Paging, continuous batching, fewer KV heads, fewer bits: requests at once and tokens/s, rung by rung."""
    from labkit.experiments.combined_ladder import combined
    from labkit.experiments.combined_report import effects, shown_ladder
    from labkit.experiments.combined_traffic import LENGTHS

    rows = combined(
        model, memory_limit, context=context, lengths=lengths or LENGTHS, rungs=rung, window=window, out=out
    )
    typer.echo(shown_ladder(rows).to_string(index=False, float_format="{:,.3g}".format))
    typer.echo(effects(rows).to_string(index=False, float_format="{:.2f}".format))
    for name, lengths_of, why in rows[["rung", "lengths", "not_measured"]].dropna().itertuples(index=False):
        typer.echo(f"{name}, {lengths_of}: not measured: {why}")


@experiment.command("sensitivity")
def experiment_sensitivity_command(
    out: Annotated[Path, typer.Option(help="JSON file to write.")] = Path("kv_sensitivity.json"),
    format: Annotated[list[str] | None, typer.Option(help="A KV format by name; may be repeated; else int4.")] = None,
    num_tokens: Annotated[int, typer.Option("--tokens", help="First tokens of the shipped text.")] = 4096,
    device: Annotated[str, typer.Option(help="cpu: some minutes; cuda: seconds.")] = "cpu",
) -> None:
    """What the embedded model loses when one layer's K and V alone are quantised, layer by layer."""
    from labkit.experiments.recorded_kv_tables import record_sensitivity

    _print_rows(
        record_sensitivity(out, format or ["int4"], num_tokens=num_tokens, device=device),
        ["format", "layer", "delta_ppl_percent", "dnll", "dnll_se"],
    )


@experiment.command("failures")
def experiment_failures_command(
    out: Annotated[Path, typer.Option(help="JSON file to write.")] = Path("kv_failures.json"),
    num_tokens: Annotated[int, typer.Option("--tokens", help="First tokens of the shipped text.")] = 2048,
    device: Annotated[str, typer.Option(help="cpu: some minutes; cuda: seconds.")] = "cpu",
) -> None:
    """Where a coarse K fails: channels that stick out, and a bias of k_proj that shifts them."""
    from labkit.experiments.recorded_kv_tables import record_failures

    tables = record_failures(out, num_tokens=num_tokens, device=device)
    _print_rows(tables["keys"], ["case", "policy", "key_error", "score_error"])
    _print_rows(tables["key_bias"], ["key_bias", "policy", "ppl", "dnll", "dnll_se"])


@experiment.command("fp8")
def experiment_fp8_command(
    out: Annotated[Path, typer.Option(help="JSON file to write.")] = Path("fp8_ablation.json"),
    num_tokens: Annotated[int, typer.Option("--tokens", help="First tokens of the shipped text.")] = 16384,
    device: Annotated[str, typer.Option(help="Without fp8 tensor cores the rows are emulated, and say so.")] = "cpu",
) -> None:
    """fp8 weights, an fp8 KV cache, both: perplexity and bytes of the embedded model."""
    from labkit.experiments.recorded_kv_tables import record_fp8

    columns = ["weights", "kv_cache", "weights_bytes", "kv_bytes_per_token", "ppl", "dnll", "dnll_se"]
    _print_rows(record_fp8(out, num_tokens=num_tokens, device=device), columns)


@experiment.command("engine-quality")
def experiment_engine_quality_command(
    out: Annotated[Path, typer.Option(help="JSON file to write.")] = Path("engine_quality.json"),
    kv_dtype: Annotated[list[str] | None, typer.Option(help="As LLM takes it; else int8 and int4.")] = None,
    num_tokens: Annotated[int, typer.Option("--tokens", help="First tokens of the shipped text.")] = 16384,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """What the engine itself loses with a quantised KV cache: its pages, its kernels, in fp32."""
    from labkit.experiments.recorded_kv_tables import record_engine_quality

    rows = record_engine_quality(out, kv_dtype or ["int8", "int4"], num_tokens=num_tokens, device=device)
    _print_rows(rows, ["kv_cache_dtype", "attention_backend", "bytes_per_token", "ppl", "dnll", "dnll_se"])


@experiment.command("calibrate")
def experiment_calibrate_command(
    out: Annotated[Path, typer.Argument(help="safetensors file to write; labkit.quant.load_scales reads it.")],
    text: Annotated[Path, typer.Option(help="Text that stands for what will be served.")],
    model: Annotated[
        str | None, typer.Option(help="Hub name, folder or .gguf file; the embedded one if left out.")
    ] = None,
    kv_dtype: Annotated[str, typer.Option(help="fp8, fp8_e5m2 or int8.")] = "fp8",
    per_head: Annotated[bool, typer.Option("--per-head", help="One scale a KV head instead of one a layer.")] = False,
    num_tokens: Annotated[int, typer.Option("--tokens", help="First tokens of the text.")] = 8192,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; what there is if left out.")] = None,
) -> None:
    """Measure the scales of K and V that are fixed before a run, on a text."""
    from labkit.experiments.calibration import calibrate_to_file

    policy = calibrate_to_file(out, text, model, kv_dtype, per_head=per_head, num_tokens=num_tokens, device=device)
    typer.echo(f"scales for {policy} saved to {out}")


def _print_rows(rows: list[dict[str, Any]], columns: list[str]) -> None:
    from pandas import DataFrame

    typer.echo(DataFrame(rows)[columns].to_string(index=False, float_format="%.4f"))


def main() -> None:
    """Entry point of the console script."""
    try:
        app()
    except (ValueError, TypeError, NotImplementedError, RuntimeError, OSError) as error:
        typer.echo(f"labkit: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
