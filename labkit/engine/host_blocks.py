"""Blocks in host memory: where the K and V of swapped-out sequences wait."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import torch

from labkit.kernels import swap_blocks

from .kv_storage import KVStorage
from .upload import upload_array

_ALIGNMENT = 256


class HostBlocks:
    """``num_blocks`` blocks like those of ``storage`` in host memory, and the stream that copies run on.

    On a GPU the memory is pinned, and one kernel a tensor moves all blocks of a step over the bus, beside what the
    current stream computes. All tensors are cut from one buffer, since torch rounds the size of a pinned allocation
    up to a power of two.
    """

    def __init__(self, storage: KVStorage, num_blocks: int) -> None:
        """Raises RuntimeError naming ``swap_space`` if the system does not give the memory."""
        self.storage = storage
        self.num_blocks = num_blocks
        self._device = next(storage.tensors()).device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        shapes = [(num_blocks, *tensor.shape[1:]) for tensor in storage.tensors()]
        dtypes = [tensor.dtype for tensor in storage.tensors()]
        sizes = [prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
        starts = np.cumsum([0] + [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]).tolist()
        try:
            buffer = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=self._stream is not None)
        except RuntimeError as error:
            raise RuntimeError(
                f"the system gave no {starts[-1] / 2**30:.2f} GiB of host memory for swap_space: lower swap_space"
            ) from error
        self._tensors = [
            buffer[start : start + size].view(dtype).view(shape)
            for start, size, dtype, shape in zip(starts, sizes, dtypes, shapes, strict=False)
        ]

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks."""
        return sum(tensor.nbytes for tensor in self._tensors)

    def start_copies(
        self, swap_outs: Sequence[tuple[int, int]], swap_ins: Sequence[tuple[int, int]]
    ) -> torch.cuda.Event | None:
        """Start copying (block, host block) pairs out and (host block, block) pairs in.

        They begin when the current stream has done all that it was given so far. Returns the event after which they
        have landed, None if they have already.
        """
        pool = list(self.storage.tensors())
        if self._stream is None:
            _copy(pool, self._tensors, swap_outs)
            _copy(self._tensors, pool, swap_ins)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            _copy(pool, self._tensors, swap_outs)
            _copy(self._tensors, pool, swap_ins)
            landed = torch.cuda.Event()
            landed.record()
        return landed

    def release(self) -> None:
        """Let go of the memory; the blocks cannot be used any more."""
        self._tensors.clear()


def _copy(
    sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor], pairs: Sequence[tuple[int, int]]
) -> None:
    """Copy blocks, given as (src, dst), between the tensors of two caches, on the current stream."""
    if not pairs:
        return
    on_gpu = next((tensor.device for tensor in (sources[0], destinations[0]) if tensor.is_cuda), None)
    src_dst = upload_array(np.array(pairs, dtype=np.int64), on_gpu or torch.device("cpu"))
    if on_gpu is not None:
        swap_blocks(sources, destinations, src_dst)
        return
    for source, destination in zip(sources, destinations, strict=True):
        destination[src_dst[:, 1]] = source[src_dst[:, 0]]
