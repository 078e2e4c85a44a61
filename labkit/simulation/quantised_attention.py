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
    """By dtype name, from rows of `labkit bench kernels --only quantised quantised-prefill`.

    Each decode batch is held against the same batch in 16 bit, each prompt likewise; a format's slowdown is the
    geometric mean over the rows. A format needs both kinds of row. Other rows, of 16-bit prompts or of other systems
    too, are passed over; ValueError for a decode row without a partner in 16 bit.
    """
    rows = [row for row in rows if row.get("op") in ("decode", "prefill") and row.get("system") == "labkit"]
    in_16_bit = {
        (str(row["heads"]), row["batch"]): row["percent_of_ceiling"]
        for row in rows
        if row["op"] == "decode" and row["kv_format"] == "bf16"
    }
    read, compute = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for row in rows:
        name = dtype_name(row["kv_format"])
        batch = str(row["heads"]), row["batch"]
        if row["op"] == "prefill":
            if "ratio_to_bf16" in row:
                compute[name].append(row["ratio_to_bf16"])
        elif batch in in_16_bit:
            read[name].append(in_16_bit[batch] / row["percent_of_ceiling"])
        else:
            raise ValueError(f"rows must hold decode of {row['batch']} with heads {row['heads']} in bf16, too")
    return {name: Slowdown(geometric_mean(read[name]), geometric_mean(compute[name])) for name in read if compute[name]}


def slowdown_of(spec: KVCacheSpec | None, measured: Mapping[str, Slowdown]) -> Slowdown:
    """Of a cache whose layers, and whose K and V, may differ: the mean over their bytes, and over their FLOP.

    Formats that were not measured are not slowed down.
    """
    if spec is None:
        return AS_IN_16_BIT
    sides = [
        (side, layer.num_kv_heads * head_dim)
        for layer in spec.layers
        for side, head_dim in ((layer.key, layer.head_dim), (layer.value, layer.head_dim_v))
    ]
    slowdowns = [measured.get(side.dtype, AS_IN_16_BIT) for side, _ in sides]
    return Slowdown(
        fmean([slowdown.read for slowdown in slowdowns], [size * side.bits for side, size in sides]),
        fmean([slowdown.compute for slowdown in slowdowns], [size for _, size in sides]),
    )
