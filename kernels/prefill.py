"""Prefill: many new tokens a sequence, each over the context up to itself. The time is that of two matrix products.

    keys ─►            0 ............ context ............ | .. this step's tokens ..
    query tile t     [ full | full | full | full | full | full | full | ◣ |           ]
    query tile t + 1 [ full | full | full | full | full | full | full | full | ◣ |    ]

    a query tile     BLOCK_M rows = BLOCK_M / GROUP tokens x GROUP query heads of one KV head

Tiles left of the diagonal need no mask: a first loop runs over them without one, a second one runs over the rest. With
GQA packing the tile of BLOCK_M rows covers few tokens, so little lies on the diagonal.

The grid is an upper bound known on the host, num_tokens // BLOCK_Q + num_seqs tiles of BLOCK_Q tokens. Each program
finds its sequence among all of them and leaves when it is past the end. Programs start in order, so the line of tiles
is served from its end: the last tile of a sequence sees the most keys, and the short ones fill the gaps when the work
runs out.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .prefill_quantised import channels, load_values, load_waiting
from .softmax import LOWEST, capped, store_output


@triton.jit
def attend(
    acc, m, l, q_tile, k, v, head, tail_row, table_row, begin, end, visible_from, row_pos, window,
    inner_scale, score_scale, HEAD_DIM_K: tl.constexpr, HEAD_DIM_V: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, SAME_STRIDES: tl.constexpr,
    QUANTISED: tl.constexpr, K_INT4: tl.constexpr, K_SCALE: tl.constexpr, K_CHANNELS: tl.constexpr,
    V_INT4: tl.constexpr, V_SCALE: tl.constexpr, V_CHANNELS: tl.constexpr, SOFTCAP: tl.constexpr,
    WINDOWED: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr, WAITING: tl.constexpr,
):  # fmt: skip
    """Add keys [begin, end) to (acc, m, l); unless MASKED every row sees all of them. WAITING: K is in the tail."""
    dk = tl.arange(0, DK)
    dv = tl.arange(0, DV)
    k_codes = k.codes + head.to(tl.int64) * k.head
    v_codes = v.codes + head.to(tl.int64) * v.head
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        pos = start + tl.arange(0, BLOCK_N)
        if QUANTISED:
            at = pos
            if MASKED:
                at = tl.minimum(pos, end - 1)
                if WINDOWED:
                    at = tl.maximum(at, visible_from)
            block = tl.load(table_row + at // BLOCK_SIZE).to(tl.int64)
            slot = at % BLOCK_SIZE
            dtype: tl.constexpr = q_tile.dtype
            if WAITING:
                k_tile = load_waiting(k, head, tail_row, slot, HEAD_DIM_K, DK, K_INT4, dtype)
            else:
                k_tile = load_values(
                    k, head, block, slot, HEAD_DIM_K, DK, BLOCK_N, K_INT4, K_SCALE, K_CHANNELS, dtype
                )  # fmt: skip
            v_tile = load_values(v, head, block, slot, HEAD_DIM_V, DV, BLOCK_N, V_INT4, V_SCALE, V_CHANNELS, dtype)
        else:
            k_ok = (dk < HEAD_DIM_K)[None, :]
            v_ok = (dv < HEAD_DIM_V)[None, :]
            if MASKED:
                inside = pos < end
                if WINDOWED:
                    inside = inside & (pos >= visible_from)
                block = tl.load(table_row + pos // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
                v_ok = inside[:, None] & v_ok
            else:
                block = tl.load(table_row + pos // BLOCK_SIZE).to(tl.int64)
            k_row = block * k.block + (pos % BLOCK_SIZE) * k.slot
            v_row = k_row if SAME_STRIDES else block * v.block + (pos % BLOCK_SIZE) * v.slot  # saves registers
            k_tile = tl.load(k_codes + k_row[:, None] + dk[None, :], mask=k_ok, other=0.0)
            v_tile = tl.load(v_codes + v_row[:, None] + dv[None, :], mask=v_ok, other=0.0)

        scores = capped(tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION), inner_scale, SOFTCAP)
        if MASKED:
            visible = pos[None, :] <= row_pos[:, None]
            if k.tail is not None:  # the keys behind `end` are in the tail, and have their own turn
                visible = visible & (pos < end)[None, :]
            if WINDOWED:
                visible = visible & (row_pos[:, None] - pos[None, :] < window)
            scores = tl.where(visible, scores, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, 1) * score_scale)
        p = tl.exp2(scores * score_scale - m_new[:, None])
        alpha = tl.exp2(m - m_new)
        l = l * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision=PRECISION)
        m = m_new
    return acc, m, l


@triton.jit(do_not_specialize=["num_seqs", "window", "table_stride"])
def prefill_kernel(
    q, k, v, block_table, seq_lens, query_start_loc, tail_rows, sinks, out,
    num_seqs, window, inner_scale, score_scale,
    q_token, q_head, out_token, out_head, table_stride,
    GROUP: tl.constexpr, HEAD_DIM_K: tl.constexpr, HEAD_DIM_V: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SEQS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr,
    MAX_DECODE_ROWS: tl.constexpr, STAGES: tl.constexpr, SAME_STRIDES: tl.constexpr,
    QUANTISED: tl.constexpr, K_INT4: tl.constexpr, K_SCALE: tl.constexpr, K_CHANNELS: tl.constexpr,
    V_INT4: tl.constexpr, V_SCALE: tl.constexpr, V_CHANNELS: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOWED: tl.constexpr, HAS_SINKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    index = tl.arange(0, SEQS)
    live = index < num_seqs
    all_starts = tl.load(query_start_loc + index, mask=live, other=0)
    all_query_lens = tl.load(query_start_loc + index + 1, mask=live, other=0) - all_starts
    is_prefill = all_query_lens * GROUP > MAX_DECODE_ROWS
    all_tiles = tl.where(is_prefill, (all_query_lens + BLOCK_Q - 1) // BLOCK_Q, 0)
    line_end = tl.cumsum(all_tiles, 0)
    tile = tl.sum(all_tiles, 0) - 1 - tl.program_id(1)
    if tile < 0:
        return
    seq = tl.sum((line_end <= tile).to(tl.int32), 0)
    tile -= tl.max(tl.where(line_end <= tile, line_end, 0), 0)

    seq_len = tl.load(seq_lens + seq)
    query_start = tl.load(query_start_loc + seq)
    query_len = tl.load(query_start_loc + seq + 1) - query_start
    row = tl.arange(0, BLOCK_M)
    token = tile * BLOCK_Q + row // GROUP  # within the sequence's new tokens
    q_head_index = head * GROUP + row % GROUP
    row_ok = (row < BLOCK_Q * GROUP) & (token < query_len)
    row_pos = seq_len - query_len + token

    channel, exists = channels(HEAD_DIM_K, DK, K_INT4)
    q_row = q + (query_start + token).to(tl.int64) * q_token + q_head_index * q_head
    q_tile = tl.load(q_row[:, None] + channel[None, :], mask=row_ok[:, None] & exists[None, :], other=0.0)
    acc = tl.zeros([BLOCK_M, DV], dtype=tl.float32)
    m = tl.full([BLOCK_M], LOWEST, dtype=tl.float32)
    l = tl.zeros([BLOCK_M], dtype=tl.float32)

    first_pos = seq_len - query_len + tile * BLOCK_Q  # position of the tile's first query
    end = tl.minimum(first_pos + BLOCK_Q, seq_len)
    visible_from = tl.maximum(first_pos - window + 1, 0) if WINDOWED else 0
    masked_from = visible_from // BLOCK_N * BLOCK_N if WINDOWED else (first_pos + 1) // BLOCK_N * BLOCK_N
    table_row = block_table + seq.to(tl.int64) * table_stride
    full = end  # keys [full, end) wait in the tail
    tail_row = tl.zeros([], tl.int64)
    if k.tail is not None:
        full = tl.minimum(seq_len // BLOCK_SIZE * BLOCK_SIZE, end)
        masked_from = tl.minimum(masked_from, full // BLOCK_N * BLOCK_N)
        tail_row = tl.load(tail_rows + seq).to(tl.int64)
    if not WINDOWED:
        acc, m, l = attend(
            acc, m, l, q_tile, k, v, head, tail_row, table_row, 0, masked_from, 0, row_pos, window,
            inner_scale, score_scale, HEAD_DIM_K, HEAD_DIM_V, DK, DV, BLOCK_SIZE, BLOCK_N, STAGES, SAME_STRIDES,
            QUANTISED, K_INT4, K_SCALE, K_CHANNELS, V_INT4, V_SCALE, V_CHANNELS, SOFTCAP, False, PRECISION,
            MASKED=False, WAITING=False,
        )  # fmt: skip
    acc, m, l = attend(
        acc, m, l, q_tile, k, v, head, tail_row, table_row, masked_from, full, visible_from, row_pos, window,
        inner_scale, score_scale, HEAD_DIM_K, HEAD_DIM_V, DK, DV, BLOCK_SIZE, BLOCK_N, STAGES, SAME_STRIDES,
        QUANTISED, K_INT4, K_SCALE, K_CHANNELS, V_INT4, V_SCALE, V_CHANNELS, SOFTCAP, WINDOWED, PRECISION,
        MASKED=True, WAITING=False,
    )  # fmt: skip
    if k.tail is not None:
        acc, m, l = attend(
            acc, m, l, q_tile, k, v, head, tail_row, table_row, full, end, visible_from, row_pos, window,
            inner_scale, score_scale, HEAD_DIM_K, HEAD_DIM_V, DK, DV, BLOCK_SIZE, BLOCK_N, STAGES, SAME_STRIDES,
            QUANTISED, K_INT4, K_SCALE, K_CHANNELS, V_INT4, V_SCALE, V_CHANNELS, SOFTCAP, WINDOWED, PRECISION,
            MASKED=True, WAITING=True,
        )  # fmt: skip
    out_row = out + (query_start + token).to(tl.int64) * out_token + q_head_index * out_head
    store_output(acc, m, l, sinks, q_head_index, out_row, row_ok, HEAD_DIM_V, DV, HAS_SINKS, V_INT4)
