"""Quantised K and V on the `torch` backend: quantise on the way in, dequantise what a step reads.

The readable path, with the codes and scales of :mod:`labkit.quant`. Where a format's scales span the tokens of a block,
a token waits in its sequence's tail until the block is full::

    blocks of 4; a step computes tokens 6 ... 13 of a sequence          tail before  [4  5  .  .]
    6 7          complete the tail, which becomes a block               quantised    4 5 6 7
    8 9 10 11    a whole block, straight from the step                  quantised    8 9 10 11
    12 13        wait                                                   tail after   [12 13 .  .]
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from labkit.kernels import QuantisedKVPages, QuantisedPages
from labkit.quant import Quantised, quantise

from .input_batch import InputBatch
from .quantised_pages import bytes_of, fixed_scales, format_of, read_blocks


class QuantisedWriter:
    """Puts one step's K and V into their places; made once a step, used by every layer."""

    def __init__(self, batch: InputBatch, block_size: int) -> None:
        self._batch = batch
        self._block_size = block_size

    @cached_property
    def _places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Block and offset of every token."""
        slots = self._batch.slot_mapping
        return slots // self._block_size, slots % self._block_size

    @cached_property
    def _through_tails(self) -> _ThroughTails:
        return _ThroughTails(self._batch, self._block_size)

    def write(self, k: torch.Tensor, v: torch.Tensor, kv: QuantisedKVPages) -> None:
        """Store k and v [num_tokens, num_kv_heads, D]. Raises ValueError for NaN or infinity in them."""
        self._write_side(k, kv.k, kv.head_dim_k, kv.k_tail)
        self._write_side(v, kv.v, kv.head_dim_v, kv.v_tail)

    def _write_side(self, new: torch.Tensor, pages: QuantisedPages, head_dim: int, tail: torch.Tensor | None) -> None:
        format = format_of(pages, head_dim, tail is not None)
        codes = bytes_of(pages.codes)
        if tail is not None:
            full, blocks = self._through_tails.pass_through(new, tail)
            if len(blocks):
                small = quantise(full, format, block_size=self._block_size)
                by_token = bytes_of(small.codes).unflatten(0, (-1, self._block_size))
                codes[blocks] = by_token.transpose(1, 2)
                _store_scales(pages, small, blocks, 0)
            return
        blocks, offsets = self._places
        if format.scales is not None and format.scales.tokens == "layer":
            small = quantise(new, format, scales=fixed_scales(pages))
        else:
            small = quantise(new, format)
            _store_scales(pages, small, blocks, offsets)
        codes[blocks, :, offsets] = bytes_of(small.codes)


def _store_scales(pages: QuantisedPages, small: Quantised, blocks: torch.Tensor, offsets: torch.Tensor | int) -> None:
    for stored, numbers in ((pages.scales, small.scales), (pages.zero_points, small.zero_points)):
        if stored is not None and numbers is not None:
            stored[blocks, :, offsets] = numbers


class _ThroughTails:
    """Which of a step's tokens complete a tail, fill blocks of their own, or wait."""

    def __init__(self, batch: InputBatch, block_size: int) -> None:
        assert batch.tail_rows is not None, "formats whose scales span a block need tail_rows"
        completing, whole, waiting = [], [], []  # indices into the step's tokens
        completing_seqs, waiting_seqs = [], []  # whose they are
        ends = []  # the token that fills each block, those of completed tails first
        completed_seqs, whole_ends = [], []
        start = 0
        for seq, (length, count) in enumerate(zip(batch.host_seq_lens, batch.host_query_lens, strict=True)):
            first = length - count
            shift = start - first  # from position to index
            boundary = min(length, -(-first // block_size) * block_size)
            full = max(boundary, length // block_size * block_size)
            completing += range(first + shift, boundary + shift)
            completing_seqs += [seq] * (boundary - first)
            if first < boundary and boundary % block_size == 0:
                ends.append(boundary - 1 + shift)
                completed_seqs.append(seq)
            whole += range(boundary + shift, full + shift)
            whole_ends += range(boundary + shift + block_size - 1, full + shift, block_size)
            waiting += range(full + shift, length + shift)
            waiting_seqs += [seq] * (length - full)
            start += count

        def index(values: Sequence[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=batch.slot_mapping.device)

        rows, offsets = batch.tail_rows.long(), batch.slot_mapping % block_size
        self._completing, self._waiting, self._whole = index(completing), index(waiting), index(whole)
        self._completing_at = rows[index(completing_seqs)], offsets[self._completing]
        self._waiting_at = rows[index(waiting_seqs)], offsets[self._waiting]
        self._completed_rows = rows[index(completed_seqs)]
        self._blocks = batch.slot_mapping[index(ends + whole_ends)] // block_size

    def pass_through(self, new: torch.Tensor, tail: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Move ``new`` on; the tokens of blocks that are full now [n * block_size, heads, D], and those blocks [n]."""
        row, offset = self._completing_at
        tail[row, :, offset] = new[self._completing]
        completed = tail[self._completed_rows].transpose(1, 2).flatten(0, 1)
        x = torch.cat([completed, new[self._whole]])
        row, offset = self._waiting_at
        tail[row, :, offset] = new[self._waiting]
        return x, self._blocks


class QuantisedReader:
    """Reads K and V of some sequences out of pages and tails; made once a step, used by every layer.

    block_table: int64 [num_seqs, max_blocks], any existing block where a sequence has none.
    """

    def __init__(
        self, block_table: torch.Tensor, lengths: Sequence[int], tail_rows: torch.Tensor | None, block_size: int
    ) -> None:
        self._block_table = block_table
        self._lengths = lengths
        self._tail_rows = tail_rows
        self._block_size = block_size

    @cached_property
    def _unused(self) -> torch.Tensor:
        """Slots behind a sequence's end, [num_seqs, 1, max_blocks * block_size, 1]."""
        device = self._block_table.device
        positions = torch.arange(self._block_table.shape[1] * self._block_size, device=device)
        return (positions >= torch.tensor(self._lengths, device=device)[:, None])[:, None, :, None]

    @cached_property
    def _unfinished(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sequences with an unfinished block, that block's place in their table, and their rows of the tails."""
        assert self._tail_rows is not None, "formats whose scales span a block need tail_rows"
        size, device = self._block_size, self._block_table.device
        pairs = [(i, length // size) for i, length in enumerate(self._lengths) if length % size]
        seqs, places = torch.tensor(pairs, dtype=torch.int64, device=device).view(-1, 2).unbind(1)
        return seqs, places, self._tail_rows.long()[seqs]

    def read(self, kv: QuantisedKVPages, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as ``dtype`` [num_seqs, num_kv_heads, max_blocks * block_size, D], zeros behind a sequence's end."""
        return (
            self._read_side(kv.k, kv.head_dim_k, kv.k_tail, dtype),
            self._read_side(kv.v, kv.head_dim_v, kv.v_tail, dtype),
        )

    def _read_side(
        self, pages: QuantisedPages, head_dim: int, tail: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        values = read_blocks(pages, head_dim, self._block_table.flatten(), dtype)
        values = values.unflatten(0, self._block_table.shape)
        if tail is not None:
            seqs, places, rows = self._unfinished
            values[seqs, places] = tail[rows].to(dtype)
        # What was never written may be NaN, which no mask removes from 0 x NaN.
        return values.transpose(1, 2).flatten(2, 3).masked_fill(self._unused, 0)
