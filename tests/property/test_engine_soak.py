"""500 random requests through LLM on a tiny model and a tiny pool, with aborts and a model that fails now and then."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from labkit.engine import LLM, CompletionOutput, ModelExecutor, RequestOutput
from labkit.scheduling import PreemptionCost, SamplingParams

NUM_REQUESTS, MAX_MODEL_LEN = 500, 64
CLOSE = 1e-3
"""A top-2 logit margin under which greedy decoding may go either way."""

LETTERS = [chr(c) for c in range(ord("!"), ord("~") + 1)]
VOCAB = ["<eos>", *LETTERS, *(f"{a}{b}" for a in "abcdef" for b in "uvwx")]
EOS = 0


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a letter, and some of two letters, so that a stop string may end in the middle of a token."""
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(VOCAB)}, merges=[]))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def model(request) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(VOCAB),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        initializer_range=0.3,
        eos_token_id=EOS,
        pad_token_id=EOS,
    )
    return LlamaForCausalLM(config).eval().to(request.param)


@dataclass
class Sent:
    """A request, everything that came back for it, and how often its end was reported."""

    prompt: list[int]
    params: SamplingParams
    outputs: list[RequestOutput] = field(default_factory=list)
    num_ends: int = 0

    @property
    def reasons(self) -> list[str | None]:
        return [completion.finish_reason for completion in self.outputs[-1].outputs]


def random_request(rng: random.Random) -> Sent:
    """Shared beginnings, one to three samples, greedy or drawn, with all the ways to stop."""
    start = rng.choice("abcd") * rng.choice([0, 0, 8, 21])
    prompt = [VOCAB.index(letter) for letter in start] + [
        rng.randrange(1, len(VOCAB)) for _ in range(rng.randint(1, 9))
    ]
    max_tokens = rng.choice([1, 3, 8, 14, 24])
    greedy = rng.random() < 0.5
    options: dict[str, Any] = (
        {}
        if greedy
        else dict(
            temperature=rng.choice([0.7, 1.0, 1.5]),
            top_k=rng.choice([0, 20]),
            top_p=rng.choice([0.9, 1.0]),
            min_p=rng.choice([0.0, 0.05]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
            min_tokens=rng.choice([0, 0, max_tokens // 2]),
            seed=rng.choice([None, rng.randrange(1000)]),
            n=rng.choice([1, 1, 2, 3]),
        )
    )
    return Sent(
        prompt,
        SamplingParams(
            max_tokens=max_tokens,
            stop=rng.choice([None, None, [rng.choice(LETTERS)], [rng.choice("uvwx") + rng.choice(LETTERS), "zz"]]),
            stop_token_ids=rng.choice([None, [rng.randrange(1, len(VOCAB)) for _ in range(3)]]),
            ignore_eos=rng.random() < 0.3,
            logprobs=rng.choice([None, None, None, 2]),
            prompt_logprobs=rng.choice([None] * 9 + [1]),
            include_stop_str_in_output=rng.random() < 0.2,
            skip_special_tokens=rng.random() < 0.8,
            **({"temperature": 0} | options),
        ),
    )


class Faults:
    """Makes the forward pass fail now and then, graph or not, and notes whom each failing step held."""

    def __init__(self, llm: LLM, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rng = rng
        self.hit: Counter[str] = Counter()
        self.num_failures = 0
        executor: Any = llm.engine.executor
        self._submit = executor.submit
        monkeypatch.setattr(executor, "submit", self.submit)
        monkeypatch.setattr(llm.model, "forward", self.failing(llm.model.forward))
        if executor.graphs is not None:
            monkeypatch.setattr(executor.graphs, "run", self.failing(executor.graphs.run))

    def failing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self.rng.random() < 0.004:
                raise RuntimeError("injected")
            return call(*args, **kwargs)

        return run

    def submit(self, plan: Any) -> None:
        try:
            self._submit(plan)
        except RuntimeError:
            self.num_failures += 1
            self.hit.update(entry.request.request_id for entry in plan.requests)
            raise


@pytest.mark.parametrize(("depth", "kv_cache_dtype"), [(1, "auto"), (2, "auto"), (1, "int4"), (2, "int8"), (2, "int4")])
def test_soak_500_random_requests_on_a_tiny_pool(model, tokenizer, monkeypatch, depth, kv_cache_dtype):
    rng = random.Random(depth)
    sent: dict[str, Sent] = {}
    unfinished: set[str] = set()
    num_aborts = num_steps = 0
    # int4 keys share scales over a block, which the kernels cut into tiles of 16 tokens
    block_size = 16 if model.device.type == "cuda" and kv_cache_dtype == "int4" else 4
    options = dict(block_size=block_size, max_model_len=MAX_MODEL_LEN, max_num_seqs=10)
    options["num_gpu_blocks_override"] = 24 if block_size == 4 else 8
    # A few blocks; tests/property/test_swap.py has CPUs.
    swap_space = 1e-5 if model.device.type == "cuda" or kv_cache_dtype != "auto" else 0
    options |= dict(max_num_batched_tokens=40, swap_space=swap_space, kv_cache_dtype=kv_cache_dtype)
    with LLM(model, tokenizer=tokenizer, seed=3, **options) as llm:
        llm.engine.scheduler.preemption_cost = PreemptionCost()  # swap whenever there is room
        llm.engine.executor.depth = depth
        kv = llm.engine.scheduler.kv
        faults = Faults(llm, random.Random(depth), monkeypatch)

        def take(outputs: list[RequestOutput]) -> None:
            for output in outputs:
                one = sent[output.request_id]
                assert one.num_ends == 0, f"{output.request_id} changed after its end"
                one.outputs.append(output)
                if output.finished:
                    one.num_ends += 1
                    unfinished.remove(output.request_id)

        while len(sent) < NUM_REQUESTS or llm.has_unfinished():
            while len(sent) < NUM_REQUESTS and len(unfinished) < 20 and rng.random() < 0.6:
                request_id, one = f"r{len(sent)}", random_request(rng)
                priority, salt = rng.choice([0, 0, 0, 1]), rng.choice([None, None, "tenant"])
                llm.add_request(request_id, one.prompt, one.params, priority=priority, cache_salt=salt)
                sent[request_id] = one
                unfinished.add(request_id)
            take(llm.step())
            kv.check()
            if unfinished and rng.random() < 0.04:
                num_aborts += llm.abort(rng.choice(sorted(unfinished)))
                kv.check()
            num_steps += 1
            assert num_steps < 20_000, "no progress"
        monkeypatch.undo()
        num_swaps = llm.stats.num_swaps

        assert all(one.num_ends == 1 for one in sent.values())
        kv.check()
        assert kv.usage().num_referenced_blocks == 0
        assert not llm._in_flight._trackers and not llm._in_flight._inboxes
        assert not llm.engine.has_unfinished and not llm.engine._under_way
        executor = llm.engine.executor
        assert isinstance(executor, ModelExecutor)
        if executor.tail_rows is not None:  # those of the last step are taken back with the next
            assert {*executor.tail_rows._rows} <= {*llm.engine.scheduler._ended_ids}

    errors = {name for name, completion in sequences(sent) if completion.finish_reason == "error"}
    if depth == 1:
        assert errors == set(faults.hit)
    else:  # what ran ahead in a failing step may have ended by the result before it
        assert errors <= set(faults.hit)
    for one in sent.values():
        check_outputs(one)
    if kv_cache_dtype == "auto":
        check_greedy(model, sent.values())
    if kv_cache_dtype != "int4":  # what a token of an unfinished block was, others of that block saw unquantised
        check_seeded(model, tokenizer, sent.values(), kv_cache_dtype)

    ends = Counter(completion.finish_reason for _, completion in sequences(sent))
    num_preemptions = sum(one.outputs[-1].metrics.num_preemptions for one in sent.values())
    print(
        f"{num_steps} steps, {faults.num_failures} failed, {num_aborts} aborts, {num_preemptions} preemptions, {ends}"
    )
    assert min(ends[reason] for reason in ("stop", "length", "abort", "error")) > 10
    assert faults.num_failures > 1 and num_preemptions > 50 and (num_swaps > 0) == (swap_space > 0)
    assert sum(one.outputs[-1].num_cached_tokens for one in sent.values()) > 0


def sequences(sent: dict[str, Sent]) -> Iterator[tuple[str, CompletionOutput]]:
    """Every sequence by the name that the scheduler has for it."""
    for request_id, one in sent.items():
        for completion in one.outputs[-1].outputs:
            yield f"{request_id}#{completion.index}" if completion.index else request_id, completion


def check_outputs(one: Sent) -> None:
    """Outputs only grow, and each sequence ends where its params say, with exactly the text that they say."""
    params, last = one.params, one.outputs[-1]
    whole = all(completion.finish_reason in ("stop", "length") for completion in last.outputs)
    assert len(last.outputs) == params.n or not whole
    for before, after in pairwise(one.outputs):
        for old, new in zip(before.outputs, after.outputs, strict=False):
            assert new.text.startswith(old.text) and new.token_ids[: len(old.token_ids)] == old.token_ids
        assert len(before.prompt_logprobs or ()) <= len(after.prompt_logprobs or ())
    if params.prompt_logprobs is not None and whole:
        assert last.prompt_logprobs is not None and len(last.prompt_logprobs) == len(one.prompt)
    for completion in last.outputs:
        check_end(one, completion)


def check_end(one: Sent, completion: CompletionOutput) -> None:
    params, ids, reason = one.params, completion.token_ids, completion.stop_reason
    stop_ids = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else (EOS,))}
    text = "".join(VOCAB[t] for t in ids if t != EOS or not params.skip_special_tokens)
    assert len(ids) <= (params.max_tokens or 0) and (params.logprobs is None) == (completion.logprobs is None)
    assert completion.logprobs is None or len(completion.logprobs) == len(ids)
    assert not stop_ids & set(ids[params.min_tokens : -1])
    match completion.finish_reason, reason:
        case "stop", str():
            before_last = len(text) - len(VOCAB[ids[-1]])  # the stop string ends within the last token
            starts = [text.find(stop, max(0, before_last - len(stop) + 1)) for stop in params.stop or ()]
            text = text[: min(start for start in starts if start >= 0)] + (
                reason if params.include_stop_str_in_output else ""
            )
            assert text.endswith(reason) or not params.include_stop_str_in_output
        case "stop", _:
            assert ids[-1] == (EOS if reason is None else reason) and ids[-1] in stop_ids
            if not params.include_stop_str_in_output and (ids[-1] != EOS or not params.skip_special_tokens):
                text = text.removesuffix(VOCAB[ids[-1]])
        case "length", None:
            assert len(ids) == params.max_tokens or len(one.prompt) + len(ids) == MAX_MODEL_LEN
    assert completion.text == text
    if not params.include_stop_str_in_output and params.min_tokens == 0:
        assert not any(stop in completion.text for stop in params.stop or ())


@torch.inference_mode()
def check_greedy(model: LlamaForCausalLM, sent: Iterable[Sent]) -> None:
    """Each greedy token is the likeliest for transformers, which sees the request alone and has no cache."""
    num_tokens = 0
    for one in sent:
        ids = one.outputs[-1].outputs[0].token_ids
        if one.params.temperature == 0 and ids:
            whole = torch.tensor([one.prompt + ids], device=model.device)
            logits = model(whole, use_cache=False).logits[0, len(one.prompt) - 1 : -1]
            chosen = logits.gather(1, torch.tensor(ids, device=model.device)[:, None])[:, 0]
            assert (chosen > logits.amax(1) - CLOSE).all(), one
            num_tokens += len(ids)
    assert num_tokens > 1000


def check_seeded(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, sent: Iterable[Sent], kv_cache_dtype: str
) -> None:
    """What has a seed draws the same again among other neighbours, and without pressure."""
    seeded = [one for one in sent if one.params.seed is not None and {"abort", "error"}.isdisjoint(one.reasons)]
    assert len(seeded) > 50
    options = dict(max_model_len=MAX_MODEL_LEN, num_gpu_blocks_override=400, kv_cache_dtype=kv_cache_dtype)
    with LLM(model, tokenizer=tokenizer, **options) as llm:
        again = llm.generate([one.prompt for one in seeded[::-1]], [one.params for one in seeded[::-1]], use_tqdm=False)
    for one, output in zip(seeded[::-1], again, strict=True):
        for got, want in zip(output.outputs, one.outputs[-1].outputs, strict=True):
            assert (got.token_ids, got.text, got.stop_reason) == (want.token_ids, want.text, want.stop_reason)
