"""The sampler draws what the params ask, and each row draws for itself."""

from __future__ import annotations

import math

import pytest
import torch

from labkit.engine.random_draws import draw_key, exponential_noise
from labkit.engine.sampler import SamplingRow, sample, top_logprobs
from labkit.scheduling import Request, SamplingParams

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 3.0, -math.inf, 0.5, 1.5])
PROBS = LOGITS.softmax(-1)


def row(params: SamplingParams, *, seed: int = 0, position: int = 3, sample_index: int = 0, eos=()) -> SamplingRow:
    return SamplingRow(Request("r", [1, 2, 3], params, seed=seed, eos_token_ids=eos), sample_index, position)


def draws(params: SamplingParams, count: int = 20_000) -> torch.Tensor:
    """How often each token is drawn from LOGITS, at ``count`` different positions."""
    rows = [row(params, position=3 + i) for i in range(count)]
    return torch.bincount(sample(LOGITS.repeat(count, 1), rows), minlength=len(LOGITS)) / count


def test_greedy_rows_take_the_likeliest_whatever_their_neighbours_do():
    rows = [
        row(SamplingParams(temperature=0)),
        row(SamplingParams(temperature=5.0)),
        row(SamplingParams(temperature=0)),
    ]
    tokens = sample(torch.stack([LOGITS, LOGITS, -LOGITS.nan_to_num(neginf=9)]), rows)
    assert tokens[0] == 4 and tokens[2] == 3


@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
def test_frequencies_follow_the_softmax(temperature):
    expected = (LOGITS / temperature).softmax(-1)
    frequencies = draws(SamplingParams(temperature=temperature))
    deviation = (expected * (1 - expected) / 20_000).sqrt()
    assert frequencies[5] == 0
    assert ((frequencies - expected).abs() <= 4.5 * deviation + 1e-9).all()


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(top_k=1), {4}),
        (SamplingParams(top_k=3), {4, 0, 7}),
        (SamplingParams(top_k=100), {0, 1, 2, 3, 4, 6, 7}),
        (SamplingParams(top_k=-1), {0, 1, 2, 3, 4, 6, 7}),
        (SamplingParams(top_p=0.01), {4}),
        (SamplingParams(top_p=0.7), {4, 0}),  # probabilities 0.54, 0.20, 0.12, ...: 0.54 < 0.7 <= 0.74
        (SamplingParams(top_p=0.8), {4, 0, 7}),
        (SamplingParams(top_p=0.8, top_k=2), {4, 0}),  # 0.8 of what top_k left
        (SamplingParams(top_p=0.7, top_k=2), {4}),
        (SamplingParams(min_p=0.2), {4, 0, 7}),  # p / p_max = exp(logit - 3): 1, 0.37, 0.22, 0.135, ...
        (SamplingParams(min_p=1.0), {4}),
        (SamplingParams(min_p=0.1, top_k=2), {4, 0}),
    ],
)
def test_what_is_ruled_out_never_comes_and_what_is_kept_does(params, kept):
    frequencies = draws(params, 5_000)
    assert {token for token, frequency in enumerate(frequencies.tolist()) if frequency > 0} == kept
    expected = torch.tensor([p if t in kept else 0.0 for t, p in enumerate(PROBS.tolist())])
    expected /= expected.sum()
    assert (frequencies - expected).abs().max() < 0.035


def test_rows_with_different_limits_in_one_batch_keep_to_their_own():
    rows = [row(SamplingParams(top_k=1)), row(SamplingParams()), row(SamplingParams(top_p=0.01)), row(SamplingParams())]
    with_limits = sample(LOGITS.repeat(4, 1), rows)
    assert with_limits[0] == with_limits[2] == 4
    assert with_limits[1] == with_limits[3] == sample(LOGITS.repeat(1, 1), rows[1:2])[0]


def test_a_draw_does_not_depend_on_batch_mates():
    rows = [row(SamplingParams(temperature=2.0), seed=i, position=5 + i) for i in range(64)]
    logits = torch.randn(64, 1000, generator=torch.Generator().manual_seed(1))
    together = sample(logits.clone(), rows)
    alone = torch.cat([sample(logits[i : i + 1].clone(), rows[i : i + 1]) for i in range(64)])
    backwards = sample(logits.flip(0), rows[::-1]).flip(0)
    assert torch.equal(together, alone) and torch.equal(together, backwards)


def test_seed_sample_and_position_each_change_the_draw():
    logits = torch.zeros(1, 50_000)
    base = row(SamplingParams())
    others = [row(SamplingParams(), seed=1), row(SamplingParams(), position=4), row(SamplingParams(), sample_index=1)]
    tokens = {int(sample(logits.clone(), [r])[0]) for r in [base, *others]}
    assert len(tokens) == 4
    assert sample(logits.clone(), [base]) == sample(logits.clone(), [base])


def test_seeds_of_any_size_are_good():
    seeds = [-1, 0, 1, 2**31, 2**63, -(2**63) + 1]
    keys = {draw_key(seed, 0, 0) for seed in seeds}
    assert len(keys) == len(seeds)
    assert all(-(2**63) <= key < 2**63 for key in keys)


def test_noise_is_exponential_and_uncorrelated():
    noise = exponential_noise([draw_key(7, 0, i) for i in range(200)], 5_000, torch.device("cpu")).double()
    assert noise.min() > 0
    assert abs(noise.mean() - 1) < 0.005 and abs(noise.var() - 1) < 0.02
    for a, b in ((noise[:-1], noise[1:]), (noise[:, :-1], noise[:, 1:])):  # neighbouring draws, neighbouring tokens
        assert abs(((a - 1) * (b - 1)).mean()) < 0.005


def test_repetition_penalty_makes_seen_tokens_less_likely_whatever_their_sign():
    logits = torch.tensor([[1.0, 4.0, -2.0, 2.0, 3.9]])  # the prompt holds 1, 2, 3
    sampled = sample(logits, [row(SamplingParams(temperature=0, repetition_penalty=2.0))])
    assert logits.tolist()[0] == pytest.approx([1.0, 2.0, -4.0, 1.0, 3.9])
    assert sampled == 4


def test_no_stop_token_before_min_tokens():
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[0])
    for num_output, expected in ((0, 7), (1, 7), (2, 4)):  # 4, 0 and 7 are the likeliest
        tokens = sample(LOGITS[None].clone(), [row(params, position=3 + num_output, eos=(4,))])
        assert tokens == expected


def test_logprobs_are_of_the_raw_distribution_with_the_chosen_token_first():
    table = top_logprobs(LOGITS.repeat(2, 1), [2, 0], [3, 4])
    logprobs = PROBS.log().tolist()
    assert list(table[0]) == [3, 4, 0] and list(table[1]) == [4]
    for found in table:
        for token, logprob in found.items():
            assert logprob == pytest.approx(logprobs[token], abs=1e-5)
