"""Which tokens of a batch need logits, and what for."""

from __future__ import annotations

from dataclasses import dataclass, field

from labkit.scheduling import ScheduledRequest, StepPlan

from .sampler import SamplingRow


@dataclass(slots=True)
class LogitsRows:
    """The rows of a batch whose logits are wanted: of prompts for ``prompt_logprobs``, and the last of each request
    that gets a token. Nothing else is multiplied with the vocabulary.

    Attributes:
        rows: indices into the batch's tokens.
        prompts: (entry, first index into ``rows``, number) for each request that wants log-probabilities of its prompt.
        samples: one for each token to draw; ``sample_rows`` says from which of ``rows``.
    """

    rows: list[int] = field(default_factory=list)
    prompts: list[tuple[ScheduledRequest, int, int]] = field(default_factory=list)
    samples: list[SamplingRow] = field(default_factory=list)
    sample_rows: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, plan: StepPlan) -> LogitsRows:
        """What ``plan`` needs."""
        wanted = cls()
        start = 0
        for entry in plan.requests:
            request, end = entry.request, start + entry.num_scheduled_tokens
            if request.sampling_params.prompt_logprobs is not None:
                # The logits at position p speak of the token at p + 1, which must still belong to the prompt.
                count = min(entry.num_scheduled_tokens, request.num_prompt_tokens - 1 - entry.num_computed_tokens)
                if count > 0:
                    wanted.prompts.append((entry, len(wanted.rows), count))
                    wanted.rows.extend(range(start, start + count))
            if entry.num_samples:
                position = entry.num_computed_tokens + entry.num_scheduled_tokens
                for sample_index in range(request.sample_index, request.sample_index + entry.num_samples):
                    wanted.sample_rows.append(len(wanted.rows))
                    wanted.samples.append(SamplingRow(request, sample_index, position))
                wanted.rows.append(end - 1)
            start = end
        return wanted
