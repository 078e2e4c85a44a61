"""paged_attention against float64, in the interpreter on CPU and, unchanged, on a GPU."""

from __future__ import annotations

import pytest
import torch

RATIOS = [(1, 1), (3, 1), (4, 1), (5, 1), (8, 1), (9, 1), (71, 1), (4, 2), (2, 2)]
HEAD_SIZES = [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)]


@pytest.mark.parametrize("ratio", RATIOS, ids=str)
def test_every_head_ratio_in_one_mixed_batch(paged_batch, tolerance, ratio):
    batch = paged_batch((*ratio, 64, 64), seq_lens=[1, 70, 33, 45], query_lens=[1, 1, 33, 20])
    assert batch.error() < tolerance[torch.float32]


@pytest.mark.parametrize("sizes", HEAD_SIZES, ids=str)
@pytest.mark.parametrize("group", [1, 3])
def test_every_head_size(paged_batch, tolerance, sizes, group):
    batch = paged_batch((group, 1, *sizes), seq_lens=[40, 19], query_lens=[1, 19])
    assert batch.error() < tolerance[torch.float32]


@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256, 48])
@pytest.mark.parametrize("query_len", [1, 17])
def test_every_block_size_at_its_borders(paged_batch, tolerance, block_size, query_len):
    lens = [max(query_len, n) for n in (1, block_size - 1, block_size, block_size + 1)]
    batch = paged_batch((4, 2, 64, 64), lens, [query_len] * 4, block_size=block_size)
    assert batch.error() < tolerance[torch.float32]


@pytest.mark.parametrize("heads", [(2, 2, 64, 64), (4, 2, 64, 64)], ids=["mha", "gqa"])
@pytest.mark.parametrize("query_lens", [[1, 1, 1], [1, 5, 40]], ids=["decode", "mixed"])
@pytest.mark.parametrize("window", [1, 7, 50])
def test_sliding_window(paged_batch, tolerance, heads, query_lens, window):
    batch = paged_batch(heads, [300, 90, 75], query_lens, options={"sliding_window": window})
    assert batch.error() < tolerance[torch.float32]


@pytest.mark.parametrize("heads", [(2, 2, 64, 64), (6, 2, 64, 64)], ids=["mha", "gqa"])
@pytest.mark.parametrize("query_lens", [[1, 1], [30, 2]], ids=["decode", "mixed"])
def test_sinks_softcap_and_window_together(paged_batch, tolerance, heads, query_lens):
    sinks = torch.linspace(-3, 6, heads[0])
    batch = paged_batch(heads, [200, 40], query_lens)
    options = {"sliding_window": 60, "softcap": 2.0, "sinks": sinks.to(batch.device)}
    batch = paged_batch(heads, [200, 40], query_lens, options=options)
    assert batch.error() < tolerance[torch.float32]


@pytest.mark.parametrize("query_lens", [[1, 1, 1, 1], [1, 30, 0, 1]], ids=["decode", "mixed"])
def test_padded_rows_and_empty_sequences_are_zeros(paged_batch, tolerance, query_lens):
    batch = paged_batch((4, 2, 64, 64), [0, 40, 0, 33], query_lens, padded_rows=3)
    assert batch.error() < tolerance[torch.float32]
    assert torch.all(batch.kernel()[-3:] == 0)
    assert torch.all(batch.kernel()[0] == 0)


def test_empty_batch(paged_batch):
    from labkit.kernels import paged_attention

    batch = paged_batch((2, 1, 64, 64), [], [], padded_rows=2)
    assert torch.all(paged_attention(batch.q, batch.kv, *batch.metadata, **batch.arguments) == 0)


def test_infinite_values_in_unused_slots_change_nothing(paged_batch):
    batch = paged_batch((4, 2, 64, 64), [37, 20], [1, 20])
    before = batch.kernel()
    for pages in batch.kv:
        pages[torch.isnan(pages)] = torch.inf
    assert torch.equal(before, batch.kernel())


def test_one_workspace_serves_batches_of_any_shape(paged_batch, tolerance):
    from labkit.kernels import Workspace

    batches = [
        paged_batch((4, 2, 64, 64), [500], [1]),
        paged_batch((4, 2, 64, 64), [3, 90, 17, 200, 1], [1] * 5),
        paged_batch((4, 2, 64, 64), [90, 300, 12], [60, 1, 1]),
    ]
    workspace = Workspace.allocate(64, batches[0].device)
    for batch in batches * 2:
        assert batch.error(workspace=workspace) < tolerance[torch.float32]
        assert torch.all(workspace.arrivals == 0)


def test_slot_major_pages_by_strides(paged_batch):
    batch = paged_batch((4, 2, 64, 64), [37, 20], [1, 20])
    head_major = batch.kernel()
    batch.kv = type(batch.kv)(*(p.transpose(1, 2).contiguous().transpose(1, 2) for p in batch.kv))
    assert torch.equal(head_major, batch.kernel())


@pytest.mark.parametrize("heads", [(2, 2, 64, 64), (8, 2, 128, 128)], ids=["mha", "gqa"])
def test_float16(paged_batch, tolerance, heads):
    batch = paged_batch(heads, [100, 60, 31], [1, 60, 2], dtype=torch.float16)
    assert batch.error() < tolerance[torch.float16]


@pytest.mark.parametrize("seed", range(4))
def test_random_ragged_batches(paged_batch, tolerance, seed):
    gen = torch.Generator().manual_seed(100 + seed)
    seq_lens = torch.randint(1, 150, (6,), generator=gen).tolist()
    query_lens = [min(n, int(torch.randint(1, 40, (1,), generator=gen))) if n % 2 else 1 for n in seq_lens]
    batch = paged_batch((6, 2, 64, 64), seq_lens, query_lens, seed=seed, padded_rows=1)
    assert batch.error() < tolerance[torch.float32]


def test_bad_arguments_are_named(paged_batch):
    from labkit.kernels import paged_attention

    batch = paged_batch((4, 2, 64, 64), [20], [1])
    table, lens, starts = batch.metadata
    good = dict(scale=0.125, max_query_len=1)
    with pytest.raises(TypeError, match="seq_lens must be int32"):
        paged_attention(batch.q, batch.kv, table, lens.long(), starts, **good)
    with pytest.raises(ValueError, match="query_start_loc"):
        paged_attention(batch.q, batch.kv, table, lens, starts[:1], **good)
    with pytest.raises(ValueError, match="3 query heads"):
        paged_attention(batch.q[:, :3], batch.kv, *batch.metadata, **good)
    with pytest.raises(ValueError, match="sliding_window must be at least 1, got 0"):
        paged_attention(batch.q, batch.kv, *batch.metadata, **good, sliding_window=0)
    with pytest.raises(ValueError, match="sinks must be"):
        paged_attention(batch.q, batch.kv, *batch.metadata, **good, sinks=torch.zeros(3))
    with pytest.raises(TypeError, match="share a dtype"):
        paged_attention(batch.q.half(), batch.kv, *batch.metadata, **good)


@pytest.mark.parametrize("num_sms", [1, 132])
def test_program_counts_cut_equal_sequences_alike_and_never_exceed_a_wave_by_little(num_sms):
    from labkit.kernels.tuning import decode_programs

    for pairs in range(1, 40 * num_sms):
        programs = decode_programs(pairs, 4, num_sms)
        resident = 4 * num_sms
        assert programs <= resident or programs == pairs >= 4 * resident
        assert programs % pairs == 0 or programs == resident
