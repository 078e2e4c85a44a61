"""KV formats at equal batch: what fewer bits do to a decode step when they are not used for more requests."""

from __future__ import annotations

from collections.abc import Collection
from statistics import median
from typing import Any

from transformers import PreTrainedModel

from labkit.engine import LLM
from labkit.scheduling import Request, SamplingParams
from labkit.simulation import SimulatedExecutor

_WARM_UP, _MEASURED = 12, 64


def equal_batch(
    model: PreTrainedModel,
    batch_size: int,
    context: int,
    formats: Collection[str] = ("auto", "int8", "int4"),
    **llm_options: Any,
) -> list[dict[str, Any]]:
    """The median time of a decode step of ``batch_size`` requests with about ``context`` tokens, for each KV format.

    The contexts come from a simulated prefill (see :func:`~labkit.experiments.combined_setting.serve_window`).
    ``llm_options`` go to :class:`LLM`. A format that cannot run says why under ``not_measured``.
    """
    rows = []
    for kv_cache_dtype in formats:
        row: dict[str, Any] = {
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
        except (NotImplementedError, ValueError, RuntimeError) as error:
            row["not_measured"] = f"{type(error).__name__}: {error}"
        rows.append(row)
    return rows


def _decode_seconds(llm: LLM, batch_size: int, context: int) -> float:
    engine = llm.engine
    engine.trace = None
    params = SamplingParams(temperature=0, max_tokens=_WARM_UP + _MEASURED + 8, ignore_eos=True)
    for number in range(batch_size):
        engine.add_request(Request(str(number), [1] * context, params))
    executor, engine.executor = engine.executor, SimulatedExecutor(next_token=lambda request, _: 1)
    while engine.scheduler.waiting or any(not request.num_output_tokens for request in engine.scheduler.running):
        engine.step()
    engine.executor = executor
    ends = []
    for _ in range(_WARM_UP + _MEASURED):
        if len(engine.step()) not in (0, batch_size):
            raise RuntimeError(f"the pool holds fewer than {batch_size} requests of {context} tokens")
        ends.append(executor.now())
    return median(after - before for before, after in zip(ends[_WARM_UP:], ends[_WARM_UP + 1 :], strict=False))
