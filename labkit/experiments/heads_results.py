"""The file of the heads experiment: rows that were measured once stay, and each new one is written at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from .provenance import provenance
from .result_file import Row, read_results, write_results

_KEYS = ("part", "name", "num_kv_heads", "batch", "context")  # what tells rows apart


@dataclass
class HeadsResults:
    """Rows of {"part": "conversion" | "uptraining" | "decode layer" | "attention FLOPs", ...} and where they are."""

    path: Path
    source: dict[str, Any]
    rows: list[Row]

    @classmethod
    def open(cls, path: Path, device: torch.device, model_name: str) -> HeadsResults:
        """Raises ValueError if the file at ``path`` was measured on another device or model."""
        source = provenance(device) | {"model": model_name, "perplexity_dtype": "float32"}
        rows = []
        if earlier := read_results(path, "rows"):
            for key in ("gpu", "model"):
                if earlier["provenance"][key] != source[key]:
                    raise ValueError(
                        f"{path} has rows of {key} {earlier['provenance'][key]!r}, this is {source[key]!r}"
                    )
            rows = earlier["rows"]
        return cls(path, source, rows)

    def find(self, **values: Any) -> Row:
        """The first row with these values, {} if there is none."""
        return next((row for row in self.rows if values.items() <= row.items()), {})

    def put(self, row: Row) -> None:
        """Add ``row``, in place of an earlier one of the same thing, with commit and date, and write the file."""
        row = row | {stamp: self.source[stamp] for stamp in ("commit", "date")}
        key = [row.get(name) for name in _KEYS]
        same = [i for i, other in enumerate(self.rows) if [other.get(name) for name in _KEYS] == key]
        if same:
            self.rows[same[0]] = row
        else:
            self.rows.append(row)
        write_results(self.path, {"provenance": self.source, "rows": self.rows})


def heads_tables(rows: list[Row]) -> dict[str, pd.DataFrame]:
    """The figures that people compare, one table a part."""
    columns = {
        "conversion": ["name", "kv_heads", "max_logit_change", "ppl", "ppl_other_domain"],
        "uptraining": ["name", "step", "tokens", "seconds", "tokens_per_second", "ppl", "ppl_other_domain"],
        "decode layer": [
            "kind",
            "batch",
            "context",
            "attention_us",
            "projections_us",
            "mlp_us",
            "layer_us",
            "kv_bytes",
        ],
        "attention FLOPs": ["kind", "query_output_flops", "key_value_flops", "attend_flops", "kv_bytes_per_token"],
    }
    tables = {}
    for part, wanted in columns.items():
        if of_part := [row for row in rows if row["part"] == part]:
            tables[part] = pd.DataFrame(of_part).reindex(columns=wanted)
    return tables
