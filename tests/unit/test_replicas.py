"""Which replica gets a request, and replicas as Ray actors where Ray is installed."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from labkit.engine import LLM
from labkit.engine.replicas import PrefixRouter, RayReplicas
from labkit.scheduling import SamplingParams


def test_requests_that_share_nothing_go_to_the_least_loaded():
    router = PrefixRouter(3, chunk_size=2)
    assert [router.route([n] * 4) for n in range(5)] == [0, 1, 2, 0, 1]
    router.finish(2)
    assert router.loads == [2, 2, 0]
    assert router.route([9] * 4) == 2


def test_the_longest_prefix_wins_over_the_load():
    router = PrefixRouter(2, chunk_size=2)
    assert router.route([1, 2, 3, 4]) == 0
    assert router.route([1, 2, 9, 9]) == 0  # one chunk of it has been seen
    router.finish(0)
    router.finish(0)
    assert router.route([7, 7, 7, 7]) == 0
    assert router.route([1, 2, 3, 4, 5, 6]) == 0
    assert router.route([8, 8]) == 1


def test_a_chunk_counts_only_after_all_before_it():
    router = PrefixRouter(2, chunk_size=2)
    assert router.route([1, 2, 3, 4]) == 0
    assert router.route([5, 6, 3, 4]) == 1


def test_a_prefix_that_all_share_is_spread_once_its_replica_leads():
    router = PrefixRouter(3, chunk_size=2, max_lead=4)
    chosen = [router.route([1, 2, 3, 4, n, n]) for n in range(30)]
    assert chosen[:4] == [0] * 4
    assert sorted(set(chosen)) == [0, 1, 2]
    assert max(router.loads) - min(router.loads) <= 4


def test_text_is_routed_by_its_characters_and_old_prefixes_are_forgotten():
    router = PrefixRouter(2, chunk_size=4, memory=3)
    assert router.route("You are a helpful assistant.") == 0  # 7 chunks, of which the first 3 stay
    router.finish(0)
    assert router._num_seen(0, router._hashes("You are a helpful assistant.")) == 3
    assert router.route("You are a he is something else") == 0


@pytest.mark.parametrize("bad", [{"num_replicas": 0}, {"chunk_size": 0}, {"max_lead": 0}, {"memory": 0}])
def test_bad_numbers_are_refused(bad):
    with pytest.raises(ValueError, match=f"{next(iter(bad))} must be >= 1, got 0"):
        PrefixRouter(**({"num_replicas": 1} | bad))


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_the_extra_is_named():
    with pytest.raises(ImportError, match=r"kv-labkit\[ray\]"):
        RayReplicas(1)


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'kv-labkit[ray]'")
def test_replicas_answer_as_one_engine_does(tiny_llama, tmp_path):
    ray = pytest.importorskip("ray")
    tiny_llama.save_pretrained(tmp_path)
    options = dict(num_gpu_blocks_override=32, max_num_seqs=4)
    prompts = [[5, 6, 7] * 8, [9, 9], [5, 6, 7] * 9, [3]]
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    with LLM(tiny_llama, **options) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        with RayReplicas(2, model=str(tmp_path), tokenizer=None, device="cpu", **options) as replicas:
            got = replicas.generate(prompts, params)
            assert [output.outputs[0].token_ids for output in got] == expected
            assert replicas.router.loads == [0, 0]
            assert replicas.generate([[5, 6, 7] * 8 + [1]], params)[0].num_cached_tokens == 16
    finally:
        ray.shutdown()
