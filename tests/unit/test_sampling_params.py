"""Sampling parameters: bad values are refused with their name, value and range."""

import pytest

from labkit.scheduling import SamplingParams


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_tokens": 0}, ValueError, "max_tokens must be >= 1, or None, got 0"),
        ({"temperature": -0.1}, ValueError, "temperature must be >= 0, got -0.1"),
        ({"temperature": float("nan")}, TypeError, "temperature must be a finite number, got nan"),
        ({"temperature": "hot"}, TypeError, "temperature must be a finite number, got 'hot'"),
        ({"top_p": 0}, ValueError, r"top_p must be in \(0, 1\], got 0"),
        ({"top_p": 1.1}, ValueError, r"top_p must be in \(0, 1\], got 1.1"),
        ({"top_k": -2}, ValueError, "top_k must be .*, got -2"),
        ({"top_k": 1.5}, TypeError, "top_k must be an integer, got 1.5"),
        ({"min_p": 2}, ValueError, r"min_p must be in \[0, 1\], got 2"),
        ({"repetition_penalty": 0}, ValueError, "repetition_penalty must be > 0, got 0"),
        ({"n": 0}, ValueError, "n must be >= 1, got 0"),
        ({"n": True}, TypeError, "n must be an integer, got True"),
        ({"stop": ""}, ValueError, "stop must be non-empty, got ''"),
        ({"stop": ["a", ""]}, ValueError, "stop must be non-empty, got ''"),
        ({"stop": [3]}, TypeError, "stop must be a string or a list of strings, got 3"),
        ({"stop_token_ids": [-1]}, ValueError, "stop_token_ids must be >= 0, got -1"),
        ({"min_tokens": 5, "max_tokens": 4}, ValueError, r"min_tokens must be <= max_tokens \(4\), got 5"),
        ({"logprobs": -1}, ValueError, "logprobs must be >= 0, or None, got -1"),
    ],
)
def test_bad_values_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        SamplingParams(**options)


def test_one_stop_string_may_stand_alone():
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams().stop == ()
