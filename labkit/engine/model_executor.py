"""The executor that runs a real model: stage inputs, one forward pass over the paged cache, sample."""

from __future__ import annotations

import inspect
import time
from collections import deque
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from labkit.scheduling import ScheduledRequest, StepPlan, StepResult

from .backends import Backend, PagedAttention
from .forward_context import attention_handled_by
from .input_batch import InputBatch, stage_inputs
from .kv_storage import KVStorage
from .sampler import SamplingRow, sample, top_logprobs


class PagedForward:
    """The attention handler of one forward pass: writes each layer's K and V to the cache, then attends to it."""

    def __init__(self, storage: KVStorage, attention: PagedAttention) -> None:
        self._storage = storage
        self._attention = attention

    def __call__(
        self,
        layer_idx: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        pages = self._storage.pages(layer_idx)
        if self._storage.shapes[layer_idx].source == layer_idx:
            self._attention.write(k, v, pages)
        return self._attention.attend(
            q, pages, scale=scale, sliding_window=sliding_window, softcap=softcap, sinks=sinks
        )


@dataclass(slots=True)
class _LogitsRows:
    """Which tokens of the batch need logits: for prompt_logprobs the prompt's, for sampling the last of a request."""

    rows: list[int] = field(default_factory=list)
    prompts: list[tuple[ScheduledRequest, int, int]] = field(default_factory=list)  # entry, first row, number
    samples: list[SamplingRow] = field(default_factory=list)
    sample_rows: list[int] = field(default_factory=list)  # into ``rows``

    @classmethod
    def of(cls, plan: StepPlan) -> _LogitsRows:
        wanted = cls()
        start = 0
        for entry in plan.requests:
            request, end = entry.request, start + entry.num_scheduled_tokens
            if request.sampling_params.prompt_logprobs is not None:
                # The logits at position p speak of the token at p + 1, which must still belong to the prompt.
                count = min(entry.num_scheduled_tokens, request.num_prompt_tokens - 1 - entry.num_computed_tokens)
                if count > 0:
                    wanted.prompts.append((entry, len(wanted.rows), count))
                    wanted.rows.extend(range(start, start + count))
            if entry.num_samples:
                wanted.sample_rows += [len(wanted.rows)] * entry.num_samples
                wanted.rows.append(end - 1)
                position = entry.num_computed_tokens + entry.num_scheduled_tokens
                wanted.samples += [
                    SamplingRow(request, request.sample_index + i, position) for i in range(entry.num_samples)
                ]
            start = end
        return wanted


class ModelExecutor:
    """Runs step plans with a Hugging Face model whose attention is ours (see attention.py).

    All requests of a step go through the model as one flattened sequence; the cache is never handed to the model.
    """

    depth = 1

    def __init__(self, model: PreTrainedModel, storage: KVStorage, backend: Backend) -> None:
        self.model = model
        self.storage = storage
        self.backend = backend
        self.device = model.device
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._results: deque[StepResult] = deque()

    def reset(self) -> None:
        """Drop results that nobody will collect."""
        self._results.clear()

    def now(self) -> float:
        """Seconds on the machine's monotonic clock."""
        return time.perf_counter()

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> None:
        """Run a step; the result waits for :meth:`collect`."""
        self.storage.copy_blocks(plan.copies)
        batch = stage_inputs(plan, self.storage.block_size, self.device)
        wanted = _LogitsRows.of(plan)
        logits = self.forward(batch, wanted.rows)
        self._results.append(self._result(plan, wanted, logits))

    def collect(self) -> StepResult:
        """The oldest result."""
        return self._results.popleft()

    def forward(self, batch: InputBatch, logits_rows: list[int]) -> torch.Tensor:
        """One forward pass; the logits of the given rows of the batch, float32 [len(logits_rows), vocab_size]."""
        rows = torch.tensor(logits_rows, dtype=torch.int64, device=self.device)
        attention = self.backend(batch, self.storage.block_size)
        options = {"logits_to_keep": rows} if self._keeps_logits else {}
        with attention_handled_by(PagedForward(self.storage, attention)):
            output = self.model(batch.token_ids[None], position_ids=batch.positions[None], use_cache=False, **options)
        logits = output.logits[0] if self._keeps_logits else output.logits[0, rows]
        return logits.float()

    def _result(self, plan: StepPlan, wanted: _LogitsRows, logits: torch.Tensor) -> StepResult:
        prompt_logprobs = {}
        for entry, first, count in wanted.prompts:
            request, begin = entry.request, entry.num_computed_tokens
            asked = request.sampling_params.prompt_logprobs or 0
            next_tokens = request.token_ids[begin + 1 : begin + 1 + count]
            prompt_logprobs[request.request_id] = top_logprobs(
                logits[first : first + count], [asked] * count, next_tokens
            )
        if not wanted.samples:
            return StepResult({}, prompt_logprobs=prompt_logprobs)
        if wanted.sample_rows != list(range(len(logits))):
            logits = logits[torch.tensor(wanted.sample_rows, device=logits.device)]
        asked = [row.request.sampling_params.logprobs for row in wanted.samples]
        raw = logits.clone() if any(count is not None for count in asked) else None
        tokens = sample(logits, wanted.samples).tolist()  # the step's one wait for the device
        table = [] if raw is None else top_logprobs(raw, [count or 0 for count in asked], tokens)
        token_ids, logprobs = {}, {}
        start = 0
        for entry in plan.requests:
            if entry.num_samples:
                end = start + entry.num_samples
                token_ids[entry.request.request_id] = tokens[start:end]
                if asked[start] is not None:
                    logprobs[entry.request.request_id] = table[start:end]
                start = end
        return StepResult(token_ids, logprobs, prompt_logprobs)
