"""One claim of an article, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

Verdict = Literal["correct", "depends", "inconsistent", "wrong", "unverifiable", "opinion"]
VERDICTS = get_args(Verdict)


def no_numbers() -> dict[str, float]:
    """For claims that are checked by reading or by running, not by arithmetic."""
    return {}


@dataclass(frozen=True, slots=True)
class Claim:
    """A sentence of one of the two articles.

    Attributes:
        id: "A1" to "A41" (the article on vLLM), "B1" to "B50" (the article on three strategies).
        says: the claim in our words.
        verdict: correct; depends (true under conditions that are not stated); inconsistent (the article contradicts
            itself); wrong; unverifiable (its set-up is not given); opinion.
        correction: what holds, a template over the names of ``numbers``.
        check: the formula, the measurement or the reading that decides.
        source: where the facts are from that neither arithmetic nor a measurement gives.
        numbers: computes every number of ``correction``.
    """

    id: str
    says: str
    verdict: Verdict
    correction: str
    check: str
    source: str = "computed"
    numbers: Callable[[], dict[str, float]] = no_numbers

    @property
    def article(self) -> str:
        """A or B."""
        return self.id[0]

    @property
    def statement(self) -> str:
        """The correction with its numbers, computed now."""
        return self.correction.format(**self.numbers())
