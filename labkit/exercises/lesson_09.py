"""Exercises of lesson 09: checking a claim."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import strategies as st

from .exercise import Exercise
from .judging import close, on_all


def kv_share_percent(tokens_in_flight: int, bytes_per_token: int, weight_bytes: int) -> float:
    """KV bytes as a percentage of KV and weights together."""
    kv = tokens_in_flight * bytes_per_token
    return 100 * kv / (kv + weight_bytes)


def saved_percent(before: int, after: int) -> float:
    """Bytes that are gone, as a percentage of the bytes there were."""
    return 100 * (before - after) / before


def _judge(expected: Callable[..., float], cases: st.SearchStrategy, what: str) -> Callable[[Callable], None]:
    def judge(attempt: Callable[..., float]) -> None:
        def compare(case: tuple[int, ...]) -> None:
            close(attempt(*case), expected(*case), what, rel_tol=1e-6)

        on_all(cases, compare)

    return judge


EXERCISES = (
    Exercise(
        "09-kv-share",
        "KV's share of memory",
        "An article says that KV's share rises to 78 % over one dialogue of 2000 tokens. Write "
        "kv_share_percent(tokens_in_flight, bytes_per_token, weight_bytes), and try it with 2000, 524288 and "
        "13476831232 (Llama-2-7B).",
        (
            "Share of what? Of the cache and the weights together.",
            "The cache is tokens x bytes per token.",
            "100 * kv / (kv + weights); for the dialogue it gives 7.2.",
        ),
        _judge(
            kv_share_percent,
            st.tuples(st.integers(0, 10**6), st.integers(1, 10**6), st.integers(1, 10**11)),
            "the share",
        ),
        kv_share_percent,
    ),
    Exercise(
        "09-saved",
        "What a saving is",
        "The article calls 18.4 GB to 3.2 GB '4.7 times'. Write saved_percent(before, after): the bytes that are "
        "gone, in percent of those that were there.",
        (
            "A saving compares what is gone with what was.",
            "before - after is gone.",
            "100 * (before - after) / before: 82.6 for the article's numbers, which is 5.75 times.",
        ),
        _judge(saved_percent, st.tuples(st.integers(1, 10**9), st.integers(0, 10**9)), "the saving in percent"),
        saved_percent,
    ),
)
