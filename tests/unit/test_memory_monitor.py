"""The memory monitor: parts add up, views count once, and recording needs no cooperation."""

import time

import pytest
import torch

from labkit.engine.memory_monitor import MemoryMonitor, unique_storage_bytes
from labkit.memory import KVCacheManager


def test_views_of_one_storage_count_once():
    storage = torch.zeros(1024, dtype=torch.float32)
    views = [storage, storage[:10], storage.view(32, 32), storage.expand(4, 1024)]
    assert unique_storage_bytes([*views, torch.zeros(8, dtype=torch.int8)]) == 4096 + 8


def test_packed_sequences_and_other_objects_nearby_do_no_harm():
    packed = torch.nn.utils.rnn.pack_sequence([torch.zeros(3, 2), torch.zeros(2, 2)])
    assert unique_storage_bytes([packed.data]) == 5 * 2 * 4


def monitor(kv: KVCacheManager, **options) -> MemoryMonitor:
    weights, pool = torch.zeros(1000), torch.zeros(kv.num_blocks, 1, kv.block_size, 4)
    return MemoryMonitor([weights, weights[:10]], [pool, pool.view(-1)], kv.usage, "cpu", **options)


def test_the_parts_add_up_and_the_pool_is_split_as_the_manager_says():
    kv = KVCacheManager(8, 4)
    tokens = list(range(10))
    kv.admit("a", 10)
    kv.commit("a", tokens, 10)
    kv.admit("b", 5)
    kv.commit("b", list(range(100, 105)), 5)
    kv.free("b")
    snapshot = monitor(kv).snapshot()
    assert sum(snapshot.parts().values()) == snapshot.total
    assert snapshot.weights == 4000
    slot = 16
    assert (snapshot.kv_live, snapshot.kv_fragmentation) == (10 * slot, 2 * slot)
    assert (snapshot.kv_cached, snapshot.kv_free) == (4 * slot, 16 * slot)
    assert all(part >= 0 for part in snapshot.parts().values())


def test_blocks_on_their_way_to_the_host_are_neither_live_nor_free():
    kv = KVCacheManager(8, 4, num_host_blocks=8, enable_prefix_caching=False)
    kv.admit("a", 10)
    kv.commit("a", list(range(10)), 10)
    copies = kv.swap_out("a")
    tails = [torch.zeros(100)]
    snapshot = monitor(kv, kv_tails=tails).snapshot()
    assert (snapshot.kv_live, snapshot.kv_fragmentation, snapshot.kv_in_flight) == (0, 0, 12 * 16)
    assert (snapshot.kv_free, snapshot.kv_tails) == (20 * 16, 400)
    assert sum(snapshot.parts().values()) == snapshot.total
    kv.land(copies or [], [])
    assert monitor(kv).snapshot().kv_in_flight == 0


def test_it_records_in_the_background_and_at_the_end():
    kv = KVCacheManager(8, 4)
    with monitor(kv, interval=0.01) as recording:
        deadline = time.monotonic() + 30
        while len(recording.snapshots) < 2 and time.monotonic() < deadline:  # a busy machine takes its time
            time.sleep(0.01)
        kv.admit("a", 8)
        kv.commit("a", list(range(8)), 8)
    table = recording.timeline()
    assert len(table) >= 3
    assert table["time"].is_monotonic_increasing
    assert table["kv_live"].iloc[0] == 0 and table["kv_live"].iloc[-1] == 8 * 16


def test_a_bad_interval_is_refused():
    with pytest.raises(ValueError, match="interval must be > 0 seconds, got 0"):
        monitor(KVCacheManager(8, 4), interval=0)
