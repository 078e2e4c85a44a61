"""What a caller of LLM relies on: order, texts, streams, samples, aborts, interrupts, and several engines at once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from labkit.engine import LLM
from labkit.memory import KVCacheManager
from labkit.scheduling import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5], [9] * 20, [2, 7, 1, 8], [31, 41, 59, 26]]


@pytest.fixture
def llm(tiny_llama) -> Iterator[LLM]:
    with LLM(tiny_llama, block_size=4, num_gpu_blocks_override=64, max_num_seqs=8) as llm:
        yield llm
        llm.engine.scheduler.kv.check()
        assert not llm.has_unfinished()
        assert llm.engine.scheduler.kv.usage().num_referenced_blocks == 0


@pytest.fixture(scope="module")
def expected(tiny_llama) -> list[list[int]]:
    return [reference(tiny_llama, prompt, 8) for prompt in PROMPTS]


def reference(model, prompt: list[int], count: int) -> list[int]:
    """Greedy continuation by whole forward passes, no cache."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def tokens(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_outputs_come_in_the_order_of_the_prompts_however_long_each_takes(llm, expected):
    lengths = [8, 1, 5, 2, 7]
    params = [replace(GREEDY, max_tokens=n, stop=None) for n in lengths]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert tokens(outputs) == [ids[:n] for ids, n in zip(expected, lengths, strict=True)]
    assert [output.prompt_token_ids for output in outputs] == PROMPTS
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)


def test_prompts_may_come_in_several_forms(llm, expected):
    ids = PROMPTS[0]
    for prompts in (ids, tuple(ids), {"prompt_token_ids": ids}, [{"prompt_token_ids": ids}]):
        assert tokens(llm.generate(prompts, GREEDY, use_tqdm=False)) == expected[:1]


def test_a_stop_token_ends_a_request_and_is_its_reason(llm, expected):
    stop = expected[0][3]
    output = llm.generate(PROMPTS[0], replace(GREEDY, stop_token_ids=[stop], stop=None), use_tqdm=False)[0].outputs[0]
    assert output.token_ids == expected[0][: expected[0].index(stop) + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)


def test_stream_yields_growing_outputs_and_ends_with_the_same(llm, expected):
    seen: dict[str, list[int]] = {}
    for output in llm.stream(PROMPTS, GREEDY):
        before, now = seen.get(output.request_id, []), output.outputs[0].token_ids
        assert now[: len(before)] == before and len(now) == len(before) + 1
        seen[output.request_id] = now
    assert list(seen.values()) == expected


def test_leaving_a_stream_early_aborts_what_has_not_ended(llm, expected):
    for output in llm.stream(PROMPTS, GREEDY):
        if len(output.outputs[0].token_ids) == 3:
            break
    del output
    assert not llm.has_unfinished()
    assert tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected


def test_several_callers_get_their_own_outputs(llm, expected):
    llm.add_request("mine", PROMPTS[0], GREEDY)
    stream = llm.stream(PROMPTS[1:3], GREEDY)
    first = next(stream)
    assert tokens(llm.generate(PROMPTS[3:], GREEDY, use_tqdm=False)) == expected[3:]
    last = {output.request_id: output for output in [first, *stream]}
    assert sorted(tokens(last.values())) == sorted(expected[1:3])
    mine = []
    while llm.has_unfinished():
        mine += llm.step()
    assert {output.request_id for output in mine} == {"mine"}
    assert mine[-1].outputs[0].token_ids == expected[0] and mine[-1].finished


def test_samples_of_one_prompt_differ_share_its_blocks_and_repeat_with_their_seed(llm):
    params = SamplingParams(n=4, max_tokens=12, seed=5, ignore_eos=True)
    output = llm.generate(PROMPTS[2], params, use_tqdm=False)[0]
    assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 4
    again = llm.generate([PROMPTS[1], PROMPTS[2]], [GREEDY, params], use_tqdm=False)[1]
    assert [c.token_ids for c in again.outputs] == [c.token_ids for c in output.outputs]
    single = llm.generate(PROMPTS[2], replace(params, n=1, stop=None), use_tqdm=False)[0]
    assert single.outputs[0].token_ids == output.outputs[0].token_ids


def test_requests_without_a_seed_differ_and_an_llm_repeats_itself(tiny_llama):
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    runs = []
    for seed in (0, 0, 1):
        with LLM(tiny_llama, num_gpu_blocks_override=64, seed=seed) as llm:
            runs.append(tokens(llm.generate([PROMPTS[0]] * 3, params, use_tqdm=False)))
    assert runs[0] == runs[1] != runs[2]
    assert len({tuple(ids) for ids in runs[0]}) == 3


def test_logprobs_agree_with_the_model(llm, tiny_llama, expected):
    params = replace(GREEDY, logprobs=3, prompt_logprobs=2, stop=None)
    output = llm.generate(PROMPTS[1], params, use_tqdm=False)[0]
    llm.close()  # gives the model its own attention back
    ids = PROMPTS[1] + expected[1]
    with torch.inference_mode():
        logprobs = tiny_llama(torch.tensor([ids])).logits[0].log_softmax(-1)
    completion = output.outputs[0]
    assert completion.logprobs is not None and output.prompt_logprobs is not None
    assert len(completion.logprobs) == 8 and output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(PROMPTS[1])
    found = output.prompt_logprobs[1:] + completion.logprobs
    for position, row in enumerate(found):
        assert row is not None and ids[position + 1] in row
        for token_id, entry in row.items():
            assert entry.logprob == pytest.approx(float(logprobs[position, token_id]), abs=1e-4)
        ranks = [entry.rank for entry in row.values() if entry.rank is not None]
        assert sorted(ranks) == list(range(1, len(ranks) + 1))
    chosen = [row[token_id].logprob for row, token_id in zip(completion.logprobs, expected[1], strict=True)]
    assert completion.cumulative_logprob == pytest.approx(sum(chosen))


def test_an_interrupt_leaves_the_engine_usable_and_the_pool_empty(llm, expected, monkeypatch):
    calls = 0
    submit = llm.engine.executor.submit

    def interrupted(plan):
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        submit(plan)

    monkeypatch.setattr(llm.engine.executor, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert not llm.has_unfinished()
    assert llm.engine.scheduler.kv.usage().num_referenced_blocks == 0
    assert tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected


def test_a_failing_step_fails_its_requests_with_a_warning_and_no_others(llm, expected, monkeypatch):
    submit = llm.engine.executor.submit
    broken = True

    def fails_once(plan):
        nonlocal broken
        if broken:
            broken = False
            raise RuntimeError("out of memory, say")
        submit(plan)

    monkeypatch.setattr(llm.engine.executor, "submit", fails_once)
    many = PROMPTS * 2  # 8 run at once, so the failing step holds 8 and 2 wait
    with pytest.warns(UserWarning, match="out of memory, say"):
        outputs = llm.generate(many, GREEDY, use_tqdm=False)
    reasons = [output.outputs[0].finish_reason for output in outputs]
    assert reasons == ["error"] * 8 + ["length"] * 2
    assert "out of memory" in str(outputs[0].outputs[0].stop_reason)
    assert tokens(outputs[8:]) == expected[3:]


def test_a_tight_pool_with_preemptions_gives_the_same_tokens(tiny_llama, expected):
    with LLM(tiny_llama, block_size=2, max_model_len=30, num_gpu_blocks_override=16, max_num_seqs=8) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert tokens(outputs) == expected
        assert sum(output.metrics.num_preemptions for output in outputs) > 0


def test_prefix_cache_hits_and_salts(llm, expected):
    prompt = list(range(40, 60))
    first, second = (llm.generate(prompt, GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert first.num_cached_tokens == 0 and second.num_cached_tokens == 16
    assert tokens([first]) == tokens([second])
    for salt, cached in (("a", 0), ("a", 16), ("b", 0)):
        llm.add_request("salted", prompt, GREEDY, cache_salt=salt)
        outputs = []
        while llm.has_unfinished():
            outputs += llm.step()
        assert outputs[-1].num_cached_tokens == cached
        assert outputs[-1].outputs[0].token_ids == tokens([first])[0]
    llm.reset_prefix_cache()
    assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0


@pytest.mark.parametrize("kv_allocator", ["reserve_max", "reserve_power_of_two", "reserve_oracle", "first_fit"])
@pytest.mark.parametrize("scheduler", ["continuous", "static"])
def test_the_contiguous_world_gives_the_same_tokens(tiny_llama, expected, kv_allocator, scheduler):
    options = dict(block_size=4, max_model_len=32, num_gpu_blocks_override=24, max_num_seqs=8)
    with LLM(tiny_llama, kv_allocator=kv_allocator, scheduler=scheduler, **options) as llm:
        assert tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected
        assert not isinstance(llm.engine.scheduler.kv, KVCacheManager)


def test_two_engines_in_one_process(tiny_llama, expected):
    """They share the model; the steps of one fall between the steps of the other."""
    own_attention = tiny_llama.config._attn_implementation
    with LLM(tiny_llama, block_size=4) as one:
        with LLM(tiny_llama, block_size=8) as two:
            pairs = list(zip(one.stream(PROMPTS[0], GREEDY), two.stream(PROMPTS[1], GREEDY), strict=True))
            assert tokens(pairs[-1]) == expected[:2]
        assert tokens(one.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected  # two is closed, one is not
    assert tiny_llama.config._attn_implementation == own_attention


def test_a_dropped_llm_gives_the_model_and_the_memory_back(tiny_llama, expected):
    own_attention = tiny_llama.config._attn_implementation
    llm = LLM(tiny_llama, num_gpu_blocks_override=16)
    assert tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected
    page = weakref.ref(next(llm._built.storage.tensors()))  # type: ignore[union-attr]
    del llm
    gc.collect()
    assert tiny_llama.config._attn_implementation == own_attention
    assert page() is None


def test_attention_replaced_behind_our_back_is_an_error_not_a_wrong_answer(tiny_llama):
    llm = LLM(tiny_llama, num_gpu_blocks_override=16)
    tiny_llama.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match="attention was replaced"):
        llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    llm.close()


def test_memory_adds_up_and_prints(llm):
    memory = llm.memory
    assert memory.kv_pool == 64 * 4 * memory.bytes_per_token
    assert memory.bytes_per_token == 3 * 2 * 2 * 16 * 4  # layers x (K and V) x heads x head_dim x fp32
    assert "64 blocks x 4 tokens x 768 bytes" in repr(memory)


def test_stats_and_trace_tell_of_the_run(llm):
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert llm.trace is not None and len(llm.trace) == 8
    assert llm.stats.snapshot()["generated_tokens"] == 5 * 8
