"""What more ranks change: speed and memory of decoding, and nothing about the logits.

python -m labkit.experiments.tensor_parallel --out tp.json     Llama-2-13B's shape on two GPUs, about two minutes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from transformers import LlamaConfig, PreTrainedModel

from labkit.engine import LLM, RequestOutput
from labkit.kv_math import model_shape
from labkit.models import RandomWeights, random_model
from labkit.scheduling import SamplingParams

from .provenance import provenance
from .result_file import Row, write_results
from .serving import bench_serve
from .serving_workload import fixed_workload

SMALL_LLAMA = LlamaConfig(
    vocab_size=256,
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    max_position_embeddings=512,
    initializer_range=0.1,  # logits far apart
)
"""What the logits are compared on."""


def serve_rows(
    model: RandomWeights | PreTrainedModel,
    sizes: Sequence[int],
    *,
    name: str,
    vocab_size: int,
    batch: int = 32,
    num_prompt_tokens: int = 128,
    num_output_tokens: int = 512,
    device: str = "cuda",
) -> list[Row]:
    """``batch`` requests of one length, all at once, so that they decode together, on each number of ranks.

    The most ranks come first: while they run this process must hold no GPU memory. ``itl_p50_s`` is the decode step;
    bytes of the KV cache are those of one rank.
    """
    requests = fixed_workload(vocab_size, batch, num_prompt_tokens, num_output_tokens, None, 0)
    workload = f"{num_prompt_tokens}x{num_output_tokens}, {batch} at once"
    rows: list[Row] = []
    for size in sorted(sizes, reverse=True):
        options: dict[str, Any] = dict(tensor_parallel_size=size, max_num_seqs=batch, device=device)
        (row,) = bench_serve(model, requests, model_name=name, workload_name=workload, **options)
        rows.append({"op": "serve", **asdict(row)})
    return rows[::-1]


def logits_rows(
    sizes: Sequence[int], *, device: str = "cuda", dtypes: Sequence[str] = ("float32", "bfloat16")
) -> list[Row]:
    """Log-probabilities of all tokens of the vocabulary, teacher-forced, against those of one rank."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(10, SMALL_LLAMA.vocab_size, (4, 64)).tolist()
    rows: list[Row] = []
    for dtype in dtypes:
        logprobs = {
            size: _logprobs(random_model(SMALL_LLAMA, dtype=dtype, device="cpu"), prompts, size, device)
            for size in sorted({1, *sizes}, reverse=True)
        }
        for size in sorted(set(sizes) - {1}):
            rows.append(
                {
                    "op": "logits",
                    "model": "small llama, random weights",
                    "dtype": dtype,
                    "tensor_parallel_size": size,
                    "num_positions": len(logprobs[1]),
                    "max_difference": (logprobs[size] - logprobs[1]).abs().max().item(),
                    "std_of_logprobs": logprobs[1].std().item(),
                }
            )
    return rows


def _logprobs(model: PreTrainedModel, prompts: list[list[int]], size: int, device: str) -> torch.Tensor:
    """[num_positions, vocab_size]: what the model gives after each token of the prompts but their last."""
    own = model if size > 1 else model.to(device)  # type: ignore[arg-type]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=SMALL_LLAMA.vocab_size)
    with LLM(own, device=device, tensor_parallel_size=size, num_gpu_blocks_override=64, max_num_seqs=4) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return torch.cat([_of_prompt(output) for output in outputs])


def _of_prompt(output: RequestOutput) -> torch.Tensor:
    rows = (output.prompt_logprobs or [])[1:]
    return torch.tensor([[row[token].logprob for token in range(SMALL_LLAMA.vocab_size)] for row in rows if row])


def record(path: Path, rows: Sequence[Row], made: dict[str, Any]) -> None:
    """Write ``rows`` to ``path``, and how many times shorter a decode step is than on one rank."""
    served = {row["tensor_parallel_size"]: row for row in rows if row["op"] == "serve"}
    speedups = {
        str(size): served[1]["itl_p50_s"] / row["itl_p50_s"] for size, row in served.items() if size > 1 and 1 in served
    }
    write_results(path, {"provenance": made, "decode_speedup": speedups, "rows": list(rows)})


def main(
    out: Annotated[Path, typer.Option(help="JSON file to write.")],
    shape: Annotated[str, typer.Option(help="Random weights of a known model's shape.")] = "llama-2-13b",
    size: Annotated[list[int] | None, typer.Option(help="Ranks; may be repeated; else 1 and 2.")] = None,
    batch: Annotated[int, typer.Option(help="Requests that decode together.")] = 32,
    num_output_tokens: Annotated[int, typer.Option(help="Tokens that each generates.")] = 512,
    device: Annotated[str, typer.Option(help="cuda, or cpu, where gloo stands for NCCL.")] = "cuda",
) -> None:
    """Measure decoding and compare logits on one and on two ranks."""
    sizes = size or [1, 2]
    made = provenance(device)
    rows = logits_rows(sizes, device=device)
    record(out, rows, made)
    vocab_size = model_shape(shape).vocab_size
    rows += serve_rows(
        RandomWeights(shape),
        sizes,
        name=shape,
        vocab_size=vocab_size,
        batch=batch,
        num_output_tokens=num_output_tokens,
        device=device,
    )
    record(out, rows, made)
    for row in rows:
        typer.echo(" ".join(f"{name}={value}" for name, value in row.items() if value is not None))


if __name__ == "__main__":
    typer.run(main)
