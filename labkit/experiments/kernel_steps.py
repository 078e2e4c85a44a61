"""What each step of the decode kernel must move and how many programs it starts: arithmetic, no clock."""

from __future__ import annotations

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
