"""Contract 3 for the embedded model in fp32: transformers' logits and greedy tokens, roomy pool and tight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from labkit.engine import LLM
from labkit.models import load_model
from labkit.scheduling import SamplingParams

from .forcing import assert_same_logits, reference_logits, run_forced

PROMPTS = [
    "The capital of France is",
    "The history of the Roman Empire begins with",
    "Once upon a time, in a village by the sea, there lived an old fisherman who had never learned to swim. One day",
    "def fibonacci(n):\n",
    "Q: What is the largest planet?\nA: Jupiter.\nQ: What is the smallest planet?\nA:",
]
NUM_NEW_TOKENS = 24
CLOSE = 1e-3
"""A top-2 margin under which greedy decoding may go either way."""


@dataclass
class Reference:
    """Greedy continuations by transformers.generate, and the logits before each of their tokens."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    sequences: list[list[int]]
    num_prompt_tokens: list[int]
    logits: list[torch.Tensor]

    def assert_same_greedy_tokens(self, llm: LLM) -> None:
        params = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        for output, ids, count, logits in zip(
            outputs, self.sequences, self.num_prompt_tokens, self.logits, strict=True
        ):
            assert output.prompt_token_ids == ids[:count]
            top = logits.topk(2).values
            close = (top[:, 0] - top[:, 1] < CLOSE).nonzero()
            end = count + int(close[0]) if len(close) else len(ids)
            assert output.outputs[0].token_ids[: end - count] == ids[count:end]
            assert output.outputs[0].text == self.tokenizer.decode(output.outputs[0].token_ids)


@pytest.fixture(scope="module")
def reference() -> Iterator[Reference]:
    model, tokenizer = load_model(dtype="float32", device="cpu")
    sequences, counts, logits = [], [], []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")
        whole = model.generate(**ids, do_sample=False, min_new_tokens=NUM_NEW_TOKENS, max_new_tokens=NUM_NEW_TOKENS)
        sequences.append(whole[0].tolist())
        counts.append(ids["input_ids"].shape[1])
        logits.append(reference_logits(model, sequences[-1], counts[-1]))
    yield Reference(model, tokenizer, sequences, counts, logits)


@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 16, "max_num_seqs": 8, "block_size": 32}],
    ids=["roomy", "chunks of 16"],
)
def test_roomy_pool(reference, options):
    with LLM(reference.model, tokenizer=reference.tokenizer, max_model_len=256, **options) as llm:
        run = run_forced(llm, reference.sequences, reference.num_prompt_tokens)
        assert_same_logits(run, reference.logits)
        assert run.num_preemptions == 0
        reference.assert_same_greedy_tokens(llm)


def test_tight_pool(reference):
    options = {"block_size": 8, "num_gpu_blocks_override": 14, "max_model_len": 80}
    with LLM(reference.model, tokenizer=reference.tokenizer, **options) as llm:
        run = run_forced(llm, reference.sequences, reference.num_prompt_tokens)
        assert_same_logits(run, reference.logits)
        assert run.num_preemptions > 0
        reference.assert_same_greedy_tokens(llm)
        llm.engine.scheduler.kv.check()


def test_prefix_cache_hits(reference):
    with LLM(reference.model, tokenizer=reference.tokenizer, max_model_len=256, block_size=4) as llm:
        run_forced(llm, reference.sequences, reference.num_prompt_tokens)
        again = run_forced(llm, reference.sequences, reference.num_prompt_tokens)
        assert_same_logits(again, reference.logits)
        assert again.num_cached_tokens > 0


def test_stop_strings_end_the_text_of_the_real_tokenizer(reference):
    with LLM(reference.model, tokenizer=reference.tokenizer, max_model_len=256) as llm:
        whole = llm.generate(PROMPTS[1], SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)[0].outputs[0]
        stop = whole.text[17:22]
        params = SamplingParams(temperature=0, max_tokens=20, stop=stop)
        for output in llm.stream(PROMPTS[1], params):
            assert whole.text.startswith(output.outputs[0].text)
            assert stop not in output.outputs[0].text
        assert output.outputs[0].text == whole.text[: whole.text.index(stop)]
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)


def test_chat_answers_and_stops(reference):
    with LLM(reference.model, tokenizer=reference.tokenizer, max_model_len=256) as llm:
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        completion = llm.chat(messages, SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)[0].outputs[0]
        assert completion.text == "The capital of France is Paris."
        assert completion.finish_reason == "stop" and completion.token_ids[-1] == reference.tokenizer.eos_token_id
