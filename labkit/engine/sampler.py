"""From logits to tokens, for a whole batch at once.

Order, as in vLLM: repetition penalty, min_tokens; then greedy rows take the likeliest token. The others: temperature,
min_p, top_k, top_p, and one draw. The draw is the exponential race: argmax of p / e with e ~ Exponential(1) is token t
with probability p_t (the Gumbel trick in another dress), so no cumulative sums are needed and a row's token depends on
its own noise only (see random_draws.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from labkit.scheduling import Request, SamplingParams

from .random_draws import draw_key, exponential_noise
from .upload import upload


class SamplingRow(NamedTuple):
    """One token to draw: the one at ``position`` (prompt included, from 0) of sample ``sample_index`` of a request."""

    request: Request
    sample_index: int
    position: int


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Choose a token a row. logits: float32 [num_rows, vocab_size], changed in place; returns int64 [num_rows]."""
    if all(row.request.takes_argmax for row in rows):
        return logits.argmax(-1)
    _penalise_repetition(logits, rows)
    _forbid_early_stops(logits, rows)
    drawn = [i for i, row in enumerate(rows) if not row.request.sampling_params.greedy]
    if not drawn:
        return logits.argmax(-1)
    if len(drawn) == len(rows):
        return _draw(logits, rows)
    tokens = logits.argmax(-1)
    index = upload(drawn, torch.int64, logits.device)
    tokens[index] = _draw(logits[index], [rows[i] for i in drawn])
    return tokens


def _draw(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    params = [row.request.sampling_params for row in rows]
    logits = logits.float()
    logits = logits / _column([p.temperature for p in params], logits)
    _apply_min_p(logits, params)
    _apply_top_k_top_p(logits, params)
    keys = [draw_key(request.seed, sample_index, position) for request, sample_index, position in rows]
    # log(p / e) up to a constant; a token that was ruled out stays at -inf.
    return (logits - exponential_noise(keys, logits.shape[1], logits.device).log()).argmax(-1)


def _penalise_repetition(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    """Divide positive logits of tokens seen in prompt or output by the penalty, multiply negative ones."""
    for i, (request, _, _) in enumerate(rows):
        penalty = request.sampling_params.repetition_penalty
        if penalty != 1:
            seen = upload(sorted(set(request.token_ids)), torch.int64, logits.device)
            values = logits[i, seen]
            logits[i, seen] = torch.where(values > 0, values / penalty, values * penalty)


def _forbid_early_stops(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    for i, (request, _, position) in enumerate(rows):
        num_output_tokens = position - request.num_prompt_tokens
        if num_output_tokens < request.sampling_params.min_tokens and request.stop_token_ids:
            logits[i, upload(sorted(request.stop_token_ids), torch.int64, logits.device)] = -math.inf


def _apply_min_p(logits: torch.Tensor, params: Sequence[SamplingParams]) -> None:
    """Rule out tokens with p < min_p * p of the likeliest, that is logit < max + log(min_p)."""
    if any(p.min_p > 0 for p in params):
        log_min_p = _column([math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params], logits)
        logits.masked_fill_(logits < logits.amax(-1, keepdim=True) + log_min_p, -math.inf)


def _apply_top_k_top_p(logits: torch.Tensor, params: Sequence[SamplingParams]) -> None:
    """Keep the top_k likeliest, and of those the fewest that together reach top_p of their probability."""
    vocab_size = logits.shape[1]
    limits = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
    if min(limits) == vocab_size and all(p.top_p == 1 for p in params):
        return
    num_candidates = max(limits)
    values, tokens = logits.topk(num_candidates, dim=-1)  # sorted, likeliest first
    rank = torch.arange(num_candidates, device=logits.device)
    values = values.masked_fill(rank >= _column(limits, logits, torch.int64), -math.inf)
    probs = values.softmax(-1)
    before = probs.cumsum(-1) - probs  # probability of all that are likelier; 0 for the first, which always stays
    values = values.masked_fill((before >= _column([p.top_p for p in params], logits)) & (rank > 0), -math.inf)
    logits.fill_(-math.inf).scatter_(1, tokens, values)


def _column(values: Sequence[float], like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return upload(values, dtype or like.dtype, like.device)[:, None]


# ---------------------------------------------------------------------- log-probabilities


def top_logprobs(logits: torch.Tensor, counts: Sequence[int], chosen: Sequence[int]) -> list[dict[int, float]]:
    """For each row the log-probabilities of its chosen token and of its ``counts[i]`` likeliest ones.

    From raw logits, before temperature and penalties, as in vLLM. logits: float32 [num_rows, vocab_size].
    """
    logprobs = logits.log_softmax(-1)
    values, tokens = logprobs.topk(min(max(counts, default=0), logits.shape[1]), dim=-1)
    picked = logprobs.gather(1, upload(chosen, torch.int64, logits.device)[:, None])[:, 0].tolist()
    table = []
    for count, token, logprob, top_tokens, top_values in zip(
        counts, chosen, picked, tokens.tolist(), values.tolist(), strict=True
    ):
        row = {token: logprob}
        row.update(zip(top_tokens[:count], top_values[:count], strict=True))
        table.append(row)
    return table
