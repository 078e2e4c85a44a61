"""Numbers from the host to the device and back, without waiting for what the device is doing.

A plain copy from pageable memory makes the host wait until the device has done all that it was given before; from
pinned memory the copy takes its place in that line and the host goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch


def upload(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of ``values`` on ``device``."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def upload_array(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """``array`` on ``device``; on a CPU it is shared, not copied."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class Landings:
    """Pinned memory where the tokens of the last few steps arrive, used in turns; on a CPU there is none.

    It is never freed while the device runs: torch ends the process if that happens after the device has failed.
    """

    def __init__(self, size: int, count: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._buffers = deque(torch.empty(size, dtype=torch.int64, pin_memory=True) for _ in range(count * on_gpu))

    def download(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Start a copy of int64 ``tokens`` to the host; it may be read when the event has happened (None: at once)."""
        if not self._buffers:
            return tokens, None
        self._buffers.rotate()
        host = self._buffers[0][: len(tokens)]
        host.copy_(tokens, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return host, event
