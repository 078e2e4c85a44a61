"""What only a GPU can show: 16-bit dots, many programs at once, CUDA graphs, caches beyond 2^31 numbers."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu

HEADS = [
    (32, 32, 128, 128), (32, 8, 128, 128), (32, 1, 128, 128), (9, 3, 64, 64), (40, 8, 128, 128), (71, 1, 64, 64),
    (32, 32, 80, 80), (32, 32, 96, 96), (16, 16, 192, 128), (8, 4, 256, 256), (16, 2, 256, 256),
]  # fmt: skip


def ragged(num_seqs: int, max_len: int, seed: int) -> list[int]:
    gen = torch.Generator().manual_seed(seed)
    return (torch.rand(num_seqs, generator=gen) ** 3 * max_len).int().clamp_min(1).tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_ragged_decode_and_mixed(paged_batch, tolerance, heads, dtype):
    lens = ragged(24, 3000, seed=heads[0])
    assert paged_batch(heads, lens, [1] * 24, dtype=dtype).error() < tolerance[dtype]
    mixed = [min(n, 300) if i % 6 == 0 else 1 for i, n in enumerate(lens)]
    assert paged_batch(heads, lens, mixed, dtype=dtype, padded_rows=5).error() < tolerance[dtype]


@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
def test_block_sizes(paged_batch, tolerance, block_size):
    lens = [1, block_size - 1, block_size, block_size + 1, 4 * block_size + 3, 2000]
    for query_lens in ([1] * 6, [1, 1, block_size, 1, block_size, 700]):
        batch = paged_batch((8, 2, 128, 128), lens, query_lens, block_size=block_size, dtype=torch.bfloat16)
        assert batch.error() < tolerance[torch.bfloat16]


def test_window_softcap_sinks(paged_batch, tolerance):
    sinks = torch.linspace(-2, 4, 8, device="cuda")
    options = {"sliding_window": 500, "softcap": 20.0, "sinks": sinks}
    for query_lens in ([1, 1, 1], [1, 900, 5]):
        batch = paged_batch((8, 2, 128, 128), [4000, 1000, 77], query_lens, dtype=torch.bfloat16, options=options)
        assert batch.error() < tolerance[torch.bfloat16]


def test_one_very_long_sequence(paged_batch, tolerance):
    for heads in ((4, 4, 128, 128), (8, 2, 128, 128)):
        assert paged_batch(heads, [70_001], [1], dtype=torch.bfloat16).error() < tolerance[torch.bfloat16]


def test_repeated_runs_agree_bit_for_bit(paged_batch):
    batch = paged_batch((8, 2, 128, 128), ragged(40, 4000, 3), [1] * 40, dtype=torch.bfloat16)
    first = batch.kernel()
    for _ in range(50):
        assert torch.equal(first, batch.kernel())


def test_calls_that_feed_each_other_wait_for_each_other(paged_batch):
    """Each call may be launched while the one before still runs (rope.py), and reads what that one wrote."""
    from labkit.kernels import Workspace, paged_attention

    batch = paged_batch((8, 2, 128, 128), [900, 30, 2000, 5], [1] * 4, dtype=torch.bfloat16)
    workspace = Workspace.allocate(128, "cuda")
    options = {"scale": 2.0, "max_query_len": 1, "workspace": workspace}  # large: what comes in decides what comes out

    def chain(between) -> torch.Tensor:
        outs = [torch.full_like(batch.q, torch.nan) for _ in range(20)]
        for q, out in zip([batch.q, *outs], outs, strict=False):
            paged_attention(q, batch.kv, *batch.metadata, **options, out=out)
            between()
        return torch.stack(outs)

    alone = chain(torch.cuda.synchronize)
    assert alone.isfinite().all()
    for _ in range(5):
        assert torch.equal(chain(lambda: None), alone)


def test_cuda_graph_replay_follows_new_lengths(paged_batch, tolerance):
    from labkit.kernels import Workspace

    batch = paged_batch((8, 2, 128, 128), [900, 30, 2000, 5], [1] * 4, dtype=torch.bfloat16)
    workspace = Workspace.allocate(128, "cuda")
    batch.kernel(workspace=workspace)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = batch.kernel(workspace=workspace)
    for new in ([899, 29, 1999, 4], [1, 1, 1500, 0], [900, 30, 2000, 5]):
        batch.metadata[1].copy_(torch.tensor(new))
        graph.replay()
        expected = batch.expected()
        assert (captured.double() - expected).norm() / expected.norm() < tolerance[torch.bfloat16]


def test_cache_beyond_two_to_the_31_numbers(paged_batch, tolerance):
    from labkit.kernels import KVPages, write_kv

    batch = paged_batch((8, 8, 128, 128), [70, 50], [1, 50], dtype=torch.bfloat16)
    num_blocks = 2**31 // (8 * 16 * 128) + 100
    big = KVPages(*(torch.empty(num_blocks, 8, 16, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2)))
    moved = batch.metadata[0].clone()
    used = moved < 2**30
    moved[used] = num_blocks - 1 - moved[used]
    for small_pages, big_pages in zip(batch.kv, big, strict=True):
        big_pages[moved[used].long()] = small_pages[batch.metadata[0][used].long()]
    expected = batch.kernel()
    slot = torch.tensor([num_blocks * 16 - 1], device="cuda")
    token = torch.randn(1, 8, 128, device="cuda", dtype=torch.bfloat16)
    batch.kv, batch.metadata = big, (moved, *batch.metadata[1:])
    assert torch.equal(batch.kernel(), expected)
    write_kv(token, token + 1, big, slot)
    assert torch.equal(big.k[-1, :, -1], token[0])
    assert torch.equal(big.v[-1, :, -1], token[0] + 1)
