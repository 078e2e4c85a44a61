"""What an engine has done so far, in numbers."""

from __future__ import annotations

import html
import math
from collections import deque
from typing import Protocol

from .events import (
    BlocksShared,
    BlocksSwappedIn,
    BlocksSwappedOut,
    RequestArrived,
    RequestFinished,
    RequestPreempted,
    StepRecord,
)

WINDOW = 65_536
"""Latencies kept for the percentiles: the newest ones."""


class Usage(Protocol):
    """The split of the pool that statistics need; :class:`labkit.memory.KVCacheUsage` is one."""

    @property
    def kv_cache_usage(self) -> float: ...

    @property
    def internal_fragmentation(self) -> float: ...


class EngineStats:
    """Counters and latencies of an engine, updated with every step.

    Attributes:
        kv_cache_usage, internal_fragmentation: of the pool after the last step, 0 to 1.
        peak_kv_cache_usage: the highest so far.
        num_cached_tokens: tokens that the prefix cache spared the model.
        num_preemptions: of them, ``num_swaps`` by copying to host memory, the others to be computed again.
        num_swapped_blocks: blocks copied to host memory and back.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_running = 0
        self.num_waiting = 0
        self.num_computed_tokens = 0
        self.num_generated_tokens = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.num_swaps = 0
        self.num_swapped_blocks = 0
        self.num_finished: dict[str, int] = {}
        self.kv_cache_usage = 0.0
        self.peak_kv_cache_usage = 0.0
        self.internal_fragmentation = 0.0
        self.busy_seconds = 0.0
        self._time_to_first_token: deque[float] = deque(maxlen=WINDOW)
        self._inter_token_latency: deque[float] = deque(maxlen=WINDOW)
        self._arrival: dict[str, float] = {}
        self._last_token: dict[str, float] = {}
        self._last_end = float("-inf")

    def update(self, record: StepRecord, usage: Usage) -> None:
        """Take in a step and the pool's usage after it."""
        for event in record.events:
            if isinstance(event, RequestArrived):
                self._arrival[event.request_id] = event.time
                self.num_prompt_tokens += event.num_prompt_tokens
            elif isinstance(event, RequestPreempted):
                self.num_preemptions += 1
            elif isinstance(event, BlocksSwappedOut):
                self.num_swaps += 1
                self.num_swapped_blocks += len(event.block_ids)
            elif isinstance(event, BlocksSwappedIn):
                self.num_swapped_blocks += len(event.block_ids)
            elif isinstance(event, BlocksShared) and event.request_id in self._arrival:
                self.num_cached_tokens += event.num_tokens
        for request_id in record.sampled_ids:
            last = self._last_token.get(request_id)
            if last is not None:
                self._inter_token_latency.append(record.end - last)
            elif request_id in self._arrival:  # forks get their first token with their parent
                self._time_to_first_token.append(record.end - self._arrival[request_id])
            self._last_token[request_id] = record.end
        for event in record.events:
            if isinstance(event, RequestFinished):
                self.num_finished[event.reason] = self.num_finished.get(event.reason, 0) + 1
                self._arrival.pop(event.request_id, None)
                self._last_token.pop(event.request_id, None)
        if record.scheduled_ids:
            self.num_steps += 1
        self.busy_seconds += record.end - max(record.start, self._last_end)
        self._last_end = record.end
        self.num_computed_tokens += sum(record.num_scheduled_tokens)
        self.num_generated_tokens += len(record.sampled_ids)
        self.num_running, self.num_waiting = record.num_running, record.num_waiting
        self.kv_cache_usage = usage.kv_cache_usage
        self.internal_fragmentation = usage.internal_fragmentation
        self.peak_kv_cache_usage = max(self.peak_kv_cache_usage, self.kv_cache_usage)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens a second of the time in which steps ran."""
        return self.num_generated_tokens / self.busy_seconds if self.busy_seconds else 0.0

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Share of the tokens wanted that the prefix cache had, 0 to 1."""
        wanted = self.num_computed_tokens + self.num_cached_tokens
        return self.num_cached_tokens / wanted if wanted else 0.0

    def time_to_first_token(self, percentile: float = 50) -> float:
        """Seconds from arrival to the first token."""
        return _percentile(self._time_to_first_token, percentile)

    def inter_token_latency(self, percentile: float = 50) -> float:
        """Seconds between two tokens of a sequence."""
        return _percentile(self._inter_token_latency, percentile)

    def snapshot(self) -> dict[str, float]:
        """All of it as plain numbers."""
        return {
            "steps": self.num_steps,
            "running": self.num_running,
            "waiting": self.num_waiting,
            "finished": sum(self.num_finished.values()),
            "preemptions": self.num_preemptions,
            "swaps": self.num_swaps,
            "prompt_tokens": self.num_prompt_tokens,
            "generated_tokens": self.num_generated_tokens,
            "tokens_per_second": self.tokens_per_second,
            "time_to_first_token_p50_s": self.time_to_first_token(50),
            "time_to_first_token_p99_s": self.time_to_first_token(99),
            "inter_token_latency_p50_s": self.inter_token_latency(50),
            "inter_token_latency_p99_s": self.inter_token_latency(99),
            "prefix_cache_hit_rate": self.prefix_cache_hit_rate,
            "kv_cache_usage": self.kv_cache_usage,
            "peak_kv_cache_usage": self.peak_kv_cache_usage,
            "internal_fragmentation": self.internal_fragmentation,
        }

    def __str__(self) -> str:
        return "\n".join(f"{name:28} {_rounded(value)}" for name, value in self.snapshot().items())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{html.escape(name.replace('_', ' '))}</td><td>{_rounded(value)}</td></tr>"
            for name, value in self.snapshot().items()
        )
        return f"<table>{rows}</table>"


def _rounded(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def _percentile(values: deque[float], percentile: float) -> float:
    """The nearest-rank percentile; NaN when there is nothing yet."""
    if not values:
        return float("nan")
    ranked = sorted(values)
    return ranked[max(0, math.ceil(percentile / 100 * len(ranked)) - 1)]
