"""Decode over quantised pages: the tile loop of decode.py, for codes (dequantise.py says where the scales go).

Half the bytes leave half the time for the arithmetic, so it is arranged to need few instructions a code:

    scores [keys, rows] = K tile [keys, channels] @ q^T         acc [channels, rows] = V tile^T @ p [keys, rows]

Transposed like this, the rows (query heads of one KV head, often 1 or 4) are the narrow side of the matrix
instruction, 8 wide, where decode.py pads them to 16: half the exponentials, half the accumulator, and the registers
for four more bytes of K and V in flight. int4 codes come in two tiles, the first and the second half of the channels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dequantise import apply_scales, load_offset, load_scale, unpack, unpack_int4
from .softmax import LOWEST, capped, exp2, log2


@triton.jit
def fold_into_q(q, pages, at, channel, channel_ok, CHANNELS: tl.constexpr, INT4: tl.constexpr):
    """(q scale, q . offset) of q [channels, rows], for K scales that all tokens share."""
    at += channel // CHANNELS
    scale = load_scale(pages, at, channel_ok, tl.float32)
    constant = tl.zeros([q.shape[1]], dtype=tl.float32)
    if pages.zero_points is not None:
        constant = tl.sum(q.to(tl.float32) * load_offset(pages, at, channel_ok, scale, INT4)[:, None], 0)
    return (q.to(tl.float32) * scale[:, None]).to(q.dtype), constant


@triton.jit
def scale_output(acc, l, pages, at, channel, channel_ok, CHANNELS: tl.constexpr, INT4: tl.constexpr):
    """acc [channels, rows] of codes -> of values, for V scales that all tokens share."""
    at += channel // CHANNELS
    scale = load_scale(pages, at, channel_ok, tl.float32)
    acc = acc * scale[:, None]
    if pages.zero_points is not None:
        acc += l[None, :] * load_offset(pages, at, channel_ok, scale, INT4)[:, None]
    return acc


@triton.jit
def positions(start, end, visible_from, BLOCK_N: tl.constexpr, WINDOWED: tl.constexpr):
    """(pos, visible, at): `at` is pos moved to the nearest visible position, so that no unwritten slot is ever read."""
    pos = start + tl.arange(0, BLOCK_N)
    visible = pos < end
    at = tl.minimum(pos, end - 1)
    if WINDOWED:
        visible = visible & (pos >= visible_from)
        at = tl.maximum(at, visible_from)
    return pos, visible, at


@triton.jit
def block_of(table_row, pos, end, visible_from, BLOCK_SIZE: tl.constexpr, WINDOWED: tl.constexpr):
    """The block that holds `pos`, or the nearest visible position; 0 where there is none."""
    at = tl.minimum(pos, end - 1)
    if WINDOWED:
        at = tl.maximum(at, visible_from)
    return tl.load(table_row + at // BLOCK_SIZE, mask=end > 0, other=0)


@triton.jit
def shown_scores(
    raw, pos, visible, row_pos, window, inner_scale, score_scale,
    MULTI_QUERY: tl.constexpr, SOFTCAP: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Scores [keys, rows] in units of log2; -inf where a row does not see a key."""
    shown = visible[:, None]
    if MULTI_QUERY:  # rows of several query tokens, each with its own end
        shown = shown & (pos[:, None] <= row_pos[None, :])
        if WINDOWED:
            shown = shown & (row_pos[None, :] - pos[:, None] < window)
    return tl.where(shown, capped(raw, inner_scale, SOFTCAP) * score_scale, float("-inf"))


@triton.jit
def add_tile(
    acc, acc_high, m, l, zero, scores, v, v_block, v_row, scale_at, dv,
    HEAD_DIM_V: tl.constexpr, CHANNELS: tl.constexpr, INT4: tl.constexpr, SCALE: tl.constexpr, DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of the online softmax; zero [rows] collects sum_n p_n offset_n.

    A token's V scale multiplies p. Added to the exponent instead, it keeps p within [0, 1], where float16 is at its
    best: m is then the largest score + log2(scale), and l takes the scale out again.
    """
    if SCALE == "token":
        v_scale = load_scale(v, scale_at, None, tl.float32)
        log_scale = log2(tl.maximum(v_scale, 1e-37))
        scores += log_scale[:, None]
    m_new = tl.maximum(m, tl.max(scores, 0))
    p = exp2(scores - m_new[None, :])
    alpha = exp2(m - m_new)
    p_true = p
    if SCALE == "token":
        p_true = p * exp2(-log_scale)[:, None]
        if v.zero_points is not None:
            offset = load_offset(v, scale_at, None, v_scale, INT4)
            zero = zero * alpha + tl.sum(p_true * offset[:, None], 0)
    l = l * alpha + tl.sum(p_true, 0)
    p = p.to(DTYPE)
    HALF: tl.constexpr = HEAD_DIM_V // 2
    ok = dv < (HALF if INT4 else HEAD_DIM_V)
    codes = tl.load(v_block + (v_row[:, None] + dv[None, :]), mask=ok[None, :], other=0.0)
    if INT4:
        low, high = unpack_int4(codes, DTYPE, False)
        if SCALE == "group":
            low = apply_scales(low, v, scale_at[:, None], dv, ok, CHANNELS, INT4)
            high = apply_scales(high, v, scale_at[:, None], dv + HALF, ok, CHANNELS, INT4)
        acc_high = tl.dot(tl.trans(high), p, acc_high * alpha[None, :], input_precision=PRECISION)
    else:
        low = unpack(codes, DTYPE, False)
        if SCALE == "group":
            low = apply_scales(low, v, scale_at[:, None], dv, ok, CHANNELS, INT4)
    acc = tl.dot(tl.trans(low), p, acc * alpha[None, :], input_precision=PRECISION)
    return acc, acc_high, m_new, l, zero


@triton.jit
def attend_quantised(
    q_row, row_ok, k, v, head, tail_row, table_row, begin, end, seq_len, visible_from, row_pos, window,
    inner_scale, score_scale, HEAD_DIM_K: tl.constexpr, HEAD_DIM_V: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    SAME_STRIDES: tl.constexpr, K_INT4: tl.constexpr, K_SCALE: tl.constexpr, K_CHANNELS: tl.constexpr,
    V_INT4: tl.constexpr, V_SCALE: tl.constexpr, V_CHANNELS: tl.constexpr,
    MULTI_QUERY: tl.constexpr, SOFTCAP: tl.constexpr, WINDOWED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(acc, m, l) of BLOCK_M query rows over keys [begin, end); acc [rows, DV], int4 V: its two halves side by side."""
    Q_TYPE: tl.constexpr = q_row.dtype.element_ty
    TESTING: tl.constexpr = q_row.dtype.element_ty.primitive_bitwidth == 32
    K_TYPE: tl.constexpr = Q_TYPE if TESTING or k.codes.dtype.element_ty.primitive_bitwidth == 16 else tl.float16
    V_TYPE: tl.constexpr = Q_TYPE if TESTING or v.codes.dtype.element_ty.primitive_bitwidth == 16 else tl.float16
    ONE_BLOCK: tl.constexpr = BLOCK_SIZE % BLOCK_N == 0  # a tile lies in one block, or in two
    TWO_BLOCKS: tl.constexpr = 2 * BLOCK_SIZE == BLOCK_N
    HALF_K: tl.constexpr = HEAD_DIM_K // 2
    HALF_V: tl.constexpr = HEAD_DIM_V // 2
    dk = tl.arange(0, DK // 2 if K_INT4 else DK)
    dv = tl.arange(0, DV // 2 if V_INT4 else DV)
    dk_ok = dk < (HALF_K if K_INT4 else HEAD_DIM_K)
    q_ok = row_ok[None, :] & dk_ok[:, None]
    k_ok = dk_ok[None, :]
    q_low = tl.load(q_row[None, :] + dk[:, None], mask=q_ok, other=0.0).to(K_TYPE)
    q_high = q_low
    if K_INT4:
        q_high = tl.load(q_row[None, :] + HALF_K + dk[:, None], mask=q_ok, other=0.0).to(K_TYPE)

    k_codes = k.codes + head.to(tl.int64) * k.head
    v_codes = v.codes + head.to(tl.int64) * v.head
    k_scales = head * k.scale_head if k.scales is not None else 0
    v_scales = head * v.scale_head if v.scales is not None else 0
    constant = tl.zeros([BLOCK_M], dtype=tl.float32)
    if K_SCALE == "fixed":
        q_low, constant = fold_into_q(q_low, k, k_scales, dk, dk_ok, K_CHANNELS, K_INT4)
        if K_INT4:
            q_high, constant_high = fold_into_q(q_high, k, k_scales, dk + HALF_K, dk_ok, K_CHANNELS, K_INT4)
            constant += constant_high
    elif K_SCALE == "token" and k.zero_points is not None:
        constant = tl.sum(q_low.to(tl.float32), 0)
        if K_INT4:
            constant += tl.sum(q_high.to(tl.float32), 0)

    acc = tl.zeros([dv.shape[0], BLOCK_M], dtype=tl.float32)
    acc_high = acc
    m = tl.full([BLOCK_M], LOWEST, dtype=tl.float32)
    l = tl.zeros([BLOCK_M], dtype=tl.float32)
    zero = tl.zeros([BLOCK_M], dtype=tl.float32)
    full = tl.minimum(seq_len // BLOCK_SIZE * BLOCK_SIZE, end) if k.tail is not None else end
    if ONE_BLOCK or TWO_BLOCKS:  # looked up one tile ahead, so that a tile's loads need not wait for it
        next_block = block_of(table_row, begin, full, visible_from, BLOCK_SIZE, WINDOWED)
        next_second = next_block
        if TWO_BLOCKS:
            next_second = block_of(table_row, begin + BLOCK_SIZE, full, visible_from, BLOCK_SIZE, WINDOWED)
    for start in tl.range(begin, full, BLOCK_N, num_stages=STAGES):
        pos, visible, at = positions(start, full, visible_from, BLOCK_N, WINDOWED)
        if ONE_BLOCK or TWO_BLOCKS:
            block = next_block.to(tl.int64)
            if TWO_BLOCKS:
                block = tl.where(tl.arange(0, BLOCK_N) < BLOCK_SIZE, block, next_second.to(tl.int64))
                next_second = block_of(
                    table_row, start + BLOCK_N + BLOCK_SIZE, full, visible_from, BLOCK_SIZE, WINDOWED
                )
            next_block = block_of(table_row, start + BLOCK_N, full, visible_from, BLOCK_SIZE, WINDOWED)
        else:
            block = tl.load(table_row + at // BLOCK_SIZE).to(tl.int64)
        slot = at % BLOCK_SIZE
        k_row = slot * k.slot  # 32 bits within a block, 64 bits to the block
        v_row = k_row if SAME_STRIDES else slot * v.slot
        k_block = k_codes + block * k.block
        v_block = v_codes + block * (k.block if SAME_STRIDES else v.block)
        if not ONE_BLOCK:
            k_block = k_block[:, None]
            v_block = v_block[:, None]
        codes = tl.load(k_block + (k_row[:, None] + dk[None, :]), mask=k_ok, other=0.0)
        if K_INT4:
            low, high = unpack_int4(codes, K_TYPE)
        else:
            low = unpack(codes, K_TYPE)
        if K_SCALE == "channel" or K_SCALE == "group":
            scale_at = k_scales + block * k.scale_block
            if K_SCALE == "group":
                scale_at += slot * k.scale_slot
            if not (ONE_BLOCK and K_SCALE == "channel"):
                scale_at = scale_at[:, None]
            low = apply_scales(low, k, scale_at, dk, dk_ok, K_CHANNELS, K_INT4)
            if K_INT4:
                high = apply_scales(high, k, scale_at, dk + HALF_K, dk_ok, K_CHANNELS, K_INT4)
        raw = tl.dot(low, q_low, input_precision=PRECISION)
        if K_INT4:
            raw = tl.dot(high, q_high, raw, input_precision=PRECISION)
        v_scale_at = v_scales
        if v.scales is not None:
            v_scale_at = v_scales + block * v.scale_block + slot * v.scale_slot
        if K_SCALE == "token":
            scale_at = v_scale_at
            if not (SAME_STRIDES and V_SCALE == "token"):
                scale_at = k_scales + block * k.scale_block + slot * k.scale_slot
            k_scale = load_scale(k, scale_at, None, tl.float32)
            raw = raw * k_scale[:, None]
            if k.zero_points is not None:
                raw += constant[None, :] * load_offset(k, scale_at, None, k_scale, K_INT4)[:, None]
        elif K_SCALE == "fixed" and k.zero_points is not None:
            raw += constant[None, :]
        scores = shown_scores(
            raw, pos, visible, row_pos, window, inner_scale, score_scale, MULTI_QUERY, SOFTCAP, WINDOWED
        )
        acc, acc_high, m, l, zero = add_tile(
            acc, acc_high, m, l, zero, scores, v, v_block, v_row, v_scale_at, dv,
            HEAD_DIM_V, V_CHANNELS, V_INT4, V_SCALE, V_TYPE, PRECISION,
        )  # fmt: skip

    if k.tail is not None:  # keys of the block that is not full yet, in 16 bits
        q_low = tl.load(q_row[None, :] + dk[:, None], mask=q_ok, other=0.0)
        if K_INT4:
            q_high = tl.load(q_row[None, :] + HALF_K + dk[:, None], mask=q_ok, other=0.0)
        for start in tl.range(tl.maximum(begin, seq_len // BLOCK_SIZE * BLOCK_SIZE), end, BLOCK_N, num_stages=1):
            pos, visible, at = positions(start, end, visible_from, BLOCK_N, WINDOWED)
            block = tl.load(table_row + start // BLOCK_SIZE).to(tl.int64)
            slot = at % BLOCK_SIZE
            k_row = k.tail + tail_row.to(tl.int64) * k.tail_row + head * k.tail_head + slot * k.tail_slot
            low = tl.load(k_row[:, None] + dk[None, :], mask=k_ok, other=0.0).to(Q_TYPE)
            raw = tl.dot(low, q_low, input_precision=PRECISION)
            if K_INT4:
                high = tl.load(k_row[:, None] + HALF_K + dk[None, :], mask=k_ok, other=0.0).to(Q_TYPE)
                raw = tl.dot(high, q_high, raw, input_precision=PRECISION)
            scores = shown_scores(
                raw, pos, visible, row_pos, window, inner_scale, score_scale, MULTI_QUERY, SOFTCAP, WINDOWED
            )
            v_scale_at = v_scales
            if v.scales is not None:
                v_scale_at = v_scales + block * v.scale_block + slot * v.scale_slot
            acc, acc_high, m, l, zero = add_tile(
                acc, acc_high, m, l, zero, scores, v, v_codes + block * v.block, slot * v.slot, v_scale_at, dv,
                HEAD_DIM_V, V_CHANNELS, V_INT4, V_SCALE, V_TYPE, PRECISION,
            )  # fmt: skip

    if V_SCALE == "token" and v.zero_points is not None:
        acc += zero[None, :]
        acc_high += zero[None, :]
    if V_SCALE == "fixed":
        ok = dv < (HALF_V if V_INT4 else HEAD_DIM_V)
        acc = scale_output(acc, l, v, v_scales, dv, ok, V_CHANNELS, V_INT4)
        if V_INT4:
            acc_high = scale_output(acc_high, l, v, v_scales, dv + HALF_V, ok, V_CHANNELS, V_INT4)
    acc = tl.trans(acc)
    if V_INT4:
        acc = tl.join(acc, tl.trans(acc_high)).permute(0, 2, 1).reshape([BLOCK_M, DV])
    return acc, m, l
