"""Exercises of lesson 10: decisions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hypothesis import strategies as st

from .exercise import Exercise
from .judging import on_all, same


def choose_format(losses: Mapping[str, float], bits: Mapping[str, float], budget: float) -> str | None:
    """The fewest bits among the formats within the budget; the smaller loss decides a tie."""
    within = [name for name, loss in losses.items() if loss <= budget]
    return min(within, key=lambda name: (bits[name], losses[name]), default=None)


def _judge_choose(attempt: Callable[..., str | None]) -> None:
    names = ("bf16", "fp8", "int8", "int4")
    losses = st.lists(st.integers(0, 500), min_size=4, max_size=4, unique=True)
    bits = st.lists(st.sampled_from([16.0, 8.5, 8.25, 4.75]), min_size=4, max_size=4)

    def compare(case: tuple[list[int], list[float], int]) -> None:
        loss_of = {name: loss / 100 for name, loss in zip(names, case[0], strict=True)}
        bits_of: dict[str, float] = dict(zip(names, case[1], strict=True))
        expected = choose_format(loss_of, bits_of, case[2] / 100)
        same(attempt(dict(loss_of), dict(bits_of), case[2] / 100), expected, f"the choice for losses {loss_of}")

    on_all(st.tuples(losses, bits, st.integers(0, 500)), compare)


def largest_batch(step_seconds: Sequence[float], limit_seconds: float) -> int:
    """The last batch size, counted from 1, whose step is within the limit; 0 if none is."""
    return max((batch for batch, seconds in enumerate(step_seconds, start=1) if seconds <= limit_seconds), default=0)


def _judge_largest(attempt: Callable[..., int]) -> None:
    def compare(case: tuple[list[int], int]) -> None:
        steps = [milliseconds / 1000 for milliseconds in sorted(case[0])]
        same(attempt(steps, case[1] / 1000), largest_batch(steps, case[1] / 1000), "the largest batch")

    on_all(st.tuples(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(0, 60)), compare)


EXERCISES = (
    Exercise(
        "10-choose-format",
        "Within a quality budget",
        "Write choose_format(losses, bits, budget): losses and bits a value by name of a format. The name of the one "
        "with the fewest bits whose loss is at most the budget; the smaller loss decides between equal bits; None if "
        "there is none.",
        (
            "First drop what is beyond the budget.",
            "min with a key of (bits, loss).",
            "min(..., default=None) for an empty choice.",
        ),
        _judge_choose,
        choose_format,
    ),
    Exercise(
        "10-largest-batch",
        "Within a latency limit",
        "Write largest_batch(step_seconds, limit_seconds): step_seconds[i] is the time of a decode step with i + 1 "
        "requests and never falls. The largest batch whose step stays within the limit; 0 if none does.",
        (
            "A step is the pause between a request's tokens.",
            "Count the steps that are within the limit.",
            "Batch sizes begin at 1.",
        ),
        _judge_largest,
        largest_batch,
    ),
)
