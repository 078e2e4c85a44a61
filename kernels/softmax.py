"""Pieces of the online softmax that the decode and the prefill kernel share.

Scores are kept in units of log2, so that `exp2`, one instruction on the GPU, replaces `exp`:

    softmax(s)_j = 2^(s_j log2(e) - m) / sum_i 2^(s_i log2(e) - m)         m = the largest exponent seen so far

A tile of keys updates (m, l, acc), where l is the denominator and acc the weighted sum of V, both relative to m
(Milakov and Gimelshein, arXiv 1805.02867; Dao et al., arXiv 2205.14135). m starts at a very low but finite number:
a row that sees no key then ends with l = 0 instead of the NaN of (-inf) - (-inf).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1.0e30)
INTERPRETED = tl.constexpr(knobs.runtime.interpret)  # the interpreter knows no PTX


@triton.jit
def exp2(x):
    """2^x by the GPU's own instruction, without the three more that `tl.exp2` spends on subnormal results."""
    if INTERPRETED:
        y = tl.exp2(x)
    else:
        y = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return y


@triton.jit
def log2(x):
    """log2 x of a normal number, by the GPU's own instruction."""
    if INTERPRETED:
        y = tl.log2(x)
    else:
        y = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return y


@triton.jit
def capped(scores, inner_scale, SOFTCAP: tl.constexpr):
    """With a softcap c, the score s becomes c tanh(scale s / c); this is the tanh, the caller multiplies by c.

    tanh(x) = 1 - 2 / (e^2x + 1) is exact at both ends: e^2x overflows to inf or underflows to 0.
    """
    if SOFTCAP:
        scores = 1.0 - 2.0 / (tl.exp2(scores * (inner_scale * 2.0 * LOG2_E)) + 1.0)
    return scores


@triton.jit
def store_output(
    acc, m, l, sinks, q_head, out_row, row_ok,
    HEAD_DIM_V: tl.constexpr, DV: tl.constexpr, HAS_SINKS: tl.constexpr, HALVES: tl.constexpr = False,
):  # fmt: skip
    """Normalise acc [M, DV] and write it to out_row [M] (pointers); a sink is a score without a value.

    HALVES: acc holds the two halves of the channels, each padded to DV / 2.
    """
    if HAS_SINKS:
        sink = tl.load(sinks + q_head, mask=row_ok, other=0.0).to(tl.float32) * LOG2_E
        m_all = tl.maximum(m, sink)
        l = l * tl.exp2(m - m_all) + tl.exp2(sink - m_all)
        acc = acc * tl.exp2(m - m_all)[:, None]
    acc = acc / tl.where(l > 0.0, l, 1.0)[:, None]
    d = tl.arange(0, DV)
    ok = d < HEAD_DIM_V
    if HALVES and DV != HEAD_DIM_V:
        ok = d % (DV // 2) < HEAD_DIM_V // 2
        d = d // (DV // 2) * (HEAD_DIM_V // 2) + d % (DV // 2)
    tl.store(out_row[:, None] + d[None, :], acc.to(out_row.dtype.element_ty), mask=row_ok[:, None] & ok[None, :])
