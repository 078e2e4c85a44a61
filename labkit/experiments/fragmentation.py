"""How much of the KV memory holds tokens: contiguous reservations and paging, at trace scale.

Two views. At final length (:func:`final_length_utilisation`) only lengths count: what a request of n tokens holds when
it ends, summed over all requests. Over time (:func:`utilisation_over_time`) the real scheduler and allocator serve
requests from a pool of fixed size, and reservations hold room for tokens that are yet to come.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from labkit.core import Engine
from labkit.kv_math import model_shape
from labkit.memory import ContiguousKVManager, KVAllocator, KVCacheManager, reservation_named
from labkit.scheduling import Scheduler, SchedulerConfig
from labkit.simulation import (
    LengthTable,
    all_at_once,
    calibrate,
    make_requests,
    read_trace,
    recorded_rows,
    sample_workload,
    simulate,
)

from .sweep import sweep

Row = dict[str, Any]

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
RESERVATIONS = ("reserve_max", "reserve_power_of_two", "reserve_oracle", "first_fit")
MAX_MODEL_LEN = 4096
NUM_SAMPLES = 120

PUBLISHED = {
    "reserve_max": "20.4 to 38.2 %: Kwon et al. 2023, figure 2 (quoted)",
    "paged": "96.3 %: Kwon et al. 2023, figure 2 (quoted)",
}


def total_lengths(lengths: str) -> NDArray[np.int64]:
    """[num_requests] final lengths in tokens: of a trace file, or those that a shipped length table describes."""
    if lengths in LengthTable.names():
        table = LengthTable.load(lengths)
        percents = (np.arange(table.num_requests) + 0.5) / table.num_requests * 100
        return np.rint([table.percentile("total_tokens", percent) for percent in percents]).astype(np.int64)
    if not Path(lengths).is_file():
        raise ValueError(f"lengths must be a trace file or one of {', '.join(LengthTable.names())}, got {lengths!r}")
    return read_trace(lengths).num_total_tokens


def final_length_utilisation(lengths: str = "azure_conv") -> list[Row]:
    """Tokens over slots held when each request ends, by allocator; ``lengths`` as for :func:`total_lengths`.

    ``reserved`` is the tokens that a request gets, or a block of the paged allocator; ``requests`` the share of
    requests that fit it, over which ``utilisation`` is taken.
    """
    totals = total_lengths(lengths)
    rows: list[Row] = []
    for reserved in (2048, 4096, 8192):
        fitting = totals[totals <= reserved]
        if fitting.size:
            share = fitting.size / totals.size
            rows.append(_row("reserve_max", reserved, share, fitting.sum() / (fitting.size * reserved)))
    powers = 2 ** np.ceil(np.log2(totals)).astype(np.int64)
    rows.append(_row("reserve_power_of_two", None, 1.0, totals.sum() / powers.sum()))
    rows.append(_row("reserve_oracle", None, 1.0, 1.0))
    for block_size in BLOCK_SIZES:
        rows.append(_row("paged", block_size, 1.0, totals.sum() / (-(-totals // block_size) * block_size).sum()))
    return rows


def utilisation_over_time(
    *,
    lengths: str = "azure_conv",
    allocator: str = "paged",
    block_size: int = 16,
    num_requests: int = 500,
    pool_tokens: int = 16 * MAX_MODEL_LEN,
    model: str = "llama-2-13b",
    seed: int = 0,
) -> list[Row]:
    """Serve ``num_requests`` of a length table, all there at once, on a simulated H200; 120 samples, evenly in time.

    Requests longer than 4,096 tokens are left out. Columns: ``seconds``, ``num_running``, ``num_waiting``,
    ``num_preemptions`` so far, ``live_of_reserved`` (tokens over slots of referenced blocks) and ``live_of_pool``
    (tokens over all slots), both 0 to 1.
    """
    if num_requests < 1:
        raise ValueError(f"num_requests must be >= 1, got {num_requests}")
    workload = sample_workload(LengthTable.load(lengths), all_at_once(num_requests), seed).fitting(MAX_MODEL_LEN)
    kv = named_allocator(allocator, pool_tokens // block_size, block_size)
    executor = calibrate(recorded_rows()).executor(model_shape(model))
    samples: list[tuple[float, int, int, int, int, int]] = []

    def watch(engine: Engine) -> None:
        stats, usage = engine.stats, kv.usage()
        state = stats.num_running, stats.num_waiting, stats.num_preemptions
        samples.append((executor.now(), *state, usage.num_live_tokens, usage.num_referenced_blocks))

    simulate(make_requests(workload), Scheduler(SchedulerConfig(256, 8192, MAX_MODEL_LEN), kv), executor, on_step=watch)
    ends = [sample[0] for sample in samples]
    chosen = np.searchsorted(ends, np.linspace(0, ends[-1], NUM_SAMPLES, endpoint=False), side="right")
    return [
        {
            "seconds": seconds,
            "num_running": num_running,
            "num_waiting": num_waiting,
            "num_preemptions": num_preemptions,
            "live_of_reserved": num_live / (num_blocks * block_size) if num_blocks else 0.0,
            "live_of_pool": num_live / pool_tokens,
        }
        for seconds, num_running, num_waiting, num_preemptions, num_live, num_blocks in (samples[i] for i in chosen)
    ]


def named_allocator(name: str, num_blocks: int, block_size: int) -> KVAllocator:
    """An allocator by the name that ``LLM(kv_allocator=...)`` knows it by, nothing shared. ValueError for others."""
    if name == "paged":
        return KVCacheManager(num_blocks, block_size, enable_prefix_caching=False)
    return ContiguousKVManager(num_blocks, block_size, reservation_named(name, MAX_MODEL_LEN))


def fragmentation(
    lengths: Sequence[str] = ("azure_conv", "azure_code"),
    *,
    block_sizes: Sequence[int] = BLOCK_SIZES,
    folder: str | Path | None = None,
    workers: int | None = None,
    **options: Any,
) -> pd.DataFrame:
    """:func:`utilisation_over_time` for every allocator: reservations in blocks of 16, paging in ``block_sizes``.

    ``folder`` and ``workers`` as for :func:`~labkit.experiments.sweep.sweep`, ``options`` for each run.
    """
    kinds = [(name, 16) for name in RESERVATIONS] + [("paged", block_size) for block_size in block_sizes]
    configurations = [
        {"lengths": table, "allocator": name, "block_size": block_size} | options
        for table in lengths
        for name, block_size in kinds
    ]
    return sweep(utilisation_over_time, configurations, folder=folder, workers=workers)


def steady_utilisation(table: pd.DataFrame) -> pd.DataFrame:
    """Means over the time in which requests were waiting, one row for each run of :func:`fragmentation`."""
    runs = ["lengths", "allocator", "block_size"]
    saturated = table[table["num_waiting"] > 0]
    means = saturated.groupby(runs, sort=False).agg(
        num_running=("num_running", "mean"),
        live_of_reserved=("live_of_reserved", "mean"),
        live_of_pool=("live_of_pool", "mean"),
    )
    ends = table.groupby(runs, sort=False).agg(seconds=("seconds", "max"), num_preemptions=("num_preemptions", "max"))
    return means.join(ends).reset_index()


def _row(allocator: str, reserved: int | None, requests: float, utilisation: float) -> Row:
    return {
        "allocator": allocator,
        "reserved": reserved,
        "requests": float(requests),
        "utilisation": float(utilisation),
    }
