"""The five steps of the decode kernel compute the same thing."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("step", ["gather", "online_softmax", "gqa_packing", "split_kv", "shipped"])
def test_each_step_is_right(paged_batch, step):
    from labkit.kernels import steps

    batch = paged_batch((8, 2, 64, 64), [1, 70, 33, 600], [1] * 4)
    table, lens, _ = batch.metadata
    got = getattr(steps, step)(batch.q, batch.kv, table, lens, batch.arguments["scale"])
    expected = batch.expected()
    assert (got.double() - expected).norm() / expected.norm() < 3e-6
