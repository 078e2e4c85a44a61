"""How a request wants its tokens chosen; names and meanings follow vLLM."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


def _require(condition: bool, name: str, value: Any, allowed: str) -> None:
    if not condition:
        raise ValueError(f"{name} must be {allowed}, got {value!r}")


def _require_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError(f"{name} must be a finite number, got {value!r}")


def _require_int(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {value!r}")


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """How to choose the tokens of a request, and when to stop.

    Raises TypeError or ValueError naming the argument, its value and the allowed range.

    Attributes:
        n: number of sequences for one prompt; they share the prompt's blocks.
        temperature: 0 is greedy.
        top_k: keep the k likeliest tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches top_p, in (0, 1].
        min_p: drop tokens less likely than min_p times the likeliest, in [0, 1].
        repetition_penalty: > 1 makes tokens of prompt and output less likely (Keskar et al. 2019, section 4.1).
        max_tokens: at most this many new tokens; None means up to the model's length.
        min_tokens: no stop token, end of sequence or stop string ends the request before this many.
        stop: strings that end the request; cut from the text unless include_stop_str_in_output.
        stop_token_ids: token ids that end the request, beside the model's end of sequence.
        ignore_eos: go on after the end-of-sequence token.
        seed: makes the request's random choices repeatable, whatever else runs.
        logprobs: log-probabilities of this many likeliest tokens at each new token (and of the chosen one).
        prompt_logprobs: the same for each prompt token.
        skip_special_tokens: leave special tokens out of the text.
        include_stop_str_in_output: keep the stop string that ended the request in the text.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        for name in ("n", "top_k", "min_tokens"):
            _require_int(name, getattr(self, name))
        for name in ("max_tokens", "seed", "logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _require_int(name, getattr(self, name))
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            _require_number(name, getattr(self, name))
        _require(self.n >= 1, "n", self.n, ">= 1")
        _require(self.temperature >= 0, "temperature", self.temperature, ">= 0")
        _require(self.top_k >= -1, "top_k", self.top_k, ">= 1, or 0 or -1 for no limit")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")
        _require(self.repetition_penalty > 0, "repetition_penalty", self.repetition_penalty, "> 0")
        if self.max_tokens is not None:
            _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, ">= 1, or None")
        _require(self.min_tokens >= 0, "min_tokens", self.min_tokens, ">= 0")
        if self.max_tokens is not None:
            allowed = f"<= max_tokens ({self.max_tokens})"
            _require(self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, allowed)
        if self.logprobs is not None:
            _require(self.logprobs >= 0, "logprobs", self.logprobs, ">= 0, or None")
        if self.prompt_logprobs is not None:
            _require(self.prompt_logprobs >= 0, "prompt_logprobs", self.prompt_logprobs, ">= 0, or None")
        self.stop = self._checked_stop()
        self.stop_token_ids = self._checked_stop_token_ids()

    def _checked_stop(self) -> tuple[str, ...]:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        for text in stop:
            if not isinstance(text, str):
                raise TypeError(f"stop must be a string or a list of strings, got {text!r} in it")
            _require(text != "", "stop", text, "non-empty")
        return stop

    def _checked_stop_token_ids(self) -> tuple[int, ...]:
        ids = tuple(self.stop_token_ids or ())
        for token_id in ids:
            _require_int("stop_token_ids", token_id)
            _require(token_id >= 0, "stop_token_ids", token_id, ">= 0")
        return ids

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, of those that are allowed."""
        return self.temperature == 0

    @property
    def takes_argmax(self) -> bool:
        """Whether the token is the argmax of the model's logits as they are, and nothing else is asked of them."""
        wants_logprobs = self.logprobs is not None or self.prompt_logprobs is not None
        return self.temperature == 0 and self.repetition_penalty == 1 and not self.min_tokens and not wants_logprobs
