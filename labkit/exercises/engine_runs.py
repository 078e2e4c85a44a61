"""Running a reader's part in the real engine, on a simulated device, and stopping where it goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from labkit.core import Engine
from labkit.memory import KVCacheManager
from labkit.memory.block_pool import BlockPool
from labkit.observe import Trace
from labkit.scheduling import Request, SamplingParams, Scheduler, SchedulerConfig
from labkit.simulation import SimulatedExecutor
from labkit.widgets import BlockTable

from .attempt import in_words
from .exercise import Failed

NUM_BLOCKS, BLOCK_SIZE = 32, 4


class FreeList(Protocol):
    """What exercise 02-free-list asks for."""

    def allocate(self, count: int) -> list[int]: ...

    def free(self, block_ids: list[int]) -> None: ...


class WatchedPool(BlockPool):
    """The lab's pool, whose block ids come from a reader's free list and are looked at as they pass."""

    def __init__(self, num_blocks: int, free_list: FreeList) -> None:
        super().__init__(num_blocks)
        self._theirs = free_list

    def allocate(self, count: int) -> list[int]:
        block_ids = self._theirs.allocate(count)
        if not isinstance(block_ids, list) or len(block_ids) != count:
            raise Failed(f"allocate({count}) should return a list of {count} block ids, got {block_ids!r}")
        for block_id in block_ids:
            if not isinstance(block_id, int) or not 0 <= block_id < self.num_blocks:
                raise Failed(f"block ids are integers from 0 to {self.num_blocks - 1}, got {block_id!r}")
            if self.ref_cnt[block_id]:
                raise Failed(f"allocate({count}) handed out block {block_id}, which somebody still holds")
        if len(set(block_ids)) != count:
            raise Failed(f"allocate({count}) handed out one block twice: {block_ids}")
        super().share(block_ids)
        return block_ids

    def free(self, block_ids: Any, worth_keeping: Any = ()) -> list[int]:
        released = super().free(block_ids, worth_keeping)
        if released:
            self._theirs.free(list(released))
        return released


def run_with_pool(make_free_list: Callable[[int], FreeList]) -> Trace:
    """Serve twelve requests with preemption from a reader's free list; :class:`Failed` with a picture on a mistake."""
    kv = KVCacheManager(NUM_BLOCKS, BLOCK_SIZE, enable_prefix_caching=False)
    kv.blocks.pool = WatchedPool(NUM_BLOCKS, make_free_list(NUM_BLOCKS))
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=32, max_model_len=64, watermark=0), kv)
    trace = Trace(NUM_BLOCKS, BLOCK_SIZE)
    engine = Engine(scheduler, SimulatedExecutor(), trace)
    for i in range(12):
        params = SamplingParams(max_tokens=5 + 3 * (i % 4), ignore_eos=True, n=2 if i % 5 == 0 else 1)
        engine.add_request(Request(str(i), [i] * (3 + 5 * (i % 3)), params))
    try:
        while engine.has_unfinished:
            engine.step()
            kv.check()
    except Failed as failure:
        raise _at_step(failure.words, trace) from None
    except Exception as error:
        raise _at_step(in_words(error), trace) from None
    if kv.num_free_blocks != NUM_BLOCKS:
        raise _at_step(f"all requests have ended, and {NUM_BLOCKS - kv.num_free_blocks} blocks are still held", trace)
    try:
        kv.pool.allocate(NUM_BLOCKS)
    except Exception as error:  # a free list that loses blocks serves until it is empty
        raise _at_step(
            f"nobody holds a block, yet allocate({NUM_BLOCKS}) gives not all of them: {error}", trace
        ) from None
    return trace


def _at_step(words: str, trace: Trace) -> Failed:
    """With the block table as it was in the step before, to be stepped through."""
    picture = BlockTable.from_trace(trace) if trace.steps else None
    return Failed(f"In the engine, step {len(trace) + 1}: {words}", picture=picture)
