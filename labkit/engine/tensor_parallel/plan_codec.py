"""Step plans as small messages: what the ranks know already is not sent again.

A plan names its requests with all their tokens and block tables, and most of that is what it was a step ago. Both
sides keep a copy of each request under way, and a message carries what is new:

    (id, 37 computed, 1 scheduled, 1 sample,   keep 2 blocks of the table, then [9],   new tokens [418])

so a decoding batch of 32 is about a kilobyte, whatever its context.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

from labkit.scheduling import Request, ScheduledRequest, StepPlan


class EntryUpdate(NamedTuple):
    """One request's share of a step. ``request`` is sent whole once; ``num_kept_blocks`` of its table stay."""

    request_id: str
    request: Request | None
    new_token_ids: list[int]
    num_computed_tokens: int
    num_scheduled_tokens: int
    num_samples: int
    num_kept_blocks: int
    new_blocks: list[int]


class PlanUpdate(NamedTuple):
    """A :class:`StepPlan` relative to those before it."""

    step: int
    entries: list[EntryUpdate]
    copies: tuple[tuple[int, int], ...]
    ended_ids: tuple[str, ...]


@dataclass(slots=True)
class _Known:
    """What the ranks have of a request."""

    request: Request
    num_tokens: int
    block_table: list[int]


class PlanEncoder:
    """The front's side; every plan must be encoded, in order, and reach every rank."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}

    def encode(self, plan: StepPlan) -> PlanUpdate:
        """``plan`` as what has changed."""
        for request_id in plan.ended_ids:
            self._known.pop(request_id, None)
        return PlanUpdate(plan.step, [self._entry(entry) for entry in plan.requests], plan.copies, plan.ended_ids)

    def _entry(self, entry: ScheduledRequest) -> EntryUpdate:
        request = entry.request
        known, sent = self._known.get(request.request_id), None
        if known is None or known.request is not request:
            sent = copy(request)
            sent.block_table, sent.logprobs, sent.prompt_logprobs = (), [], []
            known = self._known[request.request_id] = _Known(request, len(request.token_ids), [])
        new_token_ids = request.token_ids[known.num_tokens :]
        known.num_tokens = len(request.token_ids)
        # Tables grow at their end; a copied block changes the last one or two.
        before, table = known.block_table, list(entry.block_table)
        kept = min(len(before), len(table))
        while before[:kept] != table[:kept]:
            kept -= 1
        known.block_table = table
        return EntryUpdate(
            request.request_id,
            sent,
            new_token_ids,
            entry.num_computed_tokens,
            entry.num_scheduled_tokens,
            entry.num_samples,
            kept,
            table[kept:],
        )


class PlanDecoder:
    """A rank's side. The requests of the decoded plans are copies that live as long as the request is under way."""

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}
        self._tables: dict[str, list[int]] = {}

    def decode(self, update: PlanUpdate) -> StepPlan:
        """The plan that was encoded. Its block tables change with the next call."""
        for request_id in update.ended_ids:
            self._requests.pop(request_id, None)
            self._tables.pop(request_id, None)
        entries = tuple(self._entry(entry) for entry in update.entries)
        return StepPlan(update.step, entries, update.copies, update.ended_ids)

    def _entry(self, entry: EntryUpdate) -> ScheduledRequest:
        if entry.request is not None:
            self._requests[entry.request_id], self._tables[entry.request_id] = entry.request, []
        request, table = self._requests[entry.request_id], self._tables[entry.request_id]
        request.token_ids += entry.new_token_ids
        table[entry.num_kept_blocks :] = entry.new_blocks
        return ScheduledRequest(
            request, entry.num_computed_tokens, entry.num_scheduled_tokens, table, entry.num_samples
        )
