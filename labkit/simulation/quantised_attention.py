"""What attention over quantised pages costs in a simulated step: codes become numbers before they are multiplied."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import fmean, geometric_mean
from typing import Any, NamedTuple

from labkit.kv_math import KVCacheSpec
from labkit.kv_math.formats import dtype_name


class Slowdown(NamedTuple):
    """How many times as long as in 16 bit a byte of K and V takes to read, and a FLOP of a prompt's attention."""

    read: float = 1.0
    compute: float = 1.0


AS_IN_16_BIT = Slowdown()


def measured_slowdowns(rows: Iterable[Mapping[str, Any]]) -> dict[str, Slowdown]:
    """By dtype name, from rows of `labkit bench kernels --only quantised quantised-prefill`; others are passed over.

    Each decode batch is held against the same batch in 16 bit, each prompt likewise; a format's slowdown is the
    geometric mean over them. A format needs both kinds of row.
    """
    rows = [row for row in rows if row.get("op") in ("decode", "prefill")]
    in_16_bit = {
        (str(row["heads"]), row["batch"]): row["percent_of_ceiling"]
        for row in rows
        if row["op"] == "decode" and row["kv_format"] == "bf16"
    }
    read, compute = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for row in rows:
        name = dtype_name(row["kv_format"])
        if row["op"] == "prefill":
            compute[name].append(row["ratio_to_bf16"])
        else:
            read[name].append(in_16_bit[str(row["heads"]), row["batch"]] / row["percent_of_ceiling"])
    return {name: Slowdown(geometric_mean(read[name]), geometric_mean(compute[name])) for name in read if compute[name]}


def slowdown_of(spec: KVCacheSpec | None, measured: Mapping[str, Slowdown]) -> Slowdown:
    """Of a cache whose layers, and whose K and V, may differ: the mean over them. Formats not measured have none."""
    if spec is None:
        return AS_IN_16_BIT
    sides = [measured.get(side.dtype, AS_IN_16_BIT) for layer in spec.layers for side in (layer.key, layer.value)]
    return Slowdown(fmean(side.read for side in sides), fmean(side.compute for side in sides))
