"""Moving whole blocks: inside a cache (copy-on-write) and between caches (swap to pinned host memory)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl


@triton.jit
def copy_blocks_kernel(
    source, destination, src_dst, source_stride, destination_stride, num_elements, BLOCK: tl.constexpr
):
    """Program (pair, part) copies one part of one block; source and destination may be the same tensor."""
    pair = tl.program_id(0)
    src = tl.load(src_dst + 2 * pair)
    dst = tl.load(src_dst + 2 * pair + 1)
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < num_elements
    values = tl.load(source + src * source_stride + offset, mask=inside)
    tl.store(destination + dst * destination_stride + offset, values, mask=inside)


def copy_blocks(tensors: Sequence[torch.Tensor], src_dst: torch.Tensor) -> None:
    """Copy blocks within a cache.

    tensors: [num_blocks, ...] of any dtype: KVPages, `QuantisedKVPages.tensors`, or those of several layers in a list.
    src_dst: int64 [n, 2] on the cache's device, rows (from, to). No block may be both read and written.
    Raises TypeError or ValueError when src_dst has another dtype or shape.
    """
    _copy(tensors, tensors, src_dst)


def swap_blocks(
    source: Sequence[torch.Tensor],
    destination: Sequence[torch.Tensor],
    src_dst: torch.Tensor,
    stream: torch.cuda.Stream | None = None,
) -> None:
    """Copy blocks between two caches, one on the GPU and one in pinned host memory.

    source, destination: tensors [num_blocks, ...] of equal blocks, pair by pair, as for `copy_blocks`.
    src_dst: int64 [n, 2] on the GPU, rows (block in source, block in destination).
    One kernel reads or writes the pinned memory in place over the bus, so n scattered blocks are one launch and
    nothing is staged. It runs on `stream` (default: the current one), after the work already queued on the
    current stream; the caller waits for `stream` before it reuses what was read or reads what was written.
    Raises ValueError when one of the caches lies in host memory that is not pinned while the other is on a GPU.
    """
    on_gpu = any(tensor.is_cuda for tensor in (*source, *destination))
    for tensor in (*source, *destination):
        if on_gpu and not tensor.is_cuda and not tensor.is_pinned():
            raise ValueError("swap_blocks needs the host cache in pinned memory (torch.empty(..., pin_memory=True))")
    if stream is None:
        _copy(source, destination, src_dst)
        return
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        _copy(source, destination, src_dst)


def _copy(source: Sequence[torch.Tensor], destination: Sequence[torch.Tensor], src_dst: torch.Tensor) -> None:
    if src_dst.dtype != torch.int64:
        raise TypeError(f"src_dst must be int64, got {src_dst.dtype}")
    if src_dst.ndim != 2 or src_dst.shape[1] != 2:
        raise ValueError(f"src_dst must be [n, 2], got {tuple(src_dst.shape)}")
    if src_dst.shape[0] == 0:
        return
    src_dst = src_dst.contiguous()
    for a, b in zip(source, destination, strict=True):
        if a.shape[1:] != b.shape[1:] or a.dtype != b.dtype:
            raise ValueError(f"blocks differ: {tuple(a.shape[1:])} {a.dtype} and {tuple(b.shape[1:])} {b.dtype}")
        if not (a[:1].is_contiguous() and b[:1].is_contiguous()):
            raise ValueError("each block of the cache must be one contiguous run")
        words_a, words_b = _as_words(a), _as_words(b)
        num_elements = words_a.shape[1]
        grid = (src_dst.shape[0], triton.cdiv(num_elements, 2048))
        copy_blocks_kernel[grid](
            words_a, words_b, src_dst, words_a.stride(0), words_b.stride(0), num_elements, BLOCK=2048
        )


def _as_words(pages: torch.Tensor) -> torch.Tensor:
    """View [num_blocks, ...] of any dtype as int32 [num_blocks, words], so one kernel serves every format."""
    flat = pages.view(pages.shape[0], -1)
    return flat.view(torch.int32) if flat.shape[1] * flat.element_size() % 4 == 0 else flat.view(torch.int8)
