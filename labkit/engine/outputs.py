"""What a request gives back; names follow vLLM.

The values are not frozen: when streaming, each request gets new ones each step, and freezing makes them three times as
slow to make.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from labkit.scheduling import Request

from .detokenizer import Detokenizer


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural-log probability of a token; ``rank`` counts from 1, None if beyond those asked for."""

    logprob: float
    rank: int | None
    decoded_token: str | None


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence, as far as it has come.

    Attributes:
        text: without what could still become a stop string, until the sequence has finished.
        finish_reason: None while it runs; stop, length, abort or error.
        stop_reason: the stop string or stop token id that ended it; None for the end-of-sequence token; for an
            error, what went wrong.
        cumulative_logprob: sum over the chosen tokens, if logprobs were asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """When things happened, in seconds on the engine's clock, and how often the request lost its blocks."""

    arrival_time: float
    first_token_time: float | None
    last_token_time: float | None
    num_preemptions: int

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass(slots=True)
class RequestOutput:
    """A request and what was generated for it so far, one output a sequence."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    num_cached_tokens: int
    metrics: RequestMetrics


class _Sequence:
    """One sample of a request, its text, and how it ended."""

    def __init__(self, request: Request, detokenizer: Detokenizer | None) -> None:
        self.request = request
        self.detokenizer = detokenizer
        self.num_seen_tokens = 0
        self.stop_string: str | None = None

    def take_in(self) -> str | None:
        """Detokenise what is new; returns the stop string that ended the sequence's text, if one did."""
        request, detokenizer = self.request, self.detokenizer
        if detokenizer is None or self.stop_string is not None:
            return self.stop_string
        new = request.output_token_ids[self.num_seen_tokens :]
        self.num_seen_tokens += len(new)
        ended_by_token = request.finish_reason == "stop"
        if ended_by_token and not request.sampling_params.include_stop_str_in_output:
            new = new[:-1]  # the stop token itself is not text
        for token_id in new:
            if detokenizer.append(token_id) is not None:
                break
        if request.finish_reason is not None:
            detokenizer.finish()
        self.stop_string = detokenizer.stop_string
        return self.stop_string


class RequestTracker:
    """Follows one request from the engine's side and makes its :class:`RequestOutput`."""

    def __init__(self, request: Request, prompt: str | None, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.request = request
        self.prompt = prompt
        self._tokenizer = tokenizer
        self._prompt_token_ids = request.prompt_token_ids
        self._sequences: dict[int, _Sequence] = {}
        self._first_token_time: float | None = None
        self._last_token_time: float | None = None

    @property
    def finished(self) -> bool:
        """Whether every sequence has ended."""
        request = self.request
        if len(self._sequences) == request.sampling_params.n:
            return None not in [s.request.finish_reason for s in self._sequences.values()]
        return request.finish_reason is not None and request.num_output_tokens == 0  # it ended before it forked

    def update(self, request: Request, now: float) -> str | None:
        """Take in a sequence that got tokens or ended; returns the stop string that its text has reached, if any."""
        sequence = self._sequences.get(request.sample_index)
        if sequence is None:
            sequence = self._sequences[request.sample_index] = _Sequence(request, self._new_detokenizer())
        if request.num_output_tokens:
            self._first_token_time = self._first_token_time or now
            self._last_token_time = now
        return sequence.take_in()

    def output(self, finished: bool) -> RequestOutput:
        """A snapshot of the request."""
        params = self.request.sampling_params
        sequences = list(self._sequences.values()) or [_Sequence(self.request, None)]
        if len(sequences) > 1:
            sequences.sort(key=lambda sequence: sequence.request.sample_index)
        prompt_logprobs = None
        if params.prompt_logprobs is not None:
            computed = self.request.prompt_logprobs
            prompt_logprobs = [None, *(self._with_ranks(row, params.prompt_logprobs) for row in computed if row)]
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=[self._completion(s) for s in sequences],
            finished=finished,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=self.request.num_cached_tokens,
            metrics=RequestMetrics(
                self.request.arrival_time or 0.0,
                self._first_token_time,
                self._last_token_time,
                sum([s.request.num_preemptions for s in sequences]),
            ),
        )

    # ------------------------------------------------------------------ inside

    def _new_detokenizer(self) -> Detokenizer | None:
        if self._tokenizer is None:
            return None
        params = self.request.sampling_params
        return Detokenizer(
            self._tokenizer,
            self._prompt_token_ids,
            stop=tuple(params.stop or ()),
            min_tokens=params.min_tokens,
            skip_special_tokens=params.skip_special_tokens,
            include_stop_str=params.include_stop_str_in_output,
        )

    def _completion(self, sequence: _Sequence) -> CompletionOutput:
        request, count = sequence.request, sequence.request.sampling_params.logprobs
        token_ids = request.output_token_ids
        finish_reason, stop_reason = request.finish_reason, request.stop_reason
        if sequence.stop_string is not None:  # also if the same token was the last that max_tokens allows
            finish_reason, stop_reason = "stop", sequence.stop_string
        text = "" if sequence.detokenizer is None else sequence.detokenizer.visible(finish_reason is not None)
        logprobs = cumulative = None
        if count is not None:
            logprobs = [self._with_ranks(row, count) for row in request.logprobs]
            chosen = zip(request.logprobs, token_ids, strict=True)
            cumulative = sum(row[token_id] for row, token_id in chosen)
        return CompletionOutput(request.sample_index, text, token_ids, finish_reason, stop_reason, cumulative, logprobs)

    def _with_ranks(self, row: Mapping[int, float], count: int) -> dict[int, Logprob]:
        likeliest = sorted(row, key=lambda token_id: -row[token_id])[:count]
        ranks = {token_id: rank for rank, token_id in enumerate(likeliest, 1)}
        return {t: Logprob(logprob, ranks.get(t), self._decode(t)) for t, logprob in row.items()}

    def _decode(self, token_id: int) -> str | None:
        return None if self._tokenizer is None else str(self._tokenizer.decode([token_id]))
