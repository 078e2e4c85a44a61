"""Make the tables in data/lengths from the traces: ``python -m labkit.simulation.make_length_tables FOLDER [OUT]``.

FOLDER is searched for the files by name; OUT is data/lengths of this package if it is not given.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from labkit.paths import data_path

from .length_tables import PERCENTS
from .traces import read_azure_csv, read_mooncake_jsonl, read_vidur_csv
from .workloads import Workload


class Trace(NamedTuple):
    file_name: str
    read: Callable[[Path], Workload]
    source: str
    licence: str


_AZURE = (
    "Azure LLM inference trace 2023, github.com/Azure/AzurePublicDataset @ b469a113, data/{}; "
    "Patel et al., Splitwise, ISCA 2024"
)
_CONV, _CODE = "AzureLLMInferenceTrace_conv.csv", "AzureLLMInferenceTrace_code.csv"

TRACES = {
    "azure_conv": Trace(_CONV, read_azure_csv, _AZURE.format(_CONV), "CC-BY-4.0"),
    "azure_code": Trace(_CODE, read_azure_csv, _AZURE.format(_CODE), "CC-BY-4.0"),
    "mooncake_conversation": Trace(
        "conversation_trace.jsonl",
        read_mooncake_jsonl,
        "github.com/kvcache-ai/Mooncake, FAST25-release/traces/conversation_trace.jsonl; "
        "Qin et al., Mooncake, FAST 2025",
        "Apache-2.0",
    ),
    "arxiv_summarization": Trace(
        "arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv",
        read_vidur_csv,
        "github.com/microsoft/vidur @ 7d475133, arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv; "
        "Agrawal et al., Vidur, MLSys 2024",
        "MIT",
    ),
}


def make_table(name: str, trace: Trace, workload: Workload) -> str:
    """The JSON text of a table, one line for each field."""
    quantities = {
        "prompt_tokens": workload.num_prompt_tokens,
        "output_tokens": workload.num_output_tokens,
        "total_tokens": workload.num_total_tokens,
    }
    gaps = np.diff(workload.arrival_times)
    timed = bool(gaps.any())
    fields = {
        "name": name,
        "source": trace.source,
        "licence": trace.licence,
        "num_requests": len(workload),
        "arrivals": {"rate": round(1 / gaps.mean(), 4), "cv": round(gaps.std() / gaps.mean(), 4)} if timed else None,
        "means": {quantity: round(float(lengths.mean()), 2) for quantity, lengths in quantities.items()},
        "percents": PERCENTS,
    } | {quantity: np.percentile(lengths, PERCENTS).round(2).tolist() for quantity, lengths in quantities.items()}
    return "{\n" + ",\n".join(f'  "{key}": {json.dumps(value)}' for key, value in fields.items()) + "\n}\n"


def main(folder: Path, out: Path) -> None:
    """Write a table for each trace of :data:`TRACES`; raises FileNotFoundError if a trace is not in ``folder``."""
    for name, trace in TRACES.items():
        found = next(folder.rglob(trace.file_name), None)
        if found is None:
            raise FileNotFoundError(f"{trace.file_name} is nowhere in {folder}: it is from {trace.source}")
        (out / f"{name}.json").write_text(make_table(name, trace, trace.read(found)), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) == 3 else data_path("lengths"))
