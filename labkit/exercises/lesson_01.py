"""Exercises of lesson 01: bytes of a KV cache."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import strategies as st

from labkit.kv_math import GPUS, MODEL_SHAPES, plan_capacity

from .exercise import Exercise
from .judging import on_all, same

_SHAPES = st.sampled_from(sorted(MODEL_SHAPES))


def kv_bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, bytes_per_value: int) -> int:
    """One key and one value for each KV head of each layer."""
    return 2 * num_layers * num_kv_heads * head_dim * bytes_per_value


def _judge_bytes(attempt: Callable[..., int]) -> None:
    def compare(case: tuple[str, int]) -> None:
        shape, width = MODEL_SHAPES[case[0]], case[1]
        same(
            attempt(shape.num_layers, shape.num_kv_heads, shape.head_dim, width),
            kv_bytes_per_token(shape.num_layers, shape.num_kv_heads, shape.head_dim, width),
            f"bytes a token of {shape.name} at {width} bytes a value",
        )

    on_all(st.tuples(_SHAPES, st.sampled_from([1, 2, 4])), compare)


def bytes_in_blocks(lengths: list[int], block_size: int, bytes_per_token: int) -> int:
    """Whole blocks for each request: the last one of each is rounded up."""
    return sum(-(-length // block_size) for length in lengths) * block_size * bytes_per_token


def _judge_blocks(attempt: Callable[..., int]) -> None:
    def compare(case: tuple[list[int], int, int]) -> None:
        same(attempt(*case), bytes_in_blocks(*case), "bytes of the blocks")

    lengths = st.lists(st.integers(1, 5000), min_size=1, max_size=6)
    on_all(st.tuples(lengths, st.sampled_from([1, 8, 16, 32, 256]), st.integers(1, 10**6)), compare)


def max_concurrency(memory: int, weights: int, bytes_per_token: int, block_size: int, num_tokens: int) -> int:
    """Blocks that fit beside the weights, divided by the blocks of one request."""
    num_blocks = max(0, memory - weights) // (bytes_per_token * block_size)
    return num_blocks // -(-num_tokens // block_size)


def _judge_concurrency(attempt: Callable[..., int]) -> None:
    def compare(case: tuple[str, str, int, int]) -> None:
        model, gpu, block_size, num_tokens = case
        try:
            plan = plan_capacity(gpu, model, block_size=block_size, gpu_memory_utilization=1.0)
        except ValueError:
            return  # the weights alone do not fit
        got = attempt(plan.gpu.memory_bytes, plan.weights_bytes, plan.spec.bytes_per_token, block_size, num_tokens)
        same(got, plan.max_concurrency(num_tokens), f"requests of {num_tokens} tokens of {model} on {gpu}")

    gpus = st.sampled_from(sorted(GPUS))
    on_all(st.tuples(_SHAPES, gpus, st.sampled_from([16, 1, 32, 256]), st.integers(1, 8192)), compare)


EXERCISES = (
    Exercise(
        "01-bytes-per-token",
        "Bytes of one token",
        "Write bytes_per_token(num_layers, num_kv_heads, head_dim, bytes_per_value): the bytes that one token takes in "
        "the KV cache of a model, over all its layers.",
        (
            "What is stored for a token in one layer and one head?",
            "A key and a value, each of head_dim numbers. How many heads store one: query heads or KV heads?",
            "2 x layers x KV heads x head_dim x bytes.",
        ),
        _judge_bytes,
        kv_bytes_per_token,
    ),
    Exercise(
        "01-bytes-in-blocks",
        "Bytes of a batch in blocks",
        "Write bytes_in_blocks(lengths, block_size, bytes_per_token): the bytes of the blocks that requests of these "
        "lengths hold. A block belongs to one request.",
        (
            "How many blocks does a request of 17 tokens hold when a block has 16?",
            "Round up for each request on its own, not once for the sum.",
            "-(-length // block_size) rounds up without floating point.",
        ),
        _judge_blocks,
        bytes_in_blocks,
    ),
    Exercise(
        "01-max-concurrency",
        "How many requests fit",
        "Write max_concurrency(memory, weights, bytes_per_token, block_size, num_tokens): how many requests of "
        "num_tokens tokens fit into memory bytes beside the weights, in whole blocks.",
        (
            "Three divisions: which of them round down, which up?",
            "The pool holds whole blocks (down), a request holds whole blocks (up), only whole requests run (down).",
            "num_blocks = (memory - weights) // (bytes_per_token * block_size), and not below 0.",
        ),
        _judge_concurrency,
        max_concurrency,
    ),
)
