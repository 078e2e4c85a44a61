"""What memory is used for, now and over time: weights, KV cache, activations, graphs, the allocator, others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING

import psutil
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from labkit.memory import KVCacheUsage

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class MemorySnapshot:
    """A device's memory in bytes, split so that the parts (all but ``time`` and ``total``) add up to ``total``.

    Attributes:
        time: seconds since the monitor was made.
        total: the device's memory; on a CPU the machine's RAM.
        weights: the model's parameters and buffers, each storage once.
        kv_live, kv_fragmentation, kv_in_flight, kv_cached, kv_free: the KV pool, scales included: tokens that requests
            hold; the rest of their blocks; blocks of nobody that are still copied from or to host memory; content
            that the prefix cache can still find; blocks that hold nothing.
        kv_tails: where unfinished blocks wait unquantised, for KV formats that need it.
        graphs: memory that CUDA graphs keep for their replays.
        activations: everything else that torch has allocated now.
        allocator_reserve: what torch's caching allocator holds but has not handed out.
        process_other: what else this process has: CUDA context and kernels; on a CPU, Python and libraries.
        other_processes: what others use.
        free: what is left.
    """

    time: float
    total: int
    weights: int
    kv_live: int
    kv_fragmentation: int
    kv_in_flight: int
    kv_cached: int
    kv_free: int
    kv_tails: int
    graphs: int
    activations: int
    allocator_reserve: int
    process_other: int
    other_processes: int
    free: int

    def parts(self) -> dict[str, int]:
        """The parts by name, in bytes, in the order of the fields."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("time", "total")}


def unique_storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind ``tensors``, each counted once however many views there are."""
    sizes = {}
    for tensor in plain_tensors(tensors):
        storage = tensor.untyped_storage()
        sizes[tensor.device, storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def plain_tensors(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Those that hold memory: a quantised weight wraps its codes and scales, a rank's weight its part of the whole."""
    for tensor in tensors:
        if is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            parts = [getattr(tensor, name) for name in names]  # a DTensor's device mesh is among them
            yield from plain_tensors(part for part in parts if isinstance(part, torch.Tensor))
        else:
            yield tensor


class MemoryMonitor:
    """Takes memory snapshots of a device, one at a time or in the background.

    Use it as a context manager to record while something runs::

        with MemoryMonitor(model.parameters(), kv_tensors, manager.usage, device) as monitor:
            llm.generate(...)
        monitor.timeline()
    """

    def __init__(
        self,
        weights: Iterable[torch.Tensor],
        kv_tensors: Iterable[torch.Tensor],
        kv_usage: Callable[[], KVCacheUsage],
        device: torch.device | str,
        *,
        kv_tails: Iterable[torch.Tensor] = (),
        graph_bytes: tuple[int, int] = (0, 0),
        interval: float = 0.1,
    ) -> None:
        """``graph_bytes``: what CUDA graphs hold of torch's allocator, and how much of it tensors in use have.

        ``interval`` is seconds between background snapshots. Raises ValueError unless it is > 0.
        """
        if interval <= 0:
            raise ValueError(f"interval must be > 0 seconds, got {interval}")
        self.device = torch.device(device)
        self.interval = interval
        self.snapshots: list[MemorySnapshot] = []
        self._weight_bytes = unique_storage_bytes(weights)
        self._kv_bytes = unique_storage_bytes(kv_tensors)
        self._tail_bytes = unique_storage_bytes(kv_tails)
        self._kv_usage = kv_usage
        self._graph_bytes = graph_bytes
        self._start = time.perf_counter()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def snapshot(self) -> MemorySnapshot:
        """The split at this moment."""
        usage = self._kv_usage()
        per_slot = self._kv_bytes / usage.num_slots
        live = round(usage.num_live_tokens * per_slot)
        fragmentation = round(usage.num_fragmented_slots * per_slot)
        in_flight = round(usage.num_in_flight_blocks * usage.block_size * per_slot)
        cached = round(usage.num_cached_free_blocks * usage.block_size * per_slot)
        known = {
            "weights": self._weight_bytes,
            "kv_live": live,
            "kv_fragmentation": fragmentation,
            "kv_in_flight": in_flight,
            "kv_cached": cached,
            "kv_free": self._kv_bytes - live - fragmentation - in_flight - cached,
            "kv_tails": self._tail_bytes,
            "graphs": self._graph_bytes[0],
        }
        now = time.perf_counter() - self._start
        if self.device.type == "cuda":
            rest = _cuda_rest(self.device, sum(known.values()), unused=self._graph_bytes[0] - self._graph_bytes[1])
        else:
            rest = _cpu_rest(self.device, sum(known.values()))
        return MemorySnapshot(time=now, **known, **rest)

    def timeline(self) -> pd.DataFrame:
        """The background snapshots as a table, one row each, in bytes."""
        import pandas as pd

        return pd.DataFrame([asdict(s) for s in self.snapshots], columns=[f.name for f in fields(MemorySnapshot)])

    def __enter__(self) -> MemoryMonitor:
        self._stop.clear()
        self._thread = threading.Thread(target=self._record, name="labkit-memory-monitor", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self.snapshots.append(self.snapshot())

    def _record(self) -> None:
        while True:
            self.snapshots.append(self.snapshot())
            if self._stop.wait(self.interval):
                return


def _cuda_rest(device: torch.device, known: int, unused: int) -> dict[str, int]:
    """What is not known of a GPU from the caller: torch's allocator tells one part, the driver the other.

    unused: bytes of ``known`` that the allocator holds without a tensor in them.
    """
    free, total = torch.cuda.mem_get_info(device)
    stats = torch.cuda.memory_stats(device)
    allocated, reserved = stats["allocated_bytes.all.current"], stats["reserved_bytes.all.current"]
    activations = max(0, allocated - (known - unused))
    reserve = max(0, reserved - known - activations)
    outside_torch = max(0, total - free - known - activations - reserve)
    others = min(outside_torch, sum(_bytes_of_other_processes(device)))
    return {
        "total": total,
        "activations": activations,
        "allocator_reserve": reserve,
        "process_other": outside_torch - others,
        "other_processes": others,
        "free": total - known - activations - reserve - outside_torch,
    }


def _bytes_of_other_processes(device: torch.device) -> Iterator[int]:
    """Bytes that each other process has on the GPU, by NVML; nothing where NVML cannot say."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return
    try:
        # By UUID, since NVML's indices do not follow CUDA_VISIBLE_DEVICES.
        uuid = torch.cuda.get_device_properties(device).uuid
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        own_pid = psutil.Process().pid
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid != own_pid and process.usedGpuMemory is not None:
                yield process.usedGpuMemory
    except pynvml.NVMLError:
        return
    finally:
        pynvml.nvmlShutdown()


def _cpu_rest(device: torch.device, known: int) -> dict[str, int]:
    """On a CPU there is no allocator to ask: this process's resident size, and the rest of the machine.

    Weights and pool may not be resident yet (pages appear when they are touched), so the remainder can be zero.
    """
    memory = psutil.virtual_memory()
    process_other = max(0, psutil.Process().memory_info().rss - known)
    free = min(memory.available, memory.total - known - process_other)
    return {
        "total": memory.total,
        "activations": 0,
        "allocator_reserve": 0,
        "process_other": process_other,
        "other_processes": memory.total - known - process_other - free,
        "free": free,
    }
