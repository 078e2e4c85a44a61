"""Who comes to the combined experiment: requests without end, of two kinds of length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from labkit.scheduling import Request, SamplingParams
from labkit.simulation import LengthTable

LENGTHS = ("full", "azure_conv")
"""Every request at the full context; lengths of the Azure conversation trace."""

_SAMPLES = 4096
_TABLE_CONTEXT = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Traffic:
    """Requests of one kind for a context of ``context`` tokens, in an order that comes round after num_samples.

    Attributes:
        prompts, outputs: [num_samples] int64, tokens; together never more than ``context``.
        shared: tokens at the beginning of every prompt that are always the same.
    """

    context: int
    vocab_size: int
    prompts: NDArray[np.int64]
    outputs: NDArray[np.int64]
    shared: int = 0

    def requests(self) -> Iterator[Request]:
        """New requests, one after the other, without end."""
        rng = np.random.default_rng(0)
        number = 0
        while True:
            for prompt, output in zip(self.prompts.tolist(), self.outputs.tolist(), strict=True):
                yield self._request(f"new-{number}", prompt, output, rng)
                number += 1

    def requests_met_under_way(self, count: int) -> Iterator[Request]:
        """Requests as one finds them in a busy server: long outputs more often, each somewhere in the middle.

        What has been generated so far counts as prompt, so total lengths are what they would be.
        """
        rng = np.random.default_rng(1)
        which, progress = _evenly_spread(count)
        chosen = np.searchsorted(np.cumsum(self.outputs) / self.outputs.sum(), which)
        ages = (progress * self.outputs[chosen]).astype(np.int64)
        for number, (i, age) in enumerate(zip(chosen, ages.tolist(), strict=True)):
            yield self._request(f"old-{number}", int(self.prompts[i]) + age, int(self.outputs[i]) - age, rng)

    def _request(self, request_id: str, prompt: int, output: int, rng: np.random.Generator) -> Request:
        tokens = rng.integers(0, self.vocab_size, prompt)
        shared = min(self.shared, prompt)
        tokens[:shared] = np.arange(shared) % self.vocab_size
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
        return Request(request_id, tokens.tolist(), params)


def traffic(lengths: str, context: int, vocab_size: int, *, shares_prefix: bool = False) -> Traffic:
    """The traffic of a length setting.

    "full": prompts of 7/8 of the context, and outputs that fill the rest. The name of a length table: its lengths,
    prompt and output independent and each evenly spread over its percentiles, so that a short window has seen all of
    them, scaled by ``context`` / 4096; a prompt too long for its output loses its beginning, as in a chat server.
    A shared prefix is 1/8 of the context, or the whole prompt where that is shorter.

    Raises ValueError for an unknown setting.
    """
    if lengths == "full":
        outputs = np.full(_SAMPLES, max(1, context // 8))
        prompts = context - outputs
    else:
        table = LengthTable.load(lengths)
        prompts, outputs = (
            _scaled([table.percentile(quantity, 100 * u) for u in column], context / _TABLE_CONTEXT)
            for quantity, column in zip(("prompt_tokens", "output_tokens"), _evenly_spread(_SAMPLES), strict=True)
        )
        outputs = np.minimum(outputs, context // 2)
        prompts = np.minimum(prompts, context - outputs)
    return Traffic(context, vocab_size, prompts, outputs, context // 8 if shares_prefix else 0)


def _evenly_spread(count: int) -> NDArray[np.float64]:
    """[2, count] in [0, 1): multiples of two irrational numbers, so that every stretch covers each axis evenly.

    Source: Kronecker's sequence with the golden ratio and the square root of 2, the steps that spread best.
    """
    steps = np.array([(5**0.5 - 1) / 2, 2**0.5 - 1])
    return np.modf(0.5 + steps[:, None] * np.arange(1, count + 1))[0]


def _scaled(lengths: list[float], factor: float) -> NDArray[np.int64]:
    return np.maximum(1, np.rint(np.array(lengths) * factor)).astype(np.int64)
