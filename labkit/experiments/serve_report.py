"""Serving results as a file and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from .result_file import read_results, write_results
from .serving import ServeRow


def save_rows(path: Path, rows: Sequence[ServeRow], provenance: dict[str, Any]) -> None:
    """Add ``rows`` to the JSON file at ``path``, in place of earlier ones that say the same but for the figures.

    Rows that stay from a run of another commit keep its "commit" as their own.
    """
    earlier = read_results(path, "rows") or {"rows": [], "provenance": provenance}
    new = [asdict(row) for row in rows]
    replaced = {_identity(row) for row in new}
    kept = [row for row in earlier["rows"] if _identity(row) not in replaced]
    if (commit := earlier["provenance"]["commit"]) != provenance["commit"]:
        kept = [{"commit": commit} | row for row in kept]
    write_results(path, {"provenance": provenance, "rows": kept + new})


def _identity(row: dict[str, Any]) -> tuple[Any, ...]:
    return (*(row[key] for key in ("model", "system", "workload", "kv_format")), row.get("tensor_parallel_size", 1))


def table(rows: Sequence[ServeRow]) -> pd.DataFrame:
    """The figures that people compare, one row a system, with the ratio to the first row's tokens/s.

    NaN where nothing was measured.
    """
    frame = pd.DataFrame([asdict(row) for row in rows]).astype({"tokens_per_second": float})
    frame["ratio"] = frame["tokens_per_second"] / frame["tokens_per_second"].iloc[0]
    columns = [
        "model",
        "system",
        "tensor_parallel_size",
        "workload",
        "tokens_per_second",
        "ratio",
        "ttft_p50_s",
        "itl_p50_s",
        "itl_p99_s",
    ]
    return frame.loc[:, columns]
