"""A run with real lengths on real text, recorded as a trace that others can replay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from labkit.engine import LLM
from labkit.paths import data_path
from labkit.simulation import LengthTable, poisson_arrivals, sample_workload

from .provenance import provenance
from .serving import run_requests
from .serving_workload import ServeRequest


def record_run(
    llm: LLM,
    path: str | Path,
    *,
    lengths: str = "azure_conv",
    num_requests: int = 128,
    rate: float = 20.0,
    seed: int = 0,
) -> dict[str, Any]:
    """Serve passages of the shipped text with the lengths of a real trace, and save the engine's trace to ``path``.

    Lengths come from a shipped table, arrivals are Poisson at ``rate`` a second; requests longer than the model are
    left out. Returns the figures of the run. Raises ValueError for an LLM without a tokenizer.
    """
    tokenizer = llm.get_tokenizer()
    if tokenizer is None or llm.trace is None:
        raise ValueError("record_run needs an LLM with a tokenizer and a trace")
    excerpt = data_path("text/persuasion_excerpt_320k.txt").read_text()
    text = tokenizer.encode(excerpt, verbose=False)  # cut into prompts below: longer than any model is no fault
    workload = sample_workload(LengthTable.load(lengths), poisson_arrivals(num_requests, rate, seed), seed)
    requests = []
    for number, (arrival, num_prompt, num_output) in enumerate(workload.fitting(llm.max_model_len)):
        start = number * 997 % (len(text) - num_prompt)
        requests.append(ServeRequest(text[start : start + num_prompt], num_output, arrival))
    llm.reset_stats()
    figures = run_requests(llm, requests)
    llm.trace.meta |= {"lengths": lengths, "rate": rate, "recorded": provenance(llm.model.device)}
    llm.trace.save(path)
    return {"op": "recorded run", "num_requests": len(requests), **figures}
