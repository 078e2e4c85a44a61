"""Which replica gets a request, and what a replica needs; replicas on a real Ray are in test_ray_cluster.py."""

from __future__ import annotations

import sys

import pytest

from labkit.engine.replicas import PrefixRouter, RayReplicas, replica_resources


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


@pytest.mark.parametrize(
    ("options", "cluster", "needed"),
    [
        ({}, {"CPU": 2.0}, {"num_cpus": 1, "num_gpus": 0}),
        ({"device": "cpu"}, {"CPU": 2.0, "GPU": 8.0}, {"num_cpus": 1, "num_gpus": 0}),
        ({"tensor_parallel_size": 4}, {"CPU": 64.0, "GPU": 8.0}, {"num_cpus": 1, "num_gpus": 4}),
    ],
)
def test_a_replica_gets_a_gpu_for_each_of_its_ranks(options, cluster, needed):
    assert replica_resources(2, options, cluster) == needed


def test_more_replicas_than_the_cluster_has_room_for_are_refused():
    with pytest.raises(ValueError, match="num_replicas must be <= 2, got 3: each needs 4 GPUs, and .* has 8"):
        replica_resources(3, {"tensor_parallel_size": 4}, {"CPU": 64.0, "GPU": 8.0})


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"kv-labkit\[ray\]"):
        RayReplicas(1)


def test_a_router_for_another_number_of_replicas_is_refused():
    with pytest.raises(ValueError, match="router must be for 2 replicas, got one for 3"):
        RayReplicas(2, router=PrefixRouter(3))
