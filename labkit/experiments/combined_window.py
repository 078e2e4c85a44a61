"""A steady window of an engine under endless load, whichever executor runs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from labkit.core import Engine
from labkit.memory import KVCacheUsage
from labkit.scheduling import Request, Scheduler, StaticScheduler

from .combined_traffic import Traffic

_NO_LIMIT = 1 << 40
_MIN_STEPS = 8


@contextmanager
def all_prompts_in_a_step(scheduler: Scheduler) -> Iterator[None]:
    """A step takes as many prompt tokens as memory holds, whatever the budget: all begin at one age, or keep theirs."""
    config = scheduler.config
    scheduler.config = replace(config, max_num_batched_tokens=_NO_LIMIT)
    try:
        yield
    finally:
        scheduler.config = config


class Load:
    """Steps an engine whose queue never runs dry."""

    def __init__(self, engine: Engine, traffic: Traffic, concurrency: int) -> None:
        """Continuous batching begins with ``concurrency`` requests met under way; static batches begin at zero."""
        self.engine = engine
        self.is_static = isinstance(engine.scheduler, StaticScheduler)
        self._num_first = 0 if self.is_static else concurrency
        self._requests: Iterator[Request] = chain(traffic.requests_met_under_way(self._num_first), traffic.requests())
        self._num_finished = 0

    def step(self) -> list[Request]:
        """One step; the requests that got a token. Raises RuntimeError if the executor failed."""
        scheduler = self.engine.scheduler
        while len(scheduler.waiting) < scheduler.config.max_num_seqs:  # or the queue would limit who begins in a step
            self.engine.add_request(next(self._requests))
        changed = self.engine.step()
        for request in changed:
            if request.finish_reason == "error":
                raise RuntimeError(f"a step failed: {request.stop_reason}")
        self._num_finished += sum(request.finish_reason is not None for request in changed)
        return changed

    @property
    def may_cut(self) -> bool:
        """Whether a window may begin or end here: anywhere, but not within a static batch."""
        return not self.is_static or not self.engine.scheduler.running

    def settle(self) -> None:
        """Go on until as many have finished as were met under way, or until a static batch has ended.

        The first step takes all prompts that memory holds, whatever the budget: those met under way keep their ages.
        """
        for _ in range(self._num_first):
            self.engine.add_request(next(self._requests))
        with all_prompts_in_a_step(self.engine.scheduler):
            self.step()
        while self._num_finished < max(1, self._num_first) or not self.may_cut:
            self.step()


def steady_window(load: Load, seconds: float, ramp: float = 0.0) -> dict[str, Any]:
    """Figures of at least ``seconds`` and 8 steps, after ``ramp`` seconds that do not count, on the executor's clock.

    Static batches are counted whole, from the first: the window begins and ends between two, and has no ramp. Averages
    are over time. ``drift`` is the second half's tokens/s over the first's, minus 1.
    """
    engine = load.engine
    now = engine.executor.now
    start = now()
    while not load.is_static and now() - start < ramp:
        load.step()

    start = end = now()
    num_preemptions = engine.stats.num_preemptions
    steps: list[tuple[float, int, int, int, int]] = []  # end, tokens, running, live tokens, held blocks
    last_token: dict[str, float] = {}
    gaps: list[float] = []
    batch, batches = 0, []  # most that ran at once in the static batch, in each
    while end - start < seconds or len(steps) < _MIN_STEPS or not load.may_cut:
        changed = load.step()
        end = now()
        for request in changed:
            if request.request_id in last_token:
                gaps.append(end - last_token[request.request_id])
            last_token[request.request_id] = end
            if request.finish_reason is not None:
                del last_token[request.request_id]
        num_running = len(engine.scheduler.running) + sum(request.finish_reason is not None for request in changed)
        batch = max(batch, num_running)
        if load.may_cut:
            batches.append(batch)
            batch = 0
        usage = engine.scheduler.kv.usage()
        steps.append((end, len(changed), num_running, _live_tokens(load, usage), usage.num_referenced_blocks))

    ends, tokens, running, live, held = np.array(steps, dtype=np.float64).T
    seconds = end - start
    durations = np.diff(ends, prepend=start)
    concurrency = float(np.mean(batches) if load.is_static else np.average(running, weights=durations))
    durations = np.where(held > 0, durations, 0)  # the step that ends a static batch leaves nothing behind
    held_blocks, live_tokens = (float(np.average(column, weights=durations)) for column in (held, live))
    kv = engine.scheduler.kv
    early = ends - start < seconds / 2
    return {
        "max_concurrency": concurrency,
        "peak_concurrency": int(max(batches) if load.is_static else running.max()),
        "blocks_per_request": held_blocks / concurrency,
        "live_utilisation": live_tokens / (held_blocks * kv.block_size),
        "pool_utilisation": live_tokens / (kv.num_blocks * kv.block_size),
        "tokens_per_second": float(tokens.sum()) / seconds,
        "itl_p50_s": float(np.percentile(gaps, 50)) if gaps else None,
        "itl_p99_s": float(np.percentile(gaps, 99)) if gaps else None,
        "num_preemptions": engine.stats.num_preemptions - num_preemptions,
        "window_s": seconds,
        "drift": float(tokens[~early].sum() / max(1.0, tokens[early].sum())) - 1,
    }


def _live_tokens(load: Load, usage: KVCacheUsage) -> int:
    """Tokens that someone still reads: those of requests that ended before their static batch are dead."""
    if not load.is_static:
        return usage.num_live_tokens
    kv = load.engine.scheduler.kv
    return sum(kv.num_computed_tokens(request.request_id) for request in load.engine.scheduler.running)
