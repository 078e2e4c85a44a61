"""KV formats at equal batch: what fewer bits do to a decode step when they are not used for more requests.

python -m labkit.experiments.combined_equal_batch combined.json     Llama-2-13B's shape with 8 KV heads, on a GPU
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel

from labkit.engine import LLM
from labkit.kv_math import model_shape
from labkit.models import random_model
from labkit.scheduling import Request, SamplingParams
from labkit.simulation import SimulatedExecutor

from .combined_measure import fill_with_noise
from .combined_window import all_prompts_in_a_step
from .result_file import Row, read_results, write_results

_WARM_UP, _MEASURED = 12, 64


def equal_batch(
    model: PreTrainedModel,
    batch_size: int,
    context: int,
    formats: Collection[str] = ("auto", "int8", "int4"),
    **llm_options: Any,
) -> Iterator[Row]:
    """The median time of a decode step of ``batch_size`` requests with about ``context`` tokens, for each KV format.

    The contexts come from a simulated prefill (see :func:`~labkit.experiments.combined_setting.serve_window`).
    ``llm_options`` go to :class:`LLM`. A format that cannot run says why under ``not_measured``.
    """
    for kv_cache_dtype in formats:
        row: Row = {
            "model": model.config.name_or_path,
            "num_kv_heads": model.config.num_key_value_heads,
            "kv_cache_dtype": kv_cache_dtype,
            "batch": batch_size,
            "context": context,
        }
        try:
            with LLM(
                model,
                max_model_len=context + _WARM_UP + _MEASURED + 8,
                max_num_seqs=batch_size,
                block_size=32 if kv_cache_dtype == "int4" else 16,
                enable_prefix_caching=False,
                kv_cache_dtype=kv_cache_dtype,
                **llm_options,
            ) as llm:
                row["step_ms"] = 1e3 * _decode_seconds(llm, batch_size, context)
        except Exception as error:  # whatever it is, the other formats are still to come
            row["not_measured"] = f"{type(error).__name__}: {error}"
        yield row


def record_equal_batch(path: Path, rows: Iterator[Row]) -> None:
    """Put ``rows`` of :func:`equal_batch`, as they come, under "equal_batch" in the file of the combined experiment."""
    document, done = read_results(path, "rows"), []
    for row in rows:
        done.append(row)
        print(" ".join(f"{value}" for value in row.values()), flush=True)
        write_results(path, document | {"equal_batch": done})


def _decode_seconds(llm: LLM, batch_size: int, context: int) -> float:
    engine = llm.engine
    engine.trace = None
    fill_with_noise(llm)
    params = SamplingParams(temperature=0, max_tokens=_WARM_UP + _MEASURED + 8, ignore_eos=True)
    for number in range(batch_size):
        engine.add_request(Request(str(number), [1] * context, params))
    executor, engine.executor = engine.executor, SimulatedExecutor(next_token=lambda request, _: 1)
    with all_prompts_in_a_step(engine.scheduler):  # of one age: none ends before the last has been timed
        engine.step()
    engine.executor = executor
    ends = []
    for _ in range(_WARM_UP + _MEASURED):
        changed = engine.step()
        if failed := [request.stop_reason for request in changed if request.finish_reason == "error"]:
            raise RuntimeError(f"a step failed: {failed[0]}")
        if len(changed) not in (0, batch_size):
            raise RuntimeError(f"the pool holds fewer than {batch_size} requests of {context} tokens")
        ends.append(executor.now())
    return median(after - before for before, after in zip(ends[_WARM_UP:], ends[_WARM_UP + 1 :], strict=False))


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("combined_equal_batch measures a 13B shape, which needs a CUDA device, and torch sees none here")
    grouped = random_model(replace(model_shape("llama-2-13b"), num_kv_heads=8))
    options = {"memory_limit": 40.0, "max_num_batched_tokens": 2048}
    record_equal_batch(Path(sys.argv[1]), equal_batch(grouped, 22, 4000, **options))
