"""Teacher forcing through the engine: its logits for given continuations, to be compared with transformers'."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from transformers import PreTrainedModel

from labkit.engine import LLM, RequestOutput, model_executor
from labkit.engine.sampler import SamplingRow
from labkit.scheduling import SamplingParams


@dataclass
class ForcedRun:
    """What came of it: for each sequence the logits [num_new_tokens, vocab_size] before each forced token."""

    logits: list[torch.Tensor]
    outputs: list[RequestOutput] = field(default_factory=list)

    @property
    def num_preemptions(self) -> int:
        return sum(output.metrics.num_preemptions for output in self.outputs)

    @property
    def num_cached_tokens(self) -> int:
        return sum(output.num_cached_tokens for output in self.outputs)


def run_forced(llm: LLM, sequences: Sequence[list[int]], num_prompt_tokens: Sequence[int]) -> ForcedRun:
    """Generate with each sequence cut after its prompt, taking the rest of it instead of what would be sampled."""
    seen: dict[str, dict[int, torch.Tensor]] = {}
    prompts = [list(ids[:count]) for ids, count in zip(sequences, num_prompt_tokens, strict=True)]
    params = [
        SamplingParams(max_tokens=len(ids) - len(prompt), temperature=1, ignore_eos=True)  # argmax would skip sample
        for ids, prompt in zip(sequences, prompts, strict=True)
    ]
    with _sampling_replaced(dict(zip(map(tuple, prompts), sequences, strict=True)), seen):
        outputs = llm.generate(prompts, params, use_tqdm=False)
    logits = []
    for output, ids, count in zip(outputs, sequences, num_prompt_tokens, strict=True):
        assert output.outputs[0].token_ids == list(ids[count:])
        rows = seen[output.request_id]
        logits.append(torch.stack([rows[position] for position in range(count, len(ids))]))
    return ForcedRun(logits, outputs)


@contextmanager
def _sampling_replaced(
    sequence_of_prompt: dict[tuple[int, ...], list[int]], seen: dict[str, dict[int, torch.Tensor]]
) -> Iterator[None]:
    def forced(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        tokens = []
        for row_logits, (request, _, position) in zip(logits, rows, strict=True):
            seen.setdefault(request.request_id, {})[position] = row_logits.float().clone()
            tokens.append(sequence_of_prompt[tuple(request.prompt_token_ids)][position])
        return torch.tensor(tokens, device=logits.device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_executor, "sample", forced)
        yield


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, ids: Sequence[int], num_prompt_tokens: int) -> torch.Tensor:
    """The same logits from one forward pass of transformers over the whole sequence, alone, without a cache."""
    tokens = torch.tensor([list(ids)], device=model.device)
    return model(tokens, use_cache=False).logits[0, num_prompt_tokens - 1 : -1].float()


def assert_same_logits(run: ForcedRun, expected: Sequence[torch.Tensor], tolerance: float = 1e-4) -> None:
    """Logits within ``tolerance``; hence greedy tokens can differ only where the top two are closer than twice that."""
    for i, (got, want) in enumerate(zip(run.logits, expected, strict=True)):
        worst = float((got - want).abs().max())
        assert worst < tolerance, f"sequence {i}: logits differ by {worst}"
