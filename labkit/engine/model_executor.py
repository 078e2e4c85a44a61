"""The executor that runs a real model: stage inputs, one forward pass over the paged cache, sample."""

from __future__ import annotations

import inspect
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from labkit.scheduling import Request, StepPlan, StepResult

from .backends import Backend
from .decode_graphs import DecodeGraphs
from .device_memory import keep_for_good
from .forward_context import attention_handled_by
from .host_blocks import HostBlocks
from .input_batch import InputBatch, stage_inputs
from .kv_storage import KVStorage
from .logits_rows import LogitsRows
from .paged_forward import PagedForward
from .sampler import sample
from .submitted_step import SubmittedStep
from .tail_rows import TailRows
from .upload import Landings, upload

logger = logging.getLogger(__name__)


class ModelExecutor:
    """Runs step plans with a Hugging Face model whose attention is ours (see attention.py).

    All requests of a step go through the model as one flattened sequence; the cache is never handed to the model.
    On a GPU nothing waits in :meth:`submit`: sampled tokens stay on the device, where the next step finds them, and
    travel to the host meanwhile. Decode batches run through CUDA graphs once :meth:`capture_graphs` was called.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        storage: KVStorage,
        backend: Backend,
        max_num_seqs: int,
        host_blocks: HostBlocks | None = None,
        share_tokens: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        """``host_blocks`` is needed for plans that hold swaps.

        ``share_tokens`` overwrites sampled tokens [num_samples] with those of rank 0, where ranks share a model.
        """
        self.model = model
        self.host_blocks = host_blocks
        self._share_tokens = share_tokens
        self.storage = storage
        self.backend = backend
        self.device = model.device
        self.depth = 2 if self.device.type == "cuda" else 1
        self.graphs: DecodeGraphs | None = None
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._under_way: deque[SubmittedStep] = deque()
        self._newest_tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=self.device)
        self._newest_index: dict[str, int] = {}  # where in it a request's token of the last step lies
        self.tail_rows = TailRows(max_num_seqs) if storage.tails else None
        self._landings = Landings(max_num_seqs, self.depth + 1, self.device)
        self._fault: Exception | None = None
        self._lost: list[SubmittedStep] = []  # steps that the device never finished

    @property
    def has_failed(self) -> bool:
        """Whether the device failed, after which nothing may be asked of it any more."""
        return self._fault is not None

    def capture_graphs(self, max_num_seqs: int, max_blocks: int) -> None:
        """Capture the decode step for batches of up to ``max_num_seqs``; ``max_blocks`` is the longest block table.

        A model whose forward pass cannot be captured keeps launching its kernels one by one, and a warning says so.
        """
        graphs = DecodeGraphs(
            lambda batch: self._forward(batch, None),
            self._newest_tokens,
            max_num_seqs=max_num_seqs,
            max_blocks=max_blocks,
            block_size=self.storage.block_size,
            has_tails=self.tail_rows is not None,
        )
        try:
            with torch.inference_mode():
                graphs.capture()
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except RuntimeError as error:
            logger.warning("decode steps run without CUDA graphs: the model cannot be captured (%s)", error)
        else:
            self.graphs = graphs

    @torch.inference_mode()
    def warm_up(self, query_lens: Sequence[int]) -> None:
        """Compile what a step with that many new tokens of each sequence needs, so that no request waits for it.

        The sequences hold nothing else; nothing is written (slot -1), and the answers are dropped.
        """
        num_seqs, num_tokens = len(query_lens), sum(query_lens)
        starts = np.cumsum([0, *query_lens])
        ids = torch.zeros(num_tokens, dtype=torch.int64, device=self.device)
        width = -(-max(query_lens) // self.storage.block_size)
        lengths = upload(query_lens, torch.int32, self.device)
        batch = InputBatch(
            token_ids=ids,
            positions=ids,
            slot_mapping=ids - 1,
            block_table=torch.zeros(num_seqs, width, dtype=torch.int32, device=self.device),
            seq_lens=lengths,
            query_start_loc=upload(starts.tolist(), torch.int32, self.device),
            host_seq_lens=list(query_lens),
            host_query_lens=list(query_lens),
            tail_rows=torch.zeros_like(lengths) if self.tail_rows is not None else None,
        )
        self._forward(batch, (starts[1:] - 1).tolist()).argmax(-1)

    def now(self) -> float:
        """Seconds on the machine's monotonic clock."""
        return time.perf_counter()

    def reset(self) -> None:
        """Wait for the steps under way and drop their results."""
        if self._fault is not None:
            self._lost += self._under_way
        self._under_way.clear()
        self._newest_index.clear()
        if self.device.type == "cuda" and self._fault is None:
            torch.cuda.synchronize(self.device)

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> None:
        """Start a step. Raises RuntimeError if the device failed in an earlier one."""
        if self._fault is not None:
            raise RuntimeError(
                f"the device failed in an earlier step ({self._fault}); its memory cannot be trusted any more: "
                "restart the process"
            )
        landed = None
        if self.tail_rows is not None:
            self.tail_rows.release(plan.ended_ids)
        try:
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).query()  # raises if the device has failed meanwhile
            landed = self._start_swaps(plan)
            if plan.requests:
                self._compute(plan)
            else:
                self._under_way.append(SubmittedStep(plan, torch.empty(0, dtype=torch.int64), None))
            self._under_way[-1].landed = landed
        except Exception as error:
            self._newest_index.clear()
            self._note_fault(error)
            if landed is not None and self._fault is None:
                landed.synchronize()  # the caller may use the blocks again at once
            raise

    def drop_oldest(self) -> None:
        """Forget the oldest step's result without waiting for it: the step itself goes on."""
        self._under_way.popleft()

    def collect(self) -> StepResult:
        """The oldest step's result; waits until its tokens have arrived."""
        step = self._under_way.popleft()
        try:
            return step.result()
        except Exception as error:
            if self._note_fault(error):
                self._lost.append(step)
            raise

    def _start_swaps(self, plan: StepPlan) -> torch.cuda.Event | None:
        """Start the plan's copies from and to host memory, beside the steps to come."""
        if not (plan.swap_outs or plan.swap_ins):
            return None
        if self.host_blocks is None:
            raise RuntimeError("the plan swaps blocks, but this executor was made without host_blocks")
        return self.host_blocks.start_copies(plan.swap_outs, plan.swap_ins)

    def _compute(self, plan: StepPlan) -> None:
        self.storage.copy_blocks(plan.copies)
        carried = self._carried(plan)
        tail_rows = None
        if self.tail_rows is not None:
            tail_rows = [self.tail_rows.of(entry.request.request_id) for entry in plan.requests]
        if self.graphs is not None and self.graphs.fits(plan):
            logits = self.graphs.run(plan, carried, tail_rows)
            if all(entry.num_samples == 1 and entry.request.takes_argmax for entry in plan.requests):
                tokens = logits.argmax(-1)
                self._keep_newest(tokens, [entry.request for entry in plan.requests])
                self._under_way.append(SubmittedStep(plan, *self._landings.download(tokens)))
                return
            wanted = LogitsRows.of(plan)
            if wanted.rows != list(range(len(logits))):
                logits = logits[upload(wanted.rows, torch.int64, self.device)]
        else:
            batch = stage_inputs(plan, self.storage.block_size, self.device, tail_rows)
            self._fill_in(batch, carried)
            wanted = LogitsRows.of(plan)
            logits = self._forward(batch, wanted.rows)
        self._under_way.append(self._sampled(plan, wanted, logits))

    def _sampled(self, plan: StepPlan, wanted: LogitsRows, logits: torch.Tensor) -> SubmittedStep:
        """Draw the step's tokens and start their way to the host."""
        prompt_logits = logits if wanted.prompts else None
        if wanted.sample_rows != list(range(len(logits))):
            logits = logits[upload(wanted.sample_rows, torch.int64, self.device)]
        sample_logits = None
        if any(row.request.sampling_params.logprobs is not None for row in wanted.samples):
            sample_logits = logits.to(torch.float32, copy=True)  # sampling changes logits, and replays overwrite them
        tokens = sample(logits, wanted.samples)
        self._keep_newest(tokens, [row.request for row in wanted.samples])
        return SubmittedStep(plan, *self._landings.download(tokens), wanted, sample_logits, prompt_logits)

    def _keep_newest(self, tokens: torch.Tensor, requests: Sequence[Request]) -> None:
        """Leave the sampled tokens where the next step finds them."""
        if self._share_tokens is not None:
            self._share_tokens(tokens)
        self._newest_tokens[: len(tokens)] = tokens
        self._newest_index = {request.request_id: i for i, request in enumerate(requests)}

    def _carried(self, plan: StepPlan) -> list[int]:
        """For each request: where on the device its input token lies, or -1 if the host knows it."""
        return [
            self._newest_index[request.request_id] if first + count > len(request.token_ids) else -1
            for request, first, count, _, _ in plan.requests
        ]

    def _fill_in(self, batch: InputBatch, carried: Sequence[int]) -> None:
        """Put the tokens that only the device knows into a staged batch."""
        rows = [row for row, index in enumerate(carried) if index >= 0]
        if rows:
            into = batch.query_start_loc[1:][upload(rows, torch.int64, self.device)] - 1
            batch.token_ids[into] = self._newest_tokens[upload([carried[r] for r in rows], torch.int64, self.device)]

    def _forward(self, batch: InputBatch, rows: Sequence[int] | None) -> torch.Tensor:
        """One forward pass; logits of the given rows of the batch (None: of all), [num_rows, vocab_size]."""
        options = {}
        index = None if rows is None else upload(rows, torch.int64, self.device)
        if index is not None and self._keeps_logits:
            options["logits_to_keep"] = index
        attention = self.backend(batch, self.storage.block_size)
        with attention_handled_by(PagedForward(self.storage, attention)):
            output = self.model(batch.token_ids[None], position_ids=batch.positions[None], use_cache=False, **options)
        logits = output.logits[0]
        return logits if index is None or self._keeps_logits else logits[index]

    def _note_fault(self, error: Exception) -> bool:
        """Remember an error after which the device's memory cannot be trusted; running out of memory is none."""
        if not isinstance(error, torch.AcceleratorError):
            return False
        if self._fault is None:
            self._fault = error  # and with its traceback what the failing calls held
            keep_for_good(self)
        return True
