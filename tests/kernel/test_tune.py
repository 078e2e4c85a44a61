"""The search for tiles: what it tries, beside the shipped tile, and that its numbers are about right answers."""

from __future__ import annotations

import pytest
import torch

from labkit.kernels.tuning import DecodeTile


@pytest.fixture
def tune(monkeypatch):
    from labkit.kernels import tune

    class ClockOfCalls:
        """Runs the calls once and says that one took 10 microseconds."""

        def __init__(self, calls, window_ms):
            for call in calls:
                call()

        def microseconds(self):
            return 10.0

    monkeypatch.setattr(tune, "Timer", ClockOfCalls)
    return tune


class SmallCase:
    heads = (4, 2, 16)

    def __init__(self, batch):
        from labkit.kernels import Workspace

        self.kv, (table, self.lens, self.starts), self.q = batch.kv, batch.metadata, batch.q
        self.out, self.scale, self.tables = torch.empty_like(batch.q), 0.25, [table]
        self.workspace = Workspace.allocate(16, batch.device)

    def kv_bytes(self):
        return 2 * int(self.lens.sum()) * 2 * 16 * 2


def test_rows_of_a_batch(tune, paged_batch, monkeypatch):
    case = SmallCase(paged_batch((4, 2, 16, 16), [33, 17], [1, 1]))
    shipped = DecodeTile(16, 16, 4, 2, 1, 16)
    monkeypatch.setattr(tune, "DECODE_CASES", [(case.heads, "2x33")])
    monkeypatch.setattr(tune, "SHAPES", {case.heads: [(16, 32, 2, 2), (8, 16, 2, 2, 128), (16, 64, 2, 2)]})
    monkeypatch.setattr(tune, "ONE_A_PAIR", 3)
    monkeypatch.setattr(tune, "shipped_decode", lambda *of: shipped)
    monkeypatch.setattr(tune, "Case", lambda *of: case)
    monkeypatch.setattr(tune, "device_limits", lambda device: (90, 1))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    properties = type("Properties", (), {"shared_memory_per_multiprocessor": 200_000})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    usage = {
        job: {"registers": 200, "spill_bytes": 8 * (job[4].block_n == 64), "shared_bytes": 150_000}
        for job in tune.decode_jobs(90, 1, case.heads, "2x33")
    }
    (rows,) = tune.tune_decode(None, usage, 4000.0)
    assert rows[0]["tile"]["block_n"] == 16 and rows[0]["ratio"] == 1.0
    assert {(row["tile"]["block_m"], row["tile"]["block_n"]) for row in rows} == {(16, 16), (16, 32), (8, 16)}
    launched = [(row["tile"]["block_m"], row["tile"]["block_n"], row["programs"]) for row in rows]
    assert len(set(launched)) == len(launched)
    assert all(row["difference"] < 1e-5 for row in rows)
    assert "shipped" in tune.best(rows)


def test_programs_that_fit_a_multiprocessor(tune):
    tile = {"registers": 250, "spill_bytes": 0, "shared_bytes": 71_680}
    assert tune.side_by_side(tile, 2, 233_472) == 3  # shared memory ends it
    assert tune.side_by_side(tile, 4, 233_472) == 2  # registers do
    assert tune.side_by_side(tile | {"spill_bytes": 8}, 2, 233_472) == 0
    assert tune.side_by_side(None, 2, 233_472) == 0


def test_an_unknown_group_is_named(tune, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="decoding"):
        tune.run(["decoding"])
