"""A claim as a card: what was said, what holds, how that is known, and what was measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

from labkit.experiments.claims import CLAIMS, VERDICTS, Claim
from labkit.experiments.claims.evidence import Evidence, evidence

# Okabe and Ito's hues; the sign says the same without colour.
_SIGNS = {
    "correct": ("✓", "#009e73"),
    "depends": ("≈", "#e69f00"),
    "inconsistent": ("≠", "#cc79a7"),
    "wrong": ("✗", "#d55e00"),
    "unverifiable": ("?", "#808080"),
    "opinion": ("“", "#808080"),
}
MAX_FIGURES = 8
MAX_OPEN = 3
"""Cards of which the whole text is seen at once; of more, each is a line that opens."""
MAX_LINES = 12
"""More cards than this are folded by verdict."""


@dataclass(frozen=True, slots=True)
class ClaimCards:
    """Cards for notebooks; printed, they are plain text. ``here``: figures that were measured on this machine."""

    claims: tuple[Claim, ...]
    here: tuple[Evidence, ...] = ()

    def __str__(self) -> str:
        return "\n\n".join(map(self._text, self.claims))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        if len(self.claims) <= MAX_LINES:
            return "".join(map(self._html, self.claims))
        groups = ((verdict, [c for c in self.claims if c.verdict == verdict]) for verdict in VERDICTS)
        return "".join(self._group(verdict, claims) for verdict, claims in groups if claims)

    def _group(self, verdict: str, claims: list[Claim]) -> str:
        cards = "".join(map(self._html, claims))
        title = f"<b>{_SIGNS[verdict][0]} {verdict}</b>: {len(claims)} claims"
        ids = " ".join(claim.id for claim in claims)
        return (
            f"<details style='margin:8px 0;max-width:900px'><summary>{title} "
            f"<span style='opacity:.75'>({ids})</span></summary>{cards}</details>"
        )

    def _mine(self, claim: Claim) -> list[Evidence]:
        return [item for item in self.here if item.claim_id == claim.id]

    def _text(self, claim: Claim) -> str:
        lines = [f"{claim.id} [{claim.verdict}] {claim.says}", f"  what holds: {claim.statement}"]
        lines += [f"  checked by: {claim.check} ({claim.source})"]
        lines += [f"  recorded: {item}" for item in evidence(claim.id)[:MAX_FIGURES]]
        return "\n".join(lines + [f"  here: {item}" for item in self._mine(claim)])

    def _html(self, claim: Claim) -> str:
        sign, colour = _SIGNS[claim.verdict]
        figures = _list("Recorded", evidence(claim.id)) + _list("Here", self._mine(claim))
        opened = " open" if len(self.claims) <= MAX_OPEN else ""
        return (
            f"<article style='border-left:5px solid {colour};padding:2px 12px;margin:10px 0;max-width:900px'>"
            f"<details{opened}><summary><b>{claim.id}</b> "
            f"<b style='border:1px solid {colour};border-radius:3px;padding:0 6px'>{sign} {claim.verdict}</b> "
            f"“{escape(claim.says)}”</summary>"
            f"<div style='margin:4px 0'>{escape(claim.statement)}</div>"
            f"<div style='opacity:.75'>checked by: {escape(claim.check)} · {escape(claim.source)}</div>"
            f"{figures}</details></article>"
        )


def claim_cards(*claim_ids: str, verdict: str | None = None, here: Iterable[Evidence] = ()) -> ClaimCards:
    """Cards of these claims, in this order; without ids all, or all of one ``verdict``.

    Raises ValueError for an unknown id or verdict.
    """
    if verdict is not None and verdict not in VERDICTS:
        raise ValueError(f"verdict must be one of {', '.join(VERDICTS)}, got {verdict!r}")
    for claim_id in claim_ids:
        evidence(claim_id)  # raises for an id that no claim has
    chosen = [CLAIMS[claim_id] for claim_id in claim_ids or CLAIMS]
    return ClaimCards(tuple(claim for claim in chosen if verdict in (None, claim.verdict)), tuple(here))


def _list(title: str, items: list[Evidence]) -> str:
    if not items:
        return ""
    shown = "".join(f"<li>{escape(str(item))}</li>" for item in items[:MAX_FIGURES])
    more = f"<li>and {len(items) - MAX_FIGURES} more</li>" if len(items) > MAX_FIGURES else ""
    return f"<details><summary>{title}: {len(items)} figures</summary><ul>{shown}{more}</ul></details>"
