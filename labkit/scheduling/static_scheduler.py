"""Static batching: the way before continuous batching. For comparison, in the same engine."""

from __future__ import annotations

from collections.abc import Iterator

from labkit.memory import KVAllocator

from .config import SchedulerConfig
from .request import Request
from .scheduler import Scheduler


class StaticScheduler(Scheduler):
    """Fills a batch, then runs it until its longest sequence ends; those that end earlier keep their blocks.

    A batch is open to waiting requests from the moment the last one ended until a step admits nobody: because it
    is full, the pool is, or no one waits.
    """

    def __init__(self, config: SchedulerConfig, kv: KVAllocator) -> None:
        super().__init__(config, kv)
        self._batch_is_open = True
        self._ended_in_batch: list[Request] = []

    def _admissions(self) -> Iterator[Request]:
        if not self._batch_is_open:
            return
        admitted_any = False
        for request in super()._admissions():
            admitted_any = True
            yield request
        self._batch_is_open = admitted_any or not self.running

    def _give_back(self, request: Request) -> None:
        self._ended_in_batch.append(request)
        self._end_batch_if_nobody_runs()

    def _wait(self, request: Request) -> None:
        super()._wait(request)
        self._end_batch_if_nobody_runs()

    def _end_batch_if_nobody_runs(self) -> None:
        if not self.running:
            for ended in self._ended_in_batch:
                self.kv.free(ended.request_id)
            self._ended_in_batch.clear()
            self._batch_is_open = True
