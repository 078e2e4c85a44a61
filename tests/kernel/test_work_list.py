"""The work list that the lab draws is the one that the decode kernel makes for itself."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
import torch
import triton
import triton.language as tl

from labkit.kernels import decode
from labkit.kernels.attention import AttentionLaunch, Workspace
from labkit.kernels.tuning import DecodeTile
from labkit.widgets import kernel_work

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK_N = 16


@triton.jit(do_not_specialize=["seq_len", "tile", "program", "total", "sharers"])
def share_kernel(out, seq_len, tile, program, total, sharers, BLOCK_N: tl.constexpr):
    _, tiles = decode.decode_tiles(seq_len + tl.zeros([1], tl.int32), 1, 0, 4, 16, BLOCK_N, False)  # type: ignore
    tl.store(out, tl.sum(tiles, 0))
    tl.store(out + 1, decode.share_begin(program, total, sharers))
    tl.store(out + 2, decode.owner(tile, total, sharers))


@pytest.mark.parametrize("total, sharers", [(1, 1), (7, 3), (64, 64), (1000, 132), (123_457, 528)])
def test_shares_are_the_kernels(total: int, sharers: int):
    out = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    borders = [kernel_work.share_begin(program, total, sharers) for program in range(sharers)]
    for i in range(5):
        tile, program, seq_len = i * (total - 1) // 4, i * (sharers - 1) // 4, 1 + 13 * i
        share_kernel[(1,)](out, seq_len, tile, program, total, sharers, BLOCK_N=BLOCK_N)
        assert out.tolist() == [
            kernel_work.decode_tiles(seq_len, BLOCK_N),
            borders[program],
            max(owner for owner, border in enumerate(borders) if border <= tile),
        ]


@pytest.mark.parametrize("num_programs", [1, 3, 7, 16])
@pytest.mark.parametrize("seq_lens", [[37, 5, 64, 130], [64] * 4, [300], [1, 1, 17], [5, 640, 37, 900]])
def test_the_kernel_leaves_parts_in_the_slots_of_the_list(paged_batch, seq_lens: list[int], num_programs: int):
    batch = paged_batch((8, 2, 16, 16), seq_lens, [1] * len(seq_lens))
    out, workspace = torch.empty_like(batch.q), Workspace.allocate(16, DEVICE)
    workspace.partial_m.fill_(torch.nan)
    launch = AttentionLaunch(batch.q, batch.kv, *batch.metadata, out, 0.25, None, None, None, 4, 16, 16)
    tile = DecodeTile(16, BLOCK_N, 4, 2, 1, 32)
    call = launch.decode(tile, workspace, 1, 1)
    call.kernel[(num_programs,)](*call.arguments, **call.constants, **call.options())
    written = (~workspace.partial_m.view(-1, 4).isnan().any(1)).nonzero().flatten().tolist()
    parts = kernel_work.work_list(seq_lens, 2, num_programs, block_n=BLOCK_N, min_tokens=32)
    assert written == sorted(part.slot for part in parts if part.slot is not None)
    assert out.isfinite().all()


def check_every_key_is_read_once(parts: list[kernel_work.Part], seq_lens: list[int], num_kv_heads: int) -> None:
    for sequence, seq_len in enumerate(seq_lens):
        for head in range(num_kv_heads):
            own = [part for part in parts if (part.sequence, part.head) == (sequence, head)]
            assert [own[0].begin, own[-1].end] == [0, seq_len]
            assert all(a.end == b.begin for a, b in pairwise(own))


@pytest.mark.parametrize("num_programs", [1, 3, 6, 100])
def test_equal_lengths_are_shared_to_the_tile(num_programs: int):
    parts = kernel_work.work_list([130] * 5, 2, num_programs, block_n=BLOCK_N, min_tokens=32)
    check_every_key_is_read_once(parts, [130] * 5, 2)
    tiles = Counter[int]()
    for part in parts:
        tiles[part.program] += -(-(part.end - part.begin) // BLOCK_N)
    assert max(tiles.values()) - min(tiles.values()) <= 1


@pytest.mark.parametrize("num_programs", [1, 5, 12, 100])
def test_where_lengths_differ_to_begin_a_pair_counts_as_a_tile(num_programs: int):
    seq_lens = [37, 5, 64, 130, 1000]
    parts = kernel_work.work_list(seq_lens, 2, num_programs, block_n=BLOCK_N, min_tokens=32)
    check_every_key_is_read_once(parts, seq_lens, 2)
    shares = Counter[int]()
    begun = set[tuple[int, int]]()
    for part in parts:
        begins = (part.sequence, part.head) not in begun
        begun.add((part.sequence, part.head))
        shares[part.program] += -(-(part.end - part.begin) // BLOCK_N) + begins
    assert max(shares.values()) - min(shares.values()) <= 1


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="num_programs must be >= 1, got 0"):
        kernel_work.work_list([5], 2, 0, block_n=16, min_tokens=32)
    with pytest.raises(ValueError, match=r"seq_lens must hold .* got \[3, 0\]"):
        kernel_work.work_list([3, 0], 2, 4, block_n=16, min_tokens=32)
