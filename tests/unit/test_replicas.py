"""Which replica gets a request, and replicas as Ray actors where Ray is installed."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import SimpleNamespace

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


OPTIONS = dict(num_gpu_blocks_override=32, max_num_seqs=4)
PROMPTS = [[5, 6, 7] * 8, [9, 9], [5, 6, 7] * 9, [3]]
PARAMS = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


def _check_replicas(model) -> None:
    """Two replicas give one engine's answers, in order, and find the prefix that one of them has seen."""
    with LLM(model, **OPTIONS) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
    with RayReplicas(2, model=model, device="cpu", **OPTIONS) as replicas:
        got = replicas.generate(PROMPTS, PARAMS)
        assert [output.outputs[0].token_ids for output in got] == expected
        assert replicas.router.loads == [0, 0]
        assert replicas.generate([[5, 6, 7] * 8 + [1]], PARAMS)[0].num_cached_tokens == 16


class _RayInThisProcess:
    """As much of Ray as replicas use; its actors are plain objects."""

    def __init__(self) -> None:
        self.killed = 0

    is_initialized = staticmethod(lambda: True)
    cluster_resources = staticmethod(dict)
    get = staticmethod(lambda answers: answers)

    def remote(self, **resources):
        assert resources == {"num_gpus": 0, "num_cpus": 1}
        return lambda cls: SimpleNamespace(remote=lambda *arguments: _Actor(cls(*arguments)))

    def kill(self, actor) -> None:
        self.killed += 1


class _Actor:
    def __init__(self, target) -> None:
        self._target = target

    def __getattr__(self, name):
        return SimpleNamespace(remote=getattr(self._target, name))


def test_replicas_share_the_prompts_and_answer_in_their_order(tiny_llama, monkeypatch):
    ray = _RayInThisProcess()
    monkeypatch.setitem(sys.modules, "ray", ray)
    _check_replicas(tiny_llama)
    assert ray.killed == 2


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'kv-labkit[ray]'")
def test_replicas_as_ray_actors(tiny_llama):
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        _check_replicas(tiny_llama)
    finally:
        ray.shutdown()
