"""The combined experiment as tables: the ladder beside claims and predictions, and which effects multiply."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from .combined_rungs import ABLATION, LADDER

Row = dict[str, Any]

_OF_ONE_LADDER = ["model", "memory_limit_gib", "lengths"]
_SHOWN = [
    "lengths",
    "rung",
    "max_concurrency",
    "predicted_concurrency",
    "claimed_concurrency",
    "bytes_per_request",
    "saving",
    "claimed_saving",
    "live_utilisation",
    "tokens_per_second",
    "predicted_tokens_per_second",
    "speedup",
    "claimed_speedup",
    "itl_p99_s",
]
_FIGURES = ("not_measured", *_SHOWN[2:])


def ladder_table(rows: pd.DataFrame) -> pd.DataFrame:
    """The rungs of each ladder in their order, each beside its baseline.

    Adds ``concurrency_ratio``, ``speedup`` and ``saving`` (of a request's bytes); NaN where a figure is missing.
    """
    order = [rung.name for rung in LADDER]
    found: list[Row] = []
    for _, ladder in rows.groupby(_OF_ONE_LADDER):
        by_rung: dict[Any, Row] = {row["rung"]: row for row in ladder.to_dict("records")}  # type: ignore[misc]
        base = by_rung.get(order[0], {})
        for row in (by_rung[name] for name in order if name in by_rung):
            ratios = {
                "concurrency_ratio": _ratio(row, base, "max_concurrency"),
                "speedup": _ratio(row, base, "tokens_per_second"),
                "saving": 1 - _ratio(row, base, "bytes_per_request"),
            }
            found.append(dict.fromkeys(_FIGURES, math.nan) | row | ratios)
    return pd.DataFrame(found)


def shown_ladder(rows: pd.DataFrame) -> pd.DataFrame:
    """:func:`ladder_table` with the columns that fit a terminal."""
    return ladder_table(rows).reindex(columns=_SHOWN)


def whole_ladders(rows: pd.DataFrame, recorded: list[Row]) -> pd.DataFrame:
    """Those of ``recorded`` that are of the ladders of ``rows``: the baseline too, when other rungs were measured."""
    return pd.DataFrame(recorded).merge(rows[_OF_ONE_LADDER].drop_duplicates())


def effects(rows: pd.DataFrame) -> pd.DataFrame:
    """What each effect multiplies concurrency and tokens/s by, given which others are there already.

    An effect whose factor is the same whatever it is added to multiplies with the others. One row for each pair of
    measured combinations of the ablation that differ in one effect.
    """
    found: list[Row] = []
    for key, ladder in rows.groupby(_OF_ONE_LADDER, sort=False):
        by_rung: dict[Any, Row] = {row["rung"]: row for row in ladder.to_dict("records")}  # type: ignore[misc]
        measured = {name: row for name, row in by_rung.items() if _number(row, "tokens_per_second") > 0}
        for before, from_rung in ABLATION.items():
            for after, to_rung in ABLATION.items():
                if not before < after or len(after - before) > 1:
                    continue
                if from_rung.name in measured and to_rung.name in measured:
                    low, high = measured[from_rung.name], measured[to_rung.name]
                    found.append(
                        dict(zip(_OF_ONE_LADDER, key, strict=True))  # type: ignore[arg-type]
                        | {
                            "effect": next(iter(after - before)),
                            "given": " + ".join(sorted(before)) or "nothing",
                            "concurrency": _ratio(high, low, "max_concurrency"),
                            "tokens_per_second": _ratio(high, low, "tokens_per_second"),
                        }
                    )
    table = pd.DataFrame(found, columns=[*_OF_ONE_LADDER, "effect", "given", "concurrency", "tokens_per_second"])
    return table.sort_values([*_OF_ONE_LADDER, "effect"], kind="stable").reset_index(drop=True)


def _ratio(row: Row, base: Row, figure: str) -> float:
    """NaN if either is missing."""
    return _number(row, figure) / _number(base, figure)


def _number(row: Row, figure: str) -> float:
    value = row.get(figure)
    return math.nan if value is None else float(value)
