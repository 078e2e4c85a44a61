"""The steps of the decode kernel: what each must move, how many programs it starts, and a table of measured times."""

from __future__ import annotations

from typing import Any

import pandas as pd

CHUNK = 512  # keys a program of split_kv


def step_costs(
    num_seqs: int,
    context: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    bytes_per_value: int = 2,
    num_sms: int = 132,
) -> pd.DataFrame:
    """One row a step of :mod:`labkit.kernels.steps`: bytes over the memory bus, programs, multiprocessors at work.

    All sequences have ``context`` tokens. Bytes of q and of the output are left out; a cache that serves the heads of a
    group from L2 saves part of what online_softmax reads again. ``num_sms``: 132 on an H200.
    """
    kv = 2 * num_seqs * context * num_kv_heads * head_dim * bytes_per_value
    group, chunks = num_q_heads // num_kv_heads, -(-context // CHUNK)
    partials = 2 * num_seqs * num_q_heads * chunks * (head_dim + 1) * 4  # float32, written and read
    pairs = num_seqs * num_kv_heads
    rows = [
        ("gather", 3 * kv, None),
        ("online_softmax", group * kv, num_seqs * num_q_heads),
        ("gqa_packing", kv, pairs),
        ("split_kv", kv + partials, pairs * chunks),
        ("shipped", kv, None),
    ]
    return pd.DataFrame(
        {
            "step": name,
            "MB moved": num_bytes / 1e6,
            "of the least": num_bytes / kv,
            "programs": programs,
            "SMs with work": None if programs is None else min(num_sms, programs),
        }
        for name, num_bytes, programs in rows
    )


def measured_steps(result: dict[str, Any]) -> pd.DataFrame:
    """What ``labkit.kernels.bench.run(["steps"])`` returns, as a table.

    ``attrs["caption"]`` names GPU, versions and read ceiling.
    """
    rows = [row for row in result["rows"] if row["op"] == "step"]
    first = {(row["batch"], *row["heads"]): row["us"] for row in rows if row["system"] == "gather"}
    table = pd.DataFrame(
        {
            "batch": row["batch"],
            "heads: Q, KV, size": ", ".join(map(str, row["heads"])),
            "step": row["system"],
            "µs": row["us"],
            "K and V, GB/s": row["percent_of_ceiling"] / 100 * result["ceiling_gbps"],
            "% of the read ceiling": row["percent_of_ceiling"],
            "× as fast as gather": first[row["batch"], *row["heads"]] / row["us"],
        }
        for row in rows
    )
    made, ceiling = result["provenance"], result["ceiling_gbps"]
    table.attrs["caption"] = (
        f"measured here on {made['gpu']}, driver {made['driver']}, torch {made['torch']}, Triton {made['triton']}; "
        f"read ceiling {ceiling:,.0f} GB/s"
    )
    return table
