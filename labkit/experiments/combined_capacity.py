"""How many requests a pool should hold: the closed form beside which the experiment puts what it reached."""

from __future__ import annotations

import numpy as np

from labkit.scheduling import SchedulerConfig

from .combined_rungs import Rung
from .combined_traffic import Traffic


def expected_concurrency(rung: Rung, traffic: Traffic, num_blocks: int) -> float:
    """Requests that run at once when ``num_blocks`` blocks are all that limits them.

    Continuous batching, in a steady state: the pool less the watermark, less what stays free because the first in the
    queue does not fit (half of what it needs, on average over who is first), over what a request holds on average
    while it runs::

        (num_blocks (1 - watermark) - E[need^2] / 2 E[need]) / (E[output x (own + output / 2)] / E[output] / block_size)

    Static batches: as many of the queue, one after the other, as fit when the batch begins. (Those that were preempted
    come back with what they had generated, and need more: a request or two fewer run than this says.)
    """
    block_size = rung.block_size
    outputs = traffic.outputs.astype(np.float64)
    shared = np.minimum(traffic.shared, traffic.prompts) // block_size
    room = num_blocks * (1 - SchedulerConfig.__dataclass_fields__["watermark"].default) - traffic.shared // block_size
    need = -(-traffic.prompts // block_size) - shared
    if rung.kv_allocator == "reserve_max":
        return max(1, int(room) // -(-traffic.context // block_size))
    if rung.scheduler == "static":
        return _mean_batch(need, room)
    rounding = (block_size - 1) / 2
    held = (traffic.prompts + (outputs + 1) / 2 + rounding) / block_size - shared
    mean_held = float(np.average(held, weights=outputs))
    return max(1.0, (room - float(np.mean(need**2) / np.mean(need) / 2)) / mean_held)


def _mean_batch(need: np.ndarray, room: float) -> float:
    """Mean number of consecutive requests that fit into ``room`` blocks together."""
    batches, taken = 1, 0.0
    for blocks in need.tolist():
        if taken + blocks > room and taken:
            batches, taken = batches + 1, 0.0
        taken += blocks
    return len(need) / batches
