"""One model on several devices: the front schedules, one process a device (a rank) computes.

    LLM's process                                 rank 0                     rank 1 ... N - 1
    scheduler, blocks, texts                      its shard of the weights, its KV heads, one ModelExecutor
      submit(plan)  ── one small message ───────► forward pass ◄─ all-reduce ─► forward pass
                                                  sample ─────── broadcast ───► newest tokens stay on the device
      collect()     ◄─ tokens of the step ─────── download

The front holds no device memory and takes part in no collective, so a rank that dies or hangs can never hang it: it
sees the rank's end of the connection close, kills the rest and raises. Weights are sharded by transformers' own plan.
"""

from .build import ShardedEngine, build_sharded_engine
from .source import WeightsSource, resolve_sharded
from .torchrun import become_rank

__all__ = [
    "ShardedEngine",
    "WeightsSource",
    "become_rank",
    "build_sharded_engine",
    "resolve_sharded",
]
