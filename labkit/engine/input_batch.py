"""A step's inputs as tensors: the tokens of all requests, one after the other, and where their K and V lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from labkit.scheduling import StepPlan

from .upload import upload_array


@dataclass(frozen=True, slots=True)
class InputBatch:
    """A flattened batch.

        request A: 3 new tokens   B: 1   C: 2        query_start_loc = [0, 3, 4, 6]
        token_ids  [a5 a6 a7 | b90 | c0 c1]          positions = [5 6 7 | 90 | 0 1]

    Attributes:
        token_ids, positions, slot_mapping: int64 [num_tokens]; slot = block * block_size + offset.
        block_table: int32 [num_seqs, max_blocks], rows padded with 0.
        seq_lens: int32 [num_seqs], context length with this step's tokens.
        query_start_loc: int32 [num_seqs + 1].
        host_seq_lens, host_query_lens: lengths as Python numbers.
        tail_rows: int32 [num_seqs], where each sequence's unfinished block waits; None if no format needs that.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    host_seq_lens: list[int]
    host_query_lens: list[int]
    tail_rows: torch.Tensor | None = None

    @property
    def max_query_len(self) -> int:
        """Most new tokens of any sequence; 1 means that all decode."""
        return max(self.host_query_lens)


def stage_inputs(
    plan: StepPlan, block_size: int, device: torch.device, tail_rows: Sequence[int] | None = None
) -> InputBatch:
    """Lay out the tokens of ``plan`` and move them to ``device``."""
    num_seqs, num_tokens = len(plan.requests), plan.num_scheduled_tokens
    # Rows begin at multiples of 16 bytes: Triton compiles a kernel of its own for pointers that do not.
    tokens = np.empty((3, _round_up(num_tokens, 2)), dtype=np.int64)  # token ids, positions, slots
    block_table = np.zeros((num_seqs, max(len(entry.block_table) for entry in plan.requests)), dtype=np.int32)
    lengths = np.zeros((3, _round_up(num_seqs + 1, 4)), dtype=np.int32)  # query_start_loc; seq_lens; tail rows
    if tail_rows is not None:
        lengths[2, :num_seqs] = tail_rows
    start = 0
    for row, entry in enumerate(plan.requests):
        first, count = entry.num_computed_tokens, entry.num_scheduled_tokens
        end, last = start + count, first + count
        block_table[row, : len(entry.block_table)] = entry.block_table
        if count == 1:
            known = entry.request.token_ids
            tokens[0, start] = known[first] if first < len(known) else 0  # not known yet: the executor fills it in
            tokens[1, start] = first
            tokens[2, start] = entry.block_table[first // block_size] * block_size + first % block_size
        else:
            tokens[0, start:end] = entry.request.token_ids[first:last]
            positions = np.arange(first, last)
            tokens[1, start:end] = positions
            blocks = block_table[row, positions // block_size].astype(np.int64)
            tokens[2, start:end] = blocks * block_size + positions % block_size
        lengths[0, row + 1], lengths[1, row] = end, last
        start = end
    token_ids, positions, slots = upload_array(tokens, device)[:, :num_tokens]
    device_lengths = upload_array(lengths, device)
    return InputBatch(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=slots,
        block_table=upload_array(block_table, device),
        query_start_loc=device_lengths[0, : num_seqs + 1],
        seq_lens=device_lengths[1, :num_seqs],
        host_seq_lens=lengths[1, :num_seqs].tolist(),
        host_query_lens=[entry.num_scheduled_tokens for entry in plan.requests],
        tail_rows=None if tail_rows is None else device_lengths[2, :num_seqs],
    )


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
