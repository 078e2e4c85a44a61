"""Exercises of lesson 05: shared keys and values."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from .exercise import Exercise, Failed
from .judging import on_all, same

_HEADS = st.sampled_from([(1, 1), (4, 2), (8, 2), (9, 3), (40, 5), (64, 8), (8, 1)])


def kv_head_of(query_head: int, num_heads: int, num_kv_heads: int) -> int:
    """Query heads of a group stand side by side."""
    return query_head // (num_heads // num_kv_heads)


def _judge_kv_head(attempt: Callable[..., int]) -> None:
    def compare(case: tuple[tuple[int, int], int]) -> None:
        (heads, kv_heads), head = case
        head %= heads
        expected = kv_head_of(head, heads, kv_heads)
        same(attempt(head, heads, kv_heads), expected, f"the KV head of query head {head} of {heads} with {kv_heads}")

    on_all(st.tuples(_HEADS, st.integers(0, 63)), compare)


def gqa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention in which query head h reads KV head h // group."""
    tokens, heads, d = q.shape
    group = heads // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / d**0.5
    future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(future, float("-inf")).softmax(-1), v)


def _judge_gqa(attempt: Callable[..., torch.Tensor]) -> None:
    def compare(case: tuple[tuple[int, int], int]) -> None:
        (heads, kv_heads), tokens = case
        torch.manual_seed(tokens)
        q, (k, v) = torch.randn(tokens, heads, 8), torch.randn(2, tokens, kv_heads, 8)
        by_head = (q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None])
        expected = scaled_dot_product_attention(*by_head, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
        got = attempt(q, k, v)
        if not isinstance(got, torch.Tensor) or got.shape != q.shape:
            shape = tuple(got.shape) if isinstance(got, torch.Tensor) else type(got).__name__
            raise Failed(f"the result should have the shape of q, {tuple(q.shape)}, got {shape}")
        error = float((got - expected).abs().max())
        if not error < 1e-4:
            hint = " (the first token sees only itself: is the mask missing?)" if tokens > 1 else ""
            raise Failed(f"{heads} query heads, {kv_heads} KV heads, {tokens} tokens: off by {error:.2g}{hint}")

    on_all(st.tuples(_HEADS, st.integers(1, 6)), compare, num_cases=40)


def expand_heads(weight: torch.Tensor, num_kv_heads: int, num_new: int, head_dim: int) -> torch.Tensor:
    """Each head's rows as often as needed, copies side by side."""
    heads = weight.view(num_kv_heads, head_dim, -1)
    return heads.repeat_interleave(num_new // num_kv_heads, 0).reshape(num_new * head_dim, -1)


def _judge_expand(attempt: Callable[..., torch.Tensor]) -> None:
    def compare(case: tuple[int, int]) -> None:
        before, factor = case
        weight = torch.arange(before * 2 * 3).float().view(before * 2, 3)
        got, expected = attempt(weight, before, before * factor, 2), expand_heads(weight, before, before * factor, 2)
        if not isinstance(got, torch.Tensor) or got.shape != expected.shape:
            shape = tuple(got.shape) if isinstance(got, torch.Tensor) else type(got).__name__
            raise Failed(f"k_proj.weight should get the shape {tuple(expected.shape)}, got {shape}")
        if not torch.equal(got, expected):
            raise Failed("the copies of a head must stand side by side, so that query head h keeps reading its own")

    on_all(st.tuples(st.integers(1, 4), st.integers(1, 4)), compare, num_cases=30)


EXERCISES = (
    Exercise(
        "05-kv-head",
        "Who reads whose keys",
        "Write kv_head_of(query_head, num_heads, num_kv_heads): the KV head that a query head reads, as Llama and "
        "Hugging Face pair them.",
        (
            "The query heads of a group are neighbours.",
            "A group has num_heads // num_kv_heads query heads.",
            "Divide, do not take the remainder: that would pair neighbours with different heads.",
        ),
        _judge_kv_head,
        kv_head_of,
    ),
    Exercise(
        "05-gqa",
        "Grouped-query attention",
        "Write gqa(q, k, v): causal attention of q [tokens, heads, d] over k and v [tokens, kv_heads, d]; returns "
        "the shape of q. It is compared with torch's own for 9 to 3, 40 to 5, 64 to 8 heads and more.",
        (
            "Scale by 1 / sqrt(d), mask what lies ahead, softmax over the keys.",
            "repeat_interleave gives each query head its KV head; a view of q in groups does it without copies.",
            "masked_fill(future, -inf) before the softmax, with future = ones(tokens, tokens).triu(1).",
        ),
        _judge_gqa,
        gqa,
    ),
    Exercise(
        "05-expand",
        "From GQA to MHA without a loss",
        "Write expand_heads(weight, num_kv_heads, num_new, head_dim): the weight of k_proj [num_kv_heads * head_dim, "
        "hidden] for num_new KV heads, such that no logit of the model changes.",
        (
            "The rows of a head are head_dim neighbours.",
            "Which query heads read KV head 0 before, and which heads must be its copies after?",
            "view(num_kv_heads, head_dim, -1), repeat_interleave along heads, reshape.",
        ),
        _judge_expand,
        expand_heads,
    ),
)
