"""Continuous batching: each step, a token budget is shared among those who run and those who wait."""

from __future__ import annotations

import math
from collections.abc import Iterator

from labkit.memory import KVAllocator
from labkit.observe import RequestFinished, RequestPreempted

from .config import PreemptionCost, SchedulerConfig
from .request import Request, RequestStatus
from .request_queues import RequestQueues
from .step import ScheduledRequest, StepPlan, StepResult
from .swap_traffic import SwapTraffic

MAX_PREEMPTIONS = 3
"""After this many, a request waits until all that run, and it, can reach their full length."""


class Scheduler:
    """Decides who runs next, and has the blocks ready for them.

    A step serves running requests first, in order of priority and arrival, then admits waiting ones while the
    budget lasts. A request that cannot grow takes the blocks of the last one in that order, which is swapped out to
    host memory if that is cheaper and there is room, and starts again later otherwise. While blocks are on their way
    nobody is preempted: who cannot grow sits the step out. Progress holds by construction:

    - the first in order is never preempted, and alone always fits (checked when it is added), so it ends;
    - a request is admitted only when blocks for all its present tokens are free, so no two half-computed prompts
      wait for each other;
    - nobody overtakes in the queue, and after ``MAX_PREEMPTIONS`` a request comes back only when it and all that
      run can reach their full length, so preemptions per request are bounded.
    """

    def __init__(self, config: SchedulerConfig, kv: KVAllocator) -> None:
        """Raises ValueError if the pool cannot hold one sequence of ``max_model_len`` tokens."""
        if kv.blocks_for(config.max_model_len) > kv.num_blocks:
            raise ValueError(
                f"max_model_len={config.max_model_len} needs {kv.blocks_for(config.max_model_len)} blocks of "
                f"{kv.block_size} tokens, the pool has {kv.num_blocks}: lower max_model_len to "
                f"{kv.num_blocks * kv.block_size} or less, or make the pool larger (num_gpu_blocks_override, "
                f"gpu_memory_utilization)"
            )
        self.config = config
        self.kv = kv
        self.preemption_cost = PreemptionCost()  # replace it by what was measured
        self._queues = RequestQueues()
        self.running, self.waiting = self._queues.running, self._queues.waiting  # in the order of service
        self.num_steps = 0
        self._ended_ids: list[str] = []
        self._swaps = SwapTraffic(kv)
        self._watermark_blocks = math.ceil(config.watermark * kv.num_blocks)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._queues)

    def unfinished(self, request_id: str) -> list[Request]:
        """The unfinished sequences of a request: itself, and what was forked from it."""
        return self._queues.family(request_id)

    # ------------------------------------------------------------------ requests come and go

    def validate(self, request: Request) -> None:
        """Raise ValueError, naming the numbers and the knobs, if ``request`` may not be added."""
        n, limit = request.sampling_params.n, self.config.max_model_len
        if request.num_tokens == 0:
            raise ValueError("prompt must hold at least one token, got none")
        if request.num_tokens >= limit:
            raise ValueError(
                f"prompt of {request.num_tokens} tokens leaves no room for output: it must be shorter than "
                f"max_model_len={limit}; shorten the prompt or raise max_model_len"
            )
        if n > self.config.max_num_seqs:
            raise ValueError(f"n must be <= max_num_seqs ({self.config.max_num_seqs}), got {n}")
        if n > 1 and not self.kv.can_share:
            raise ValueError(f"n must be 1 with an allocator that cannot share blocks, got {n}; use the paged one")
        if self._queues.has_id_of(request) or request.request_id in self.kv:
            raise ValueError(f"request_id {request.request_id!r} is already in use by an unfinished request")

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError as :meth:`validate` does."""
        self.validate(request)
        request.max_num_tokens = request.max_total_tokens(self.config.max_model_len)
        self._queues.add(request)

    def finish(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        """End a request now, wherever it stands, and free its blocks."""
        was_running = request.status is RequestStatus.RUNNING
        self._queues.finish(request)
        if was_running:
            self._give_back(request)
        elif request.num_computed_tokens:  # they are in host memory
            self.kv.free(request.request_id)
        request.finish_reason, request.stop_reason = reason, stop_reason
        self._ended_ids.append(request.request_id)
        self._record(RequestFinished(request.request_id, reason, request.num_output_tokens))

    # ------------------------------------------------------------------ one step

    def schedule(self) -> StepPlan:
        """Choose the next step's requests and reserve their blocks; an empty plan means nothing can run now.

        May be called again before the result is in (see :meth:`Request.num_runnable_tokens`).
        """
        budget = self.config.max_num_batched_tokens
        scheduled: list[ScheduledRequest] = []
        copies: list[tuple[int, int]] = []
        everyone_could_grow = True

        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            num_tokens = min(request.num_runnable_tokens(), budget)
            if num_tokens == 0:
                index += 1
                continue
            new_copies = self.kv.extend(request.request_id, request.num_computed_tokens, num_tokens)
            if new_copies is None:
                everyone_could_grow = False
                if self._swaps:
                    index += 1
                else:
                    self._preempt(self.running[-1])  # perhaps this very request: then the loop ends
                continue
            copies += new_copies
            scheduled.append(self._scheduled(request, num_tokens))
            budget -= num_tokens
            index += 1

        if everyone_could_grow and budget > 0:
            for request in self._admissions():
                num_tokens = min(request.num_runnable_tokens(), budget)
                if num_tokens > 0:
                    scheduled.append(self._scheduled(request, num_tokens))
                    budget -= num_tokens
                if budget == 0:
                    break

        swaps = self._swaps.load(self.num_steps)
        plan = StepPlan(self.num_steps, tuple(scheduled), tuple(copies), tuple(self._ended_ids), *swaps)
        if not plan.is_empty:
            self.num_steps += 1
            self._ended_ids.clear()
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> list[Request]:
        """Take in a step's result: append tokens, fork, finish, free. Returns the requests that changed.

        Results come in the order of their plans. Requests in ``result.failed`` end with finish reason "error";
        requests that ended or were preempted while the step ran are passed over.
        """
        self.end_swaps(plan, result.swaps_done)
        changed: list[Request] = []
        commit, failed, prompt_logprobs = self.kv.commit, result.failed, result.prompt_logprobs
        running = RequestStatus.RUNNING
        for request, first, num_tokens, _, num_samples in plan.requests:
            request_id = request.request_id
            if request.status is not running:
                continue
            if request_id in failed:
                self.finish(request, "error", str(failed[request_id]))
                changed.append(request)
                continue
            commit(request_id, request.token_ids, first + num_tokens)
            if rows := prompt_logprobs.get(request_id):  # after a preemption they come a second time
                request.prompt_logprobs[first : first + len(rows)] = rows
            if num_samples:
                request.num_pending_tokens -= num_samples
                changed += self._take_samples(request, result)
        return changed

    def end_swaps(self, plan: StepPlan, done: bool) -> None:
        """Take in that a plan's copies from and to host memory have landed, or will never be made.

        :meth:`update` does it; call this for a plan that will have no result.
        """
        for request in self._swaps.land(plan):
            if not done and request.status is not RequestStatus.FINISHED:
                self._compute_again(request)

    # ------------------------------------------------------------------ inside

    def _scheduled(self, request: Request, num_tokens: int) -> ScheduledRequest:
        first = request.num_computed_tokens
        request.num_computed_tokens += num_tokens
        reaches_end = request.num_computed_tokens == len(request.token_ids) + request.num_pending_tokens
        num_samples = request.num_sequences if reaches_end else 0
        request.num_pending_tokens += num_samples
        return ScheduledRequest(request, first, num_tokens, request.block_table, num_samples)

    def _admissions(self) -> Iterator[Request]:
        """Waiting requests that may run now, each taken off the queue as it is given out."""
        if not self.waiting:
            return
        num_sequences = sum(request.num_sequences for request in self.running)
        while self.waiting:
            request = self.waiting[0]
            num_sequences += request.num_sequences
            if num_sequences > self.config.max_num_seqs:
                return
            if request.num_preemptions >= MAX_PREEMPTIONS and not self._all_can_end_with(request):
                return
            if not self._give_blocks(request):
                return
            self._queues.start_first()
            request.block_table = self.kv.block_table(request.request_id)
            request.num_computed_tokens = self.kv.num_computed_tokens(request.request_id)
            if request.num_preemptions == 0:
                request.num_cached_tokens = request.num_computed_tokens
            yield request

    def _give_blocks(self, request: Request) -> bool:
        """Give a waiting request the blocks of its tokens, cached ones first; False if there are too few."""
        keep_free = self._watermark_blocks if self.running else 0
        wants_logprobs = request.sampling_params.prompt_logprobs is not None  # of tokens that a hit would not compute
        prefix = () if wants_logprobs else self.kv.match_prefix(request.token_ids, request.cache_salt)
        if request.num_computed_tokens:
            return self._swaps.bring_back(request, prefix, keep_free)
        return self.kv.admit(
            request.request_id,
            request.num_tokens,
            max_total_tokens=request.max_num_tokens,
            prefix=prefix,
            salt=request.cache_salt,
            keep_free=keep_free,
        )

    def _all_can_end_with(self, request: Request) -> bool:
        """Whether there are blocks for the full length of all that run, and of ``request`` besides."""
        to_come = sum(self.kv.blocks_for(r.max_num_tokens) - len(r.block_table) for r in self.running)
        return self.kv.blocks_for(request.max_num_tokens) + to_come <= self.kv.num_free_blocks

    def _preempt(self, request: Request) -> None:
        """Take a request's blocks; its tokens are kept, and what is computed of them if swapping is the cheaper way.

        What steps under way compute is lost.
        """
        num_computed_tokens = self.kv.num_computed_tokens(request.request_id)
        prefers_swap = self.preemption_cost.prefers_swap(self.kv.blocks_for(num_computed_tokens), num_computed_tokens)
        if prefers_swap and self._swaps.send_out(request):
            self._wait(request)
        else:
            self._compute_again(request)
        request.num_preemptions += 1
        self._record(RequestPreempted(request.request_id))

    def _compute_again(self, request: Request) -> None:
        """Take all that a request has, in the pool or in host memory; it starts again when it is admitted."""
        self.kv.free(request.request_id)
        request.num_computed_tokens = 0
        self._wait(request)

    def _wait(self, request: Request) -> None:
        """Have a request without blocks wait for its turn."""
        request.num_pending_tokens = 0
        if request.status is RequestStatus.RUNNING:
            self._queues.stop(request)
            self._ended_ids.append(request.request_id)

    def _take_samples(self, request: Request, result: StepResult) -> list[Request]:
        """Append a request's new tokens, forking it first if there are several; the sequences that got one."""
        tokens, logprobs = result.token_ids[request.request_id], result.logprobs.get(request.request_id)
        siblings = [request, *self._fork(request, len(tokens) - 1)] if len(tokens) > 1 else [request]
        for sample, sibling in enumerate(siblings):
            if logprobs is not None:
                sibling.logprobs.append(logprobs[sample])
            self._append(sibling, tokens[sample])
        return siblings

    def _fork(self, parent: Request, count: int) -> list[Request]:
        """The other sequences of a request with n > 1: the same prompt, and what they can have of its blocks."""
        children = []
        for sample_index in range(1, count + 1):
            child = parent.fork(sample_index)
            self.kv.fork(parent.request_id, child.request_id)
            child.block_table = self.kv.block_table(child.request_id)
            child.num_computed_tokens = self.kv.num_computed_tokens(child.request_id)
            self._queues.add_fork(child, parent)
            children.append(child)
        return children

    def _append(self, request: Request, token_id: int) -> None:
        request.token_ids.append(token_id)
        request.num_sequences = 1
        if token_id in request.stop_token_ids and request.num_output_tokens >= request.sampling_params.min_tokens:
            is_eos = token_id not in (request.sampling_params.stop_token_ids or ())
            self.finish(request, "stop", None if is_eos else token_id)
        elif len(request.token_ids) >= request.max_num_tokens:
            self.finish(request, "length")

    def _give_back(self, request: Request) -> None:
        """Free the blocks of a running request that has just ended."""
        self.kv.free(request.request_id)

    def _record(self, event: RequestFinished | RequestPreempted) -> None:
        if self.kv.events is not None:
            self.kv.events.append(event)
