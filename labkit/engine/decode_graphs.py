"""CUDA graphs of the decode step: the whole forward pass launched at once, for a few batch sizes.

A decode step of a small batch is hundreds of short kernels; launching them one by one takes the host longer than the
GPU needs to run them. A graph records the launches once and replays them with one call. It replays fixed addresses
and shapes, so each step's inputs are copied into buffers that stay, and a batch runs in the smallest captured size
that holds it:

    rows        0      1      2      3      4   ...   7        captured size 8, five requests decode
    token ids   a      b      c      d      e    0 0 0
    seq_lens    37     5      912    64     8    0 0 0         a row of length 0 reads nothing,
    slots       ...                              -1 -1 -1      slot -1 writes nothing
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from tqdm.auto import tqdm

from labkit.scheduling import Request, StepPlan

from .input_batch import InputBatch

CAPTURE_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
_TOKEN, _CARRIED, _POSITION, _SLOT, _SEQ_LEN, _TAIL = range(6)  # rows of the staged numbers
_PADDING = np.array([0, -1, 0, -1, 0, 0])[:, None]


def capture_sizes(max_num_seqs: int) -> list[int]:
    """The batch sizes that get a graph, in ascending order; the last is ``max_num_seqs``."""
    return [size for size in CAPTURE_SIZES if size < max_num_seqs] + [max_num_seqs]


class DecodeGraphs:
    """Runs decode batches through captured graphs.

    ``forward`` maps an :class:`InputBatch` to logits [num_seqs, vocab_size]; it is captured for each size up to
    ``max_num_seqs``. ``newest_tokens`` int64 [max_num_seqs] holds the tokens that the last step sampled: a row whose
    token the host does not know yet takes it from there.
    """

    def __init__(
        self,
        forward: Callable[[InputBatch], torch.Tensor],
        newest_tokens: torch.Tensor,
        *,
        max_num_seqs: int,
        max_blocks: int,
        block_size: int,
        has_tails: bool = False,
    ) -> None:
        """``max_blocks`` is the longest block table; ``has_tails``: some format needs ``tail_rows``."""
        device = newest_tokens.device
        self._forward = forward
        self._newest_tokens = newest_tokens
        self._block_size = block_size
        self._has_tails = has_tails
        self._sizes = capture_sizes(max_num_seqs)
        self._numbers = torch.from_numpy(np.repeat(_PADDING, max_num_seqs, axis=1)).to(device)
        self._block_table = torch.zeros(max_num_seqs, max_blocks, dtype=torch.int32, device=device)
        self._query_start_loc = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device)
        # The rows as the host has them, and two sets of pinned memory to send them from, since the copies of the last
        # step may still be under way.
        self._rows: list[Request] = []
        self._host_numbers = np.repeat(_PADDING, max_num_seqs, axis=1)
        self._host_tables = np.zeros((max_num_seqs, max_blocks), dtype=np.int32)
        self._pinned = [
            (
                torch.zeros(len(_PADDING), max_num_seqs, dtype=torch.int64, pin_memory=True),
                torch.zeros(max_num_seqs, max_blocks, dtype=torch.int32, pin_memory=True),
            )
            for _ in range(2)
        ]
        self._in_order = list(range(max_num_seqs))
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self.reserved_bytes = self.allocated_bytes = 0  # of torch's allocator, for the replays; set by capture

    def capture(self) -> None:
        """Capture all sizes, the largest first, so that the smaller ones fit into its memory."""
        pool = torch.cuda.graph_pool_handle()
        for size in tqdm(sorted(self._sizes, reverse=True), desc="Capturing CUDA graphs", unit="size", leave=False):
            self._run_static(size)  # compiles kernels and fills workspaces, which a capture must not do
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                logits = self._run_static(size)
            self._graphs[size] = graph, logits
        torch.cuda.synchronize()
        segments = [segment for segment in torch.cuda.memory_snapshot() if segment["segment_pool_id"] == pool]
        self.reserved_bytes = sum(segment["total_size"] for segment in segments)
        self.allocated_bytes = sum(segment["allocated_size"] for segment in segments)

    def fits(self, plan: StepPlan) -> bool:
        """Whether ``plan`` is one token of each request, for a number of requests that was captured."""
        return len(plan.requests) <= self._sizes[-1] and plan.num_scheduled_tokens == len(plan.requests)

    def run(self, plan: StepPlan, carried: Sequence[int], tail_rows: Sequence[int] | None = None) -> torch.Tensor:
        """Replay a decode step; logits [num_requests, vocab_size], valid until the next replay.

        ``carried[i]`` is where in ``newest_tokens`` request i finds its input token, or -1 if the host knows it;
        ``tail_rows[i]`` where its unfinished block waits.
        """
        count = len(plan.requests)
        size = next(s for s in self._sizes if s >= count)
        self._stage(plan, carried, tail_rows, size)
        graph, logits = self._graphs[size]
        graph.replay()
        return logits[:count]

    def _run_static(self, size: int) -> torch.Tensor:
        """The forward pass of ``size`` rows on the fixed buffers."""
        numbers = self._numbers[:, :size]
        carried = numbers[_CARRIED]
        newest = self._newest_tokens[carried.clamp(min=0)]
        return self._forward(
            InputBatch(
                token_ids=torch.where(carried >= 0, newest, numbers[_TOKEN]),
                positions=numbers[_POSITION],
                slot_mapping=numbers[_SLOT],
                block_table=self._block_table[:size],
                seq_lens=numbers[_SEQ_LEN].int(),
                query_start_loc=self._query_start_loc[: size + 1],
                host_seq_lens=[],
                host_query_lens=[1] * size,
                tail_rows=numbers[_TAIL].int() if self._has_tails else None,
            )
        )

    def _stage(self, plan: StepPlan, carried: Sequence[int], tail_rows: Sequence[int] | None, size: int) -> None:
        """Bring the rows up to date and start their copies to the device."""
        count = len(plan.requests)
        rows = [entry.request for entry in plan.requests]
        # Mostly the same requests decode again, each one token further, with tokens that the device has in this order.
        if (
            rows == self._rows
            and carried == self._in_order[:count]
            and plan.requests[0].num_computed_tokens == self._host_numbers[_POSITION, 0] + 1  # no step came between
            and not plan.copies
            and not plan.ended_ids
        ):
            self._go_on(plan)
        else:
            self._lay_out(plan, carried)
            self._rows = rows
        if tail_rows is not None:
            self._host_numbers[_TAIL, :count] = tail_rows
        numbers = self._host_numbers
        numbers[:, count:size] = _PADDING
        position = numbers[_POSITION, :count]
        blocks = self._host_tables[np.arange(count), position // self._block_size].astype(np.int64)
        numbers[_SLOT, :count] = blocks * self._block_size + position % self._block_size
        numbers[_SEQ_LEN, :count] = position + 1

        self._pinned.reverse()
        pinned_numbers, pinned_tables = self._pinned[0]
        pinned_numbers.numpy()[:] = numbers
        pinned_tables.numpy()[:count] = self._host_tables[:count]
        self._numbers.copy_(pinned_numbers, non_blocking=True)
        self._block_table[:count].copy_(pinned_tables[:count], non_blocking=True)

    def _lay_out(self, plan: StepPlan, carried: Sequence[int]) -> None:
        """Write every row anew."""
        count = len(plan.requests)
        tokens, positions = [0] * count, [0] * count
        for row, (request, position, _, block_table, _) in enumerate(plan.requests):
            if carried[row] < 0:
                tokens[row] = request.token_ids[position]
            positions[row] = position
            self._host_tables[row, : len(block_table)] = block_table
        self._host_numbers[_TOKEN, :count] = tokens
        self._host_numbers[_CARRIED, :count] = carried
        self._host_numbers[_POSITION, :count] = positions

    def _go_on(self, plan: StepPlan) -> None:
        """Move every row one token on; those that begin a new block get the new end of their table."""
        count = len(plan.requests)
        self._host_numbers[_CARRIED, :count] = self._in_order[:count]
        position = self._host_numbers[_POSITION, :count]
        position += 1
        for row in np.flatnonzero(position % self._block_size == 0):
            block_table = plan.requests[row].block_table
            self._host_tables[row, : len(block_table)] = block_table
