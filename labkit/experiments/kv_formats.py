"""Whole runs by KV format: what fewer bytes a token are worth to an engine, in a pool of equal bytes.

python -m labkit.experiments.kv_formats quant.json     Llama-2-7B's shape, random weights, 16 GiB of KV, on a GPU
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from labkit.engine import LLM
from labkit.kv_math import GIB
from labkit.models import random_model

from .provenance import provenance
from .result_file import Row, read_results, write_results
from .serving import run_requests
from .serving_workload import ServeRequest

KV_FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "int8": {"kv_cache_dtype": "int8"},
    "int8, dequantised before attention": {"kv_cache_dtype": "int8", "attention_backend": "unfused"},
    "int4": {"kv_cache_dtype": "int4", "block_size": 32},
    "fp8": {"kv_cache_dtype": "fp8"},
}
"""Options of :class:`LLM` for each format; one is the unfused way, which reads and writes a 16-bit copy."""


def kv_formats(
    model: PreTrainedModel,
    *,
    pool_bytes: int,
    context: int = 1024,
    num_output_tokens: int = 512,
    formats: Mapping[str, Mapping[str, Any]] = KV_FORMATS,
) -> Iterator[Row]:
    """Tokens/s of each KV format in a pool of ``pool_bytes``: at the batch that bf16 has there, and at all that fit.

    All requests are there at once and have one length, ``context`` tokens at their end, most of it decoded one by one,
    so that reading K and V is what takes the time. Rows come as they are measured; ``measured_in_s`` has warm-up and
    all in it. A format that cannot run says why under ``not_measured``; the first, which the others are compared with,
    has to run.
    """
    first: float | None = None
    equal_batch = 0
    for name, options in formats.items():
        row: Row = {"op": "serving", "kv_format": name, "pool_bytes": pool_bytes, "context": context}
        try:
            with LLM(model, max_model_len=context, max_num_seqs=1, enforce_eager=True, **options) as llm:
                block_bytes, block_size = llm.memory.kv_pool // llm.memory.num_blocks, llm.memory.block_size
            num_blocks = pool_bytes // block_bytes
            most = num_blocks // (-(-context // block_size) + 1)  # with the block that the watermark may ask for
            equal_batch = equal_batch or most
            for batch in sorted({equal_batch, most}):
                start = time.perf_counter()
                rate = _serve_in_pool(model, batch, num_blocks, context, num_output_tokens, options)
                first = first or rate
                figures = {"tokens_per_second": rate, "ratio_to_first": rate / first}
                figures["measured_in_s"] = time.perf_counter() - start
                yield row | {"batch": batch, "num_blocks": num_blocks} | figures
        except Exception as error:  # whatever it is, the other formats are still to come
            if first is None:
                raise
            yield row | {"not_measured": f"{type(error).__name__}: {error}"}


def record_kv_formats(path: Path, rows: Iterable[Row], made: Row) -> list[Row]:
    """Put ``rows`` of :func:`kv_formats`, as they come, under "engine" in the JSON file at ``path``; returns them."""
    stored, done = read_results(path), []
    for row in rows:
        done.append(row)
        print(" ".join(f"{value}" for value in row.values()), flush=True)
        write_results(path, stored | {"engine": {"provenance": made, "rows": done}})
    return done


def _serve_in_pool(
    model: PreTrainedModel,
    batch: int,
    num_blocks: int,
    context: int,
    num_output_tokens: int,
    options: Mapping[str, Any],
) -> float:
    """Tokens/s of ``batch`` requests of ``context`` tokens, all at once, after a run that compiles what they need."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(10, model.config.vocab_size, (batch, context - num_output_tokens)).tolist()
    sizes = {"max_model_len": context, "max_num_seqs": batch, "num_gpu_blocks_override": num_blocks}
    with LLM(model, enable_prefix_caching=False, **sizes, **options) as llm:
        requests = [ServeRequest(prompt, num_output_tokens) for prompt in prompts]
        run_requests(llm, [replace(request, num_output_tokens=2) for request in requests])
        llm.reset_stats()
        return len(requests) * num_output_tokens / run_requests(llm, requests)["seconds"]


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("kv_formats measures a 7B shape, which needs a CUDA device, and torch sees none here")
    record_kv_formats(Path(sys.argv[1]), kv_formats(random_model("llama-2-7b"), pool_bytes=16 * GIB), provenance())
