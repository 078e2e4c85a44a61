"""Perplexity by the engine as it serves: its storage, its kernels, its batches.

:mod:`labkit.experiments.kv_quality` asks what a format costs, with the reference quantiser in between;
here the engine answers, so what its kernels do to a number is in the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from labkit.engine import LLM
from labkit.scheduling import SamplingParams

from .kv_quality import Row, paired_loss


def engine_nll(llm: LLM, token_ids: Sequence[int], *, ctx: int = 1024, progress: bool = False) -> torch.Tensor:
    """Negative log-likelihood in nats of every predicted token, float64 [num_windows * (ctx - 1)].

    Each window of ``ctx`` tokens is one request that asks for the log-probabilities of its prompt; the same tokens are
    predicted as by :func:`~labkit.experiments.kv_quality.window_nll`. Raises ValueError if ``token_ids`` fill no
    window, or a window and one token more are longer than the engine takes.
    """
    if ctx < 2 or len(token_ids) < ctx:
        raise ValueError(f"ctx must be within [2, {len(token_ids)}], the number of tokens, got {ctx}")
    windows = [list(token_ids[start : start + ctx]) for start in range(0, len(token_ids) - ctx + 1, ctx)]
    outputs = llm.generate(windows, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0), use_tqdm=progress)
    nll = []
    for window, output in zip(windows, outputs, strict=True):
        assert output.prompt_logprobs is not None
        rows = output.prompt_logprobs[1:]
        nll += [-row[token].logprob for token, row in zip(window[1:], rows, strict=True) if row is not None]
    return torch.tensor(nll, dtype=torch.float64)


def engine_quality(
    model: PreTrainedModel,
    token_ids: Sequence[int],
    kv_cache_dtypes: Sequence[Any],
    *,
    ctx: int = 1024,
    progress: bool = False,
    **llm_options: Any,
) -> list[Row]:
    """A row for each ``kv_cache_dtype``, "auto" first: bytes a token, perplexity and its paired change.

    ``llm_options`` go to :class:`LLM`. Raises what LLM raises for a format that this device cannot run.
    """
    rows: list[Row] = []
    baseline = torch.empty(0)
    for dtype in ("auto", *kv_cache_dtypes):
        options: dict[str, Any] = {"max_model_len": ctx + 1, "kv_cache_dtype": dtype} | llm_options
        with LLM(model, **options) as llm:
            nll = engine_nll(llm, token_ids, ctx=ctx, progress=progress)
            row = {
                "kv_cache_dtype": str(dtype),
                "attention_backend": llm.attention_backend,
                "bytes_per_token": llm.memory.bytes_per_token,
            }
        if dtype == "auto":
            baseline = nll
        rows.append(row | {"tokens": len(nll) // (ctx - 1) * ctx, "ctx": ctx} | paired_loss(nll, baseline))
    return rows
