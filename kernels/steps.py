"""The decode kernel, built in five steps: each runs, and each cures what held back the one before.

    from labkit.kernels import steps
    for step in steps.STEPS: step(q, kv, block_table, seq_lens, scale)

1 gather           copy the pages together, then attend over the copy: K and V cross the memory bus three times
2 online_softmax   read the pages where they are, one program a query head: no copy, but once for each head of a group
3 gqa_packing      one program a KV head serves all its query heads: each byte once, but a small batch leaves SMs idle
4 split_kv         cut every sequence into chunks, combine at the end: enough programs, one launch more
5 shipped          `paged_attention`: equal shares instead of chunks, no second launch, every length and mask

All take q [num_seqs, num_q_heads, head_dim] (one new token a sequence), a cache of the same head_dim (a power of two,
at least 16), block_table int32 [num_seqs, max_blocks] and seq_lens int32 [num_seqs], each at least 1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .attention import paged_attention
from .pages import KVPages
from .softmax import LOG2_E


def gather(q, kv: KVPages, block_table, seq_lens, scale: float) -> torch.Tensor:
    """Step 1: gather every sequence to the longest length, mask, softmax: plain torch."""
    num_seqs, num_q_heads, head_dim = q.shape
    group = num_q_heads // kv.num_kv_heads
    blocks = block_table.long().clamp(0, kv.k.shape[0] - 1)
    k, v = (p[blocks].transpose(1, 2).reshape(num_seqs, kv.num_kv_heads, -1, head_dim) for p in kv)  # the copies
    grouped = q.view(num_seqs, kv.num_kv_heads, group, head_dim)
    scores = (grouped @ k.transpose(2, 3)).float() * scale
    hidden = torch.arange(k.shape[2], device=q.device) >= seq_lens[:, None]
    probs = scores.masked_fill(hidden[:, None, None, :], float("-inf")).softmax(-1).to(q.dtype)
    return (probs @ v.masked_fill(hidden[:, None, :, None], 0)).reshape(q.shape)


@triton.jit
def online_softmax_kernel(
    q, k, v, block_table, seq_lens, out, scale, table_stride, block_stride, head_stride,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Program (sequence, query head). N keys at a time, the softmax corrected as larger scores turn up."""
    seq, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, D)
    row = (seq * tl.num_programs(1) + head) * D
    q_row = tl.load(q + row + d).to(tl.float32) * (scale * LOG2_E)
    seq_len = tl.load(seq_lens + seq)
    m = -1.0e30
    l = 0.0
    acc = tl.zeros([D], dtype=tl.float32)
    for start in range(0, seq_len, N):
        pos = start + tl.arange(0, N)
        inside = pos < seq_len
        block = tl.load(block_table + seq * table_stride + pos // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        at = block * block_stride + (head // GROUP) * head_stride + (pos % BLOCK_SIZE) * D
        k_tile = tl.load(k + at[:, None] + d[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
        v_tile = tl.load(v + at[:, None] + d[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
        scores = tl.where(inside, tl.sum(q_row[None, :] * k_tile, 1), float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, 0))
        p = tl.exp2(scores - m_new)
        alpha = tl.exp2(m - m_new)  # what was summed so far was relative to the old maximum
        l = l * alpha + tl.sum(p, 0)
        acc = acc * alpha + tl.sum(p[:, None] * v_tile, 0)
        m = m_new
    tl.store(out + row + d, (acc / l).to(out.dtype.element_ty))


def online_softmax(q, kv: KVPages, block_table, seq_lens, scale: float) -> torch.Tensor:
    """Step 2: no copy; one program a query head."""
    out = torch.empty_like(q)
    online_softmax_kernel[(q.shape[0], q.shape[1])](
        q, kv.k, kv.v, block_table, seq_lens, out, scale, block_table.stride(0), kv.k.stride(0), kv.k.stride(1),
        GROUP=q.shape[1] // kv.num_kv_heads, D=q.shape[2], BLOCK_SIZE=kv.block_size, N=64,
    )  # fmt: skip
    return out


@triton.jit
def packed_kernel(
    q, k, v, block_table, seq_lens, partial, partial_lse, scale, table_stride, block_stride, head_stride, chunk,
    GROUP: tl.constexpr, M: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (sequence, KV head, chunk): the GROUP query heads are the rows of a matrix, padded to M >= 16.

    Writes the normalised result of its chunk and the log2 of its denominator, partial [chunks, num_seqs, heads, D].
    """
    seq, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    d = tl.arange(0, D)
    m_row = tl.arange(0, M)
    row = (seq * tl.num_programs(1) + head) * GROUP + m_row
    row_ok = m_row < GROUP
    q_tile = tl.load(q + row[:, None] * D + d[None, :], mask=row_ok[:, None], other=0.0)
    begin = part * chunk
    end = tl.minimum(begin + chunk, tl.load(seq_lens + seq))
    m = tl.full([M], -1.0e30, dtype=tl.float32)
    l = tl.zeros([M], dtype=tl.float32)
    acc = tl.zeros([M, D], dtype=tl.float32)
    for start in tl.range(begin, end, N, num_stages=3):
        pos = start + tl.arange(0, N)
        inside = pos < end
        block = tl.load(block_table + seq * table_stride + pos // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        at = block * block_stride + head * head_stride + (pos % BLOCK_SIZE) * D
        k_tile = tl.load(k + at[:, None] + d[None, :], mask=inside[:, None], other=0.0)
        v_tile = tl.load(v + at[:, None] + d[None, :], mask=inside[:, None], other=0.0)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * (scale * LOG2_E)
        scores = tl.where(inside[None, :], scores, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, 1))
        p = tl.exp2(scores - m_new[:, None])
        alpha = tl.exp2(m - m_new)
        l = l * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision=PRECISION)
        m = m_new
    rows = tl.num_programs(0) * tl.num_programs(1) * GROUP
    result = acc / tl.where(l > 0.0, l, 1.0)[:, None]
    at = (part * rows + row)[:, None] * D + d[None, :]
    tl.store(partial + at, result.to(partial.dtype.element_ty), mask=row_ok[:, None])
    tl.store(partial_lse + part * rows + row, m + tl.log2(l), mask=row_ok)


def _packed(
    q, kv: KVPages, block_table, seq_lens, scale: float, chunk: int, dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    group = q.shape[1] // kv.num_kv_heads
    longest = block_table.shape[1] * kv.block_size
    chunks = triton.cdiv(longest, chunk)
    partial = torch.empty(chunks, *q.shape, device=q.device, dtype=dtype)
    lse = torch.empty(chunks, *q.shape[:2], device=q.device, dtype=torch.float32)
    packed_kernel[(q.shape[0], kv.num_kv_heads, chunks)](
        q, kv.k, kv.v, block_table, seq_lens, partial, lse, scale, block_table.stride(0), kv.k.stride(0),
        kv.k.stride(1), chunk, GROUP=group, M=max(16, triton.next_power_of_2(group)), D=q.shape[2],
        BLOCK_SIZE=kv.block_size, N=64, PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=4,
    )  # fmt: skip
    return partial, lse


def gqa_packing(q, kv: KVPages, block_table, seq_lens, scale: float) -> torch.Tensor:
    """Step 3: one program a (sequence, KV head), on the tensor cores; the whole sequence is one chunk."""
    return _packed(q, kv, block_table, seq_lens, scale, block_table.shape[1] * kv.block_size, q.dtype)[0][0]


def split_kv(q, kv: KVPages, block_table, seq_lens, scale: float, chunk: int = 512) -> torch.Tensor:
    """Step 4: chunks of 512 keys in parallel, then one weighted sum (Flash-Decoding, Dao et al. 2023)."""
    partial, lse = _packed(q, kv, block_table, seq_lens, scale, chunk, torch.float32)
    weights = torch.softmax(lse * 0.6931471805599453, 0)  # from log2 to e
    return (partial * weights[..., None]).sum(0).to(q.dtype)


def shipped(q, kv: KVPages, block_table, seq_lens, scale: float) -> torch.Tensor:
    """Step 5: `paged_attention`."""
    starts = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)
    return paged_attention(q, kv, block_table, seq_lens, starts, scale=scale, max_query_len=1)


STEPS = (gather, online_softmax, gqa_packing, split_kv, shipped)
