"""Results that were measured elsewhere and ship with the lab, as tables that say so."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pandas as pd
from pandas.io.formats.style import Styler

from labkit.paths import data_path


@cache
def results(file: str) -> dict[str, Any]:
    """A result file under data/results, such as "h200/kernels.json"; {} if nobody has measured it yet."""
    try:
        return json.loads(data_path(f"results/{file}").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}


def provenance_line(file: str) -> str:
    """Where the numbers of a result file come from: device, commit and date, in a line."""
    made = results(file).get("provenance", {})
    device = made.get("gpu") or made.get("cpu") or "a CPU"
    return f"recorded on {device}, commit {made.get('commit')}, {made.get('date')}, data/results/{file}"


def recorded(file: str, columns: dict[str, str] | None = None, **match: Any) -> pd.DataFrame:
    """Rows of a result file whose fields equal ``match``; ``columns`` chooses and renames them, for reading.

    ``attrs["caption"]`` of the table says that it is recorded, and where. Empty if nobody has measured it yet.
    """
    rows = [row for row in results(file).get("rows", []) if all(row.get(k) == v for k, v in match.items())]
    table = pd.DataFrame(rows)
    if columns is not None:
        table = table.reindex(columns=list(columns)).rename(columns=columns)
        table = table.map(lambda value: ", ".join(map(str, value)) if isinstance(value, list) else value)
    table.attrs["caption"] = provenance_line(file) if rows else f"not measured yet: data/results/{file}"
    return table


def captioned(table: pd.DataFrame, decimals: int = 1) -> Styler:
    """A table with its caption below the title line, numbers with ``decimals`` places, for the end of a cell."""
    caption: Any = {"selector": "caption", "props": "caption-side: bottom; text-align: left; white-space: nowrap"}
    styled = table.style.set_caption(table.attrs.get("caption", "")).set_table_styles([caption]).hide(axis="index")
    styled.format(precision=decimals, na_rep="–", thousands=",")
    return styled
