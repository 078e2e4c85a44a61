"""Exercises of lesson 03: attention over pages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from hypothesis import strategies as st

from .exercise import Exercise
from .judging import close, on_all, same


def slot_of(position: int, block_table: Sequence[int], block_size: int) -> int:
    """The block of the position, times the block size, plus the place in the block."""
    return block_table[position // block_size] * block_size + position % block_size


def _judge_slot(attempt: Callable[..., int]) -> None:
    def compare(case: tuple[list[int], int, int]) -> None:
        table, block_size, position = case
        position %= len(table) * block_size
        same(attempt(position, table, block_size), slot_of(position, table, block_size), f"the slot of {position}")

    tables = st.lists(st.integers(0, 99), min_size=1, max_size=4, unique=True)
    on_all(st.tuples(tables, st.sampled_from([16, 1, 4, 32]), st.integers(0, 500)), compare)
    same(attempt(20, [0, 3, 7], 16), 52, "the article's example, token 20 of [0, 3, 7],")


class OnlineSoftmax:
    """Softmax-weighted sum of values whose scores arrive in tiles."""

    def __init__(self) -> None:
        self.m, self.l, self.acc = -math.inf, 0.0, 0.0

    def add(self, scores: Sequence[float], values: Sequence[float]) -> None:
        """Take in one tile."""
        m_new = max(self.m, *scores)
        alpha = math.exp(self.m - m_new)  # what was summed so far was relative to the old maximum
        weights = [math.exp(score - m_new) for score in scores]
        self.l = self.l * alpha + sum(weights)
        self.acc = self.acc * alpha + sum(w * v for w, v in zip(weights, values, strict=True))
        self.m = m_new

    def result(self) -> float:
        """The weighted mean of all values so far."""
        return self.acc / self.l


def _judge_online_softmax(attempt: type) -> None:
    numbers = st.floats(-4, 4, width=16)
    far = st.sampled_from([0.0, 800.0, -800.0])

    def compare(case: tuple[list[list[tuple[float, float]]], float]) -> None:
        tiles, shift = case
        state = attempt()
        for tile in tiles:
            state.add([score + shift for score, _ in tile], [value for _, value in tile])
        pairs = torch.tensor([pair for tile in tiles for pair in tile], dtype=torch.float64)
        expected = float(pairs[:, 0].softmax(0) @ pairs[:, 1])
        close(state.result(), expected, f"result(), with scores shifted by {shift:g},")

    tile = st.lists(st.tuples(numbers, numbers), min_size=1, max_size=4)
    on_all(st.tuples(st.lists(tile, min_size=1, max_size=4), far), compare)


def merge(parts: Sequence[tuple[float, float, float]]) -> float:
    """Bring all parts to one maximum, then add numerators and denominators."""
    m = max(part[0] for part in parts)
    denominator = sum(part[1] * math.exp(part[0] - m) for part in parts)
    return sum(part[2] * math.exp(part[0] - m) for part in parts) / denominator


def _judge_merge(attempt: Callable[..., float]) -> None:
    def compare(parts: list[tuple[float, float, float]]) -> None:
        close(attempt(parts), merge(parts), "what the parts merge to")

    part = st.tuples(st.floats(-50, 50), st.floats(0.5, 50), st.floats(-50, 50))
    on_all(st.lists(part, min_size=1, max_size=4), compare)


EXERCISES = (
    Exercise(
        "03-slot",
        "From position to slot",
        "Write slot_of(position, block_table, block_size): where in the cache the K and V of a sequence's token at "
        "that position lie. Slots are numbered through all blocks: slot 0 to block_size - 1 is block 0.",
        (
            "Which entry of the block table does the position fall into, and how far into that block?",
            "position // block_size is the entry, position % block_size the place in the block.",
            "Block b begins at slot b * block_size.",
        ),
        _judge_slot,
        slot_of,
    ),
    Exercise(
        "03-online-softmax",
        "Softmax in one pass",
        "Write a class with add(scores, values) and result(). Tiles arrive one after the other; result() is the "
        "softmax of all scores so far, times their values. Keep three numbers only: no lists of what was seen. Scores "
        "may be as large as 800, where exp overflows.",
        (
            "Keep the largest score m, the sum l of exp(score - m), and the sum acc of exp(score - m) * value.",
            "When a larger score turns up, everything summed so far was relative to the old m.",
            "Multiply l and acc by exp(m_old - m_new) before you add the new tile. exp(-inf) is 0.",
        ),
        _judge_online_softmax,
        OnlineSoftmax,
    ),
    Exercise(
        "03-merge",
        "Combining split sequences",
        "Several programs have each attended over a part of a sequence and left (m, l, acc): the maximum, the sum of "
        "exp(score - m), and the sum of exp(score - m) * value. Write merge(parts), the attention over all of it.",
        (
            "Each part is relative to its own maximum. Make them relative to the same one.",
            "Weight l and acc of a part by exp(m_part - m_all).",
            "The result is the sum of the weighted acc divided by the sum of the weighted l.",
        ),
        _judge_merge,
        merge,
    ),
)
