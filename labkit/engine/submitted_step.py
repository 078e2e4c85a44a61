"""A step that was given to the device, and its result once that is there."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from labkit.scheduling import StepPlan, StepResult

from .logits_rows import LogitsRows
from .sampler import top_logprobs


@dataclass(slots=True)
class SubmittedStep:
    """A step under way: its tokens travel to the host, and logits are kept where log-probabilities are due.

    Attributes:
        tokens: int64 [num_samples], on the host when ``arrived`` has passed (None: already).
        wanted: which logits are for what; None for the plainest of steps: one token of each request, all the argmax.
        sample_logits: float32 [num_samples, vocab_size] where a request wants log-probabilities of its tokens.
        prompt_logits: [num_rows, vocab_size] where one wants those of its prompt.
        landed: the event after which the plan's swaps are done; None if there is nothing to wait for.
    """

    plan: StepPlan
    tokens: torch.Tensor
    arrived: torch.cuda.Event | None
    wanted: LogitsRows | None = None
    sample_logits: torch.Tensor | None = None
    prompt_logits: torch.Tensor | None = None
    landed: torch.cuda.Event | None = None

    def result(self) -> StepResult:
        """Wait for the tokens and the swaps, and say what came of the step."""
        if self.arrived is not None:
            self.arrived.synchronize()  # the step's one wait for the device
        if self.landed is not None:
            self.landed.synchronize()
        tokens, wanted = self.tokens.tolist(), self.wanted
        if wanted is None:
            requests = [entry.request.request_id for entry in self.plan.requests]
            return StepResult({request_id: (token,) for request_id, token in zip(requests, tokens, strict=True)})
        asked = [row.request.sampling_params.logprobs for row in wanted.samples]
        table = []
        if self.sample_logits is not None:
            table = top_logprobs(self.sample_logits, [count or 0 for count in asked], tokens)
        token_ids, logprobs = {}, {}
        start = 0
        for entry in self.plan.requests:
            if entry.num_samples:
                end = start + entry.num_samples
                token_ids[entry.request.request_id] = tokens[start:end]
                if asked[start] is not None:
                    logprobs[entry.request.request_id] = table[start:end]
                start = end
        return StepResult(token_ids, logprobs, self._prompt_logprobs(wanted))

    def _prompt_logprobs(self, wanted: LogitsRows) -> dict[str, list[dict[int, float]]]:
        """For each request that asked: a mapping for the token behind each position computed in this step."""
        if self.prompt_logits is None:
            return {}
        prompt_logprobs = {}
        for entry, first, count in wanted.prompts:
            request, begin = entry.request, entry.num_computed_tokens
            asked = request.sampling_params.prompt_logprobs or 0
            rows = self.prompt_logits[first : first + count].float()
            next_tokens = request.token_ids[begin + 1 : begin + 1 + count]
            prompt_logprobs[request.request_id] = top_logprobs(rows, [asked] * count, next_tokens)
        return prompt_logprobs
