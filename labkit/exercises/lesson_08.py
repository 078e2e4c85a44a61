"""Exercise of lesson 08: gains that multiply."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import strategies as st

from .exercise import Exercise
from .judging import close, on_all


def concurrency_gain(
    mean_tokens: int,
    reserved_tokens: int,
    kv_heads_before: int,
    kv_heads_after: int,
    bits_before: float,
    bits_after: float,
) -> float:
    """Paging x heads x bits."""
    return (reserved_tokens / mean_tokens) * (kv_heads_before / kv_heads_after) * (bits_before / bits_after)


def _judge(attempt: Callable[..., float]) -> None:
    def compare(case: tuple[int, int, int, int, float, float]) -> None:
        close(attempt(*case), concurrency_gain(*case), "the gain", rel_tol=1e-6)

    heads = st.sampled_from([8, 1, 5, 40, 64])
    bits = st.sampled_from([16, 8.25, 5, 4.75])
    on_all(st.tuples(st.integers(100, 4000), st.sampled_from([4096, 8192]), heads, heads, bits, bits), compare)


EXERCISES = (
    Exercise(
        "08-gain",
        "The whole ladder in one line",
        "Write concurrency_gain(mean_tokens, reserved_tokens, kv_heads_before, kv_heads_after, bits_before, "
        "bits_after): how many times as many requests fit into the same KV memory when paging replaces reservations, "
        "KV heads are grouped, and values get fewer bits. Leave block rounding out.",
        (
            "Each effect shrinks the bytes that one request holds. By what factor?",
            "Reservation: reserved / mean tokens. Heads: before / after. Bits: before / after.",
            "They act on different factors of the same product, so multiply.",
        ),
        _judge,
        concurrency_gain,
    ),
)
