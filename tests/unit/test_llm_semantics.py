"""What the sampling params promise, through LLM: samples, stops, log-probabilities, priorities, seeds, aborts, ids."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from labkit.engine import LLM, RequestOutput
from labkit.scheduling import SamplingParams

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]
VOCAB = [f"{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(127)] + ["<eos>"]  # two letters a token


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(VOCAB)}, merges=[]))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


@pytest.fixture
def llm(tiny_llama, tokenizer) -> Iterator[LLM]:
    options = dict(block_size=4, num_gpu_blocks_override=64, max_num_seqs=8)
    with LLM(tiny_llama, tokenizer=tokenizer, **options) as llm:
        yield llm
        llm.engine.scheduler.kv.check()
        assert llm.engine.scheduler.kv.usage().num_referenced_blocks == 0


def generate(llm: LLM, prompt: Any = PROMPT, **params: Any) -> RequestOutput:
    return llm.generate(prompt, SamplingParams(**({"max_tokens": 8, "ignore_eos": True} | params)), use_tqdm=False)[0]


def drain(llm: LLM) -> list[RequestOutput]:
    outputs = []
    while llm.has_unfinished():
        outputs += llm.step()
    return outputs


# ---------------------------------------------------------------- n > 1


def test_samples_come_out_the_same_on_a_pool_that_cannot_hold_them_all(llm, tiny_llama):
    """The forks of one request are preempted and computed again one by one; none is lost and none changes."""
    roomy = generate(llm, n=4, max_tokens=16, seed=7)
    options = dict(block_size=4, max_model_len=28, num_gpu_blocks_override=12, max_num_seqs=8)
    with LLM(tiny_llama, **options) as tight:
        for _ in range(3):
            output = generate(tight, n=4, max_tokens=16, seed=7)
            assert [c.token_ids for c in output.outputs] == [c.token_ids for c in roomy.outputs]
            assert [c.index for c in output.outputs] == [0, 1, 2, 3] and output.metrics.num_preemptions > 0
            tight.engine.scheduler.kv.check()


def test_greedy_samples_are_all_alike(llm):
    output = generate(llm, n=3, temperature=0)
    assert len({tuple(c.token_ids) for c in output.outputs}) == 1


def test_each_sample_stops_for_itself(llm):
    free = generate(llm, n=4, seed=3)
    stop = free.outputs[2].token_ids[2]
    output = generate(llm, n=4, seed=3, stop_token_ids=[stop])
    for got, want in zip(output.outputs, free.outputs, strict=True):
        end = want.token_ids.index(stop) + 1 if stop in want.token_ids else 8
        assert got.token_ids == want.token_ids[:end]
        assert (got.finish_reason, got.stop_reason) == (("stop", stop) if stop in want.token_ids else ("length", None))


def test_a_request_with_samples_ends_once_all_of_them_have(llm):
    stop = generate(llm, n=3, seed=3).outputs[0].token_ids[1]
    llm.add_request("a", PROMPT, SamplingParams(n=3, seed=3, max_tokens=8, stop_token_ids=[stop], ignore_eos=True))
    outputs = drain(llm)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert outputs[-2].outputs[0].finished  # while others went on


# ---------------------------------------------------------------- log-probabilities


def test_prompt_logprobs_are_computed_although_the_prompt_is_cached(llm):
    first = generate(llm, temperature=0)
    hit = generate(llm, temperature=0)
    assert first.num_cached_tokens == 0 and hit.num_cached_tokens == 8
    output = generate(llm, temperature=0, prompt_logprobs=2)
    assert output.num_cached_tokens == 0
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(PROMPT)
    for token_id, row in zip(PROMPT[1:], output.prompt_logprobs[1:], strict=True):
        assert row is not None and token_id in row and len(row) in (2, 3)
    assert output.outputs[0].token_ids == first.outputs[0].token_ids


@pytest.mark.parametrize("chunk", [3, 64])
def test_prompt_logprobs_survive_chunks_and_preemptions_and_never_shrink(tiny_llama, chunk):
    prompts = [PROMPT[i:] + PROMPT[:i] for i in range(5)]
    params = SamplingParams(temperature=0, max_tokens=16, prompt_logprobs=0, ignore_eos=True)
    with LLM(tiny_llama, num_gpu_blocks_override=64) as roomy:
        want = roomy.generate(prompts, params, use_tqdm=False)
    options = dict(block_size=4, max_model_len=28, num_gpu_blocks_override=10, max_num_seqs=min(chunk, 5))
    seen: dict[str, RequestOutput] = {}
    with LLM(tiny_llama, max_num_batched_tokens=chunk, **options) as tight:
        for output in tight.stream(prompts, params):
            assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(PROMPT)
            seen[output.request_id] = output
    assert sum(output.metrics.num_preemptions for output in seen.values()) > 0
    for got, expected in zip(seen.values(), want, strict=True):
        assert got.prompt_logprobs is not None and expected.prompt_logprobs is not None
        for mine, theirs in zip(got.prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True):
            assert mine is not None and theirs is not None and mine.keys() == theirs.keys()
            for token_id in mine:
                assert mine[token_id].logprob == pytest.approx(theirs[token_id].logprob, abs=1e-4)


def test_logprobs_0_tells_of_the_chosen_token_alone(llm):
    completion = generate(llm, temperature=1.5, seed=1, logprobs=0).outputs[0]
    assert completion.logprobs is not None
    assert [list(row) for row in completion.logprobs] == [[token_id] for token_id in completion.token_ids]


def test_logprobs_are_asked_for_request_by_request(llm):
    params = [SamplingParams(temperature=0, max_tokens=4, logprobs=count, ignore_eos=True) for count in (None, 3, 0)]
    none, three, zero = (o.outputs[0] for o in llm.generate([PROMPT] * 3, params, use_tqdm=False))
    assert none.logprobs is None and none.cumulative_logprob is None
    assert [len(row) for row in three.logprobs or ()] == [3] * 4 and [len(row) for row in zero.logprobs or ()] == [
        1
    ] * 4
    assert three.cumulative_logprob == pytest.approx(zero.cumulative_logprob)


# ---------------------------------------------------------------- text


def test_stop_strings_across_and_inside_tokens_are_cut_and_never_streamed(llm):
    whole = generate(llm, temperature=0).outputs[0].text
    assert len(whole) == 16
    for start, length in ((5, 3), (4, 2), (5, 1), (6, 4), (1, 7)):
        stop = whole[start : start + length]
        cut = whole.index(stop)
        outputs = list(llm.stream(PROMPT, SamplingParams(temperature=0, max_tokens=8, stop=stop, ignore_eos=True)))
        for output in outputs:
            assert whole[:cut].startswith(output.outputs[0].text)
        last = outputs[-1].outputs[0]
        assert (last.text, last.finish_reason, last.stop_reason) == (whole[:cut], "stop", stop)
        assert len(last.token_ids) == -(-(cut + length) // 2)  # no token after the one that completed it
        kept = generate(llm, temperature=0, stop=stop, include_stop_str_in_output=True).outputs[0]
        assert kept.text == whole[: cut + length]


def test_a_stop_token_is_text_only_if_asked_for(llm):
    whole = generate(llm, temperature=0).outputs[0]
    stop = whole.token_ids[3]
    end = 2 * whole.token_ids.index(stop)
    assert generate(llm, temperature=0, stop_token_ids=[stop]).outputs[0].text == whole.text[:end]
    kept = generate(llm, temperature=0, stop_token_ids=[stop], include_stop_str_in_output=True).outputs[0]
    assert kept.text == whole.text[: end + 2] and kept.token_ids[-1] == stop


def test_special_tokens_are_shown_only_if_asked_for(tiny_llama, tokenizer):
    """The likeliest first token is made the end of sequence, and the request goes on past it."""
    with LLM(tiny_llama, num_gpu_blocks_override=16) as llm:
        first = generate(llm, temperature=0).outputs[0].token_ids[0]
    special = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(tokenizer.backend_tokenizer.to_str()))
    special.add_special_tokens({"eos_token": VOCAB[first]})
    with LLM(tiny_llama, tokenizer=special, num_gpu_blocks_override=16) as llm:
        shown = generate(llm, temperature=0, skip_special_tokens=False).outputs[0]
        hidden = generate(llm, temperature=0).outputs[0]
        ended = generate(llm, temperature=0, ignore_eos=False).outputs[0]
    assert shown.token_ids == hidden.token_ids and shown.token_ids[0] == first
    assert shown.text == "".join(VOCAB[t] for t in shown.token_ids)
    assert hidden.text == "".join(VOCAB[t] for t in hidden.token_ids if t != first)
    assert (ended.token_ids, ended.text, ended.finish_reason, ended.stop_reason) == ([first], "", "stop", None)


def test_no_way_to_stop_before_min_tokens(llm):
    whole = generate(llm, temperature=0).outputs[0]
    stop = whole.token_ids[0]
    held = generate(llm, temperature=0, stop_token_ids=[stop], min_tokens=4).outputs[0]
    assert stop not in held.token_ids[:4] and len(held.token_ids) >= 4
    held = generate(llm, temperature=0, stop=whole.text[0], min_tokens=4).outputs[0]
    assert len(held.token_ids) >= 4 and held.token_ids == whole.token_ids[: len(held.token_ids)]


# ---------------------------------------------------------------- penalties and seeds


def test_repetition_penalty_is_that_of_transformers(llm, tiny_llama: LlamaForCausalLM):
    got = generate(llm, temperature=0, repetition_penalty=1.4, max_tokens=20).outputs[0].token_ids
    llm.close()
    ids = torch.tensor([PROMPT])
    options = dict(do_sample=False, repetition_penalty=1.4, min_new_tokens=20, max_new_tokens=20)
    want = tiny_llama.generate(ids, attention_mask=torch.ones_like(ids), **options)  # type: ignore[operator]
    assert got == want[0, len(PROMPT) :].tolist()


def test_min_p_of_one_is_greedy_whatever_the_temperature(llm):
    greedy = generate(llm, temperature=0).outputs[0].token_ids
    assert generate(llm, temperature=5.0, min_p=1.0, seed=2).outputs[0].token_ids == greedy


def test_a_seed_draws_the_same_whoever_else_runs(llm):
    alone = generate(llm, seed=11, temperature=2.0, max_tokens=12).outputs[0].token_ids
    mine = SamplingParams(seed=11, temperature=2.0, max_tokens=12, ignore_eos=True)
    others = SamplingParams(temperature=1.0, max_tokens=5, top_k=3, ignore_eos=True)
    for place in (0, 3, 5):
        prompts, params = [[7, 7, 7]] * 5, [others] * 5
        prompts.insert(place, PROMPT)
        params.insert(place, mine)
        assert llm.generate(prompts, params, use_tqdm=False)[place].outputs[0].token_ids == alone


# ---------------------------------------------------------------- priorities, aborts, ids


def test_smaller_priorities_are_served_first(tiny_llama):
    with LLM(tiny_llama, num_gpu_blocks_override=16, max_num_seqs=1) as llm:
        for request_id, priority in (("later", 1), ("sooner", 0), ("first", -1)):
            llm.add_request(request_id, PROMPT, SamplingParams(max_tokens=3, ignore_eos=True), priority=priority)
        assert [o.request_id for o in drain(llm) if o.finished] == ["first", "sooner", "later"]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_steps", range(7))
def test_abort_at_any_moment_frees_the_blocks_and_the_id(llm, num_steps, depth):
    """Waiting, half a prompt computed, forked, decoding, a step under way; then the same id is used again."""
    llm.engine.executor.depth = depth
    kv = llm.engine.scheduler.kv
    want = generate(llm, n=2, seed=5, max_tokens=4).outputs
    params = SamplingParams(n=2, seed=5, max_tokens=4, ignore_eos=True)
    llm.add_request("other", [9, 9, 9], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    llm.add_request("mine", PROMPT, params)
    for _ in range(num_steps):
        llm.step()
    before = llm.abort("mine")
    assert "mine" not in kv and "mine#1" not in kv and not llm.abort("mine")
    kv.check()
    outputs = [o for o in llm.step() if o.request_id == "mine"] if before else []
    llm.add_request("mine", PROMPT, params)
    after = drain(llm)
    if before:
        assert outputs[-1].finished and "abort" in {c.finish_reason for c in outputs[-1].outputs}
    mine = [o for o in after if o.request_id == "mine"][-1]
    assert [c.token_ids for c in mine.outputs] == [c.token_ids for c in want]
    other = [o for o in after if o.request_id == "other"][-1]
    assert other.outputs[0].finish_reason == "length" and len(other.outputs[0].token_ids) == 12


def test_aborting_the_last_request_leaves_no_step_under_way(llm):
    llm.engine.executor.depth = 2
    llm.add_request("a", PROMPT, SamplingParams(max_tokens=8, ignore_eos=True))
    llm.step()
    assert llm.abort("a")
    assert [o.outputs[0].finish_reason for o in llm.step()] == ["abort"]
    assert not llm.engine._under_way and not llm.engine.executor._under_way  # type: ignore[attr-defined]
    assert not llm.has_unfinished()


def test_an_interrupted_step_ends_its_requests_and_says_so(llm, monkeypatch):
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    for i in range(10):  # 8 run at once
        llm.add_request(f"r{i}", [i + 1, i + 2], params)
    llm.step()
    with monkeypatch.context() as patch:
        patch.setattr(llm.model, "forward", lambda *args, **kwargs: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            llm.step()
    ends = {output.request_id: output.outputs[0].finish_reason for output in drain(llm) if output.finished}
    assert ends == {f"r{i}": "abort" if i < 8 else "length" for i in range(10)}
    llm.add_request("r0", PROMPT, params)
    assert len(drain(llm)) == 4
