"""Decode: one new token a sequence reads the whole context once. The time is the time to read the KV cache.

The kernel is built in five runnable steps in steps.py; this is the last one. Three ideas make it fast.

1. GQA packing. The query heads that share a KV head form the rows of one small matrix, so K and V are read once
   for all of them:      rows [BLOCK_M] = query tokens x query heads a KV head,   scores = rows @ K tile^T

2. Equal shares. All (sequence, KV head) pairs stand in one line, cut into tiles of BLOCK_N keys. Each of the W
   programs takes the same number of tiles, wherever the borders fall (Stream-K, Osama et al., arXiv 2301.03598; for
   decode: Lean Attention, Sanovar et al., arXiv 2405.10480). A long sequence gets many programs, and several short
   ones share a program; no host needs to know any length, and the launch is the same for every batch (CUDA graphs).

      sequence, head   |   seq 0, head 0   |   seq 0, head 1   | 1,0 | 1,1 |      seq 2, head 0      | ...
      tiles            |▫ ▪ ▪ ▪ ▪ ▪ ▪ ▪ ▪ ▪|▫ ▪ ▪ ▪ ▪ ▪ ▪ ▪ ▪ ▪|▫ ▪ ▪|▫ ▪ ▪|▫ ▪ ▪ ▪ ▪ ▪ ▪ ▪ ▪ ▪ ▪ ▪ ▪| ...
      programs         |── 0 ──────|── 1 ──────|── 2 ──────|── 3 ──────|── 4 ──────|── 5 ──────|── 6 ─...

   To begin a pair takes a program about as long as to read a tile (of 64 keys, 16 bit, on an H200). Where lengths
   differ, each pair therefore has one more tile in the line than it has keys for, its first (▫): a program of many
   short pairs gets fewer keys.

3. The last one combines. A pair that lies within one program is finished there. Otherwise each of its programs leaves
   (acc, m, l) in the workspace and counts itself; the one that finds itself the last reads all parts and writes the
   result. No second launch. A program can own at most two parts, one at either end of its share, so the workspace
   has 2 W slots whatever the batch is:

      program p      |■■■■■■■■|────────|────────|■■■■■■|        slot 2p:     continues a pair begun before p
                      slot 2p   whole    whole   slot 2p+1      slot 2p + 1: begins a pair that goes on after p
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from .decode_quantised import attend_quantised
from .softmax import LOWEST, capped, store_output


@triton.jit
def decode_tiles(seq_len, query_len, window, GROUP, MAX_ROWS, BLOCK_N, WINDOWED: tl.constexpr):
    """First tile and number of tiles of sequences that decode; (., 0) for empty rows and for prefills.

    A length-0 row of a padded batch gets one tile, all masked: that is what writes its zeros.
    """
    first = tl.zeros_like(seq_len)
    if WINDOWED:
        first = tl.maximum(seq_len - query_len - window + 1, 0) // BLOCK_N
    tiles = tl.maximum((seq_len + BLOCK_N - 1) // BLOCK_N - first, 1)
    return first, tl.where((query_len > 0) & (query_len * GROUP <= MAX_ROWS), tiles, 0)


@triton.jit
def share_begin(program, total, sharers):
    """First tile of a program: floor(program total / sharers), in parts so that no product leaves 32 bits."""
    return program * (total // sharers) + program * (total % sharers) // sharers


@triton.jit
def owner(tile, total, sharers):
    """The program whose share holds a tile: the last one with share_begin <= tile."""
    return (((tile.to(tl.int64) + 1) * sharers - 1) // total).to(tl.int32)


@triton.jit
def attend(
    q_rows, row_ok, k, v, table_row, begin, end, visible_from, row_pos, window, inner_scale, score_scale,
    k_block, k_slot, v_block, v_slot, HEAD_DIM_K: tl.constexpr, HEAD_DIM_V: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    SAME_STRIDES: tl.constexpr, MULTI_QUERY: tl.constexpr, SOFTCAP: tl.constexpr, WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """(acc, m, l) of BLOCK_M query rows over keys [begin, end)."""
    dk = tl.arange(0, DK)
    dv = tl.arange(0, DV)
    q_tile = tl.load(q_rows[:, None] + dk[None, :], mask=row_ok[:, None] & (dk < HEAD_DIM_K)[None, :], other=0.0)
    acc = tl.zeros([BLOCK_M, DV], dtype=tl.float32)
    m = tl.full([BLOCK_M], LOWEST, dtype=tl.float32)
    l = tl.zeros([BLOCK_M], dtype=tl.float32)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        pos = start + tl.arange(0, BLOCK_N)
        inside = pos < end
        if WINDOWED:
            inside = inside & (pos >= visible_from)
        # The block is looked up for each key, so BLOCK_N and the block size are independent. 64-bit: a cache may
        # hold more than 2^31 numbers. Outside, K is read from block 0 and its scores are dropped, which costs no mask;
        # V is never read: unused slots may hold NaN, and 0 x NaN = NaN.
        block = tl.load(table_row + pos // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        k_row = block * k_block + (pos % BLOCK_SIZE) * k_slot
        v_row = k_row if SAME_STRIDES else block * v_block + (pos % BLOCK_SIZE) * v_slot  # saves registers
        v_ok = inside[:, None] & (dv < HEAD_DIM_V)[None, :]
        k_tile = tl.load(k + k_row[:, None] + dk[None, :], mask=(dk < HEAD_DIM_K)[None, :], other=0.0)
        v_tile = tl.load(v + v_row[:, None] + dv[None, :], mask=v_ok, other=0.0)

        scores = capped(tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION), inner_scale, SOFTCAP)
        visible = inside[None, :]
        if MULTI_QUERY:  # rows of several query tokens, each with its own end
            visible = visible & (pos[None, :] <= row_pos[:, None])
            if WINDOWED:
                visible = visible & (row_pos[:, None] - pos[None, :] < window)
        scores = tl.where(visible, scores * score_scale, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, 1))
        p = tl.exp2(scores - m_new[:, None])
        alpha = tl.exp2(m - m_new)
        l = l * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision=PRECISION)
        m = m_new
    return acc, m, l


@triton.jit
def merge_parts(
    partial_acc, partial_m, partial_l, first_program, last_program,
    ROWS: tl.constexpr, DV: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """(acc, m, l) of ROWS rows from the slots of programs first..last, PARTS at a time.

    Each of the PARTS lanes runs its own online softmax over every PARTS-th program, so that all loads (.cg: from L2,
    where the other programs' parts are) can be under way at once; the lanes are added up at the end.
    """
    part = tl.arange(0, PARTS)
    row = tl.arange(0, ROWS)
    d = tl.arange(0, DV)
    m = tl.full([PARTS, ROWS], LOWEST, dtype=tl.float32)
    l = tl.zeros([PARTS, ROWS], dtype=tl.float32)
    acc = tl.zeros([PARTS, ROWS, DV], dtype=tl.float32)
    for base in tl.range(first_program, last_program + 1, PARTS, num_stages=3):
        program = base + part
        slot = (2 * program + (program == first_program).to(tl.int32))[:, None] * ROWS + row[None, :]
        ok = (program <= last_program)[:, None]
        m_part = tl.load(partial_m + slot, mask=ok, other=LOWEST, cache_modifier=".cg")
        l_part = tl.load(partial_l + slot, mask=ok, other=0.0, cache_modifier=".cg")
        at = slot[:, :, None] * DV + d[None, None, :]
        acc_part = tl.load(partial_acc + at, mask=ok[:, :, None], other=0.0, cache_modifier=".cg")
        m_new = tl.maximum(m, m_part)
        alpha = tl.exp2(m - m_new)
        weight = tl.where(ok, tl.exp2(m_part - m_new), 0.0)  # a lane without a part counts nothing
        l = l * alpha + l_part * weight
        acc = acc * alpha[:, :, None] + acc_part * weight[:, :, None]
        m = m_new
    m_all = tl.max(m, 0)
    weight = tl.exp2(m - m_all[None, :])
    return tl.sum(acc * weight[:, :, None], 0), m_all, tl.sum(l * weight, 0)


# Sizes that change from step to step: not specialised, so that no batch size compiles a kernel of its own.
@triton.jit(do_not_specialize=["num_seqs", "num_rows_out", "window", "table_stride"])
def decode_kernel(
    q, k, v, block_table, seq_lens, query_start_loc, tail_rows, sinks, out,
    partial_acc, partial_m, partial_l, arrivals,
    num_seqs, num_rows_out, window, inner_scale, score_scale,
    q_token, q_head, out_token, out_head, table_stride,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM_K: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_SIZE: tl.constexpr, SEQS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
    MIN_TILES: tl.constexpr, STAGES: tl.constexpr, SAME_STRIDES: tl.constexpr, MULTI_QUERY: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOWED: tl.constexpr, HAS_SINKS: tl.constexpr, PRECISION: tl.constexpr,
    TRANSPOSED: tl.constexpr, K_INT4: tl.constexpr, K_SCALE: tl.constexpr, K_CHANNELS: tl.constexpr,
    V_INT4: tl.constexpr, V_SCALE: tl.constexpr, V_CHANNELS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:  # see rope.launch_options
        gdc_wait()
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)

    # Tiles of every sequence (SEQS >= num_seqs lanes), and where each sequence ends in the line of tiles.
    index = tl.arange(0, SEQS)
    live = index < num_seqs
    all_lens = tl.load(seq_lens + index, mask=live, other=0)
    all_starts = tl.load(query_start_loc + index, mask=live, other=0)
    all_query_lens = tl.load(query_start_loc + index + 1, mask=live, other=0) - all_starts
    _, all_tiles = decode_tiles(all_lens, all_query_lens, window, GROUP, BLOCK_M, BLOCK_N, WINDOWED)
    num_live = tl.sum((all_tiles > 0).to(tl.int32), 0)
    # Lengths differ where the longest is more than 1/16 above the mean, rows of padding left out. Then each pair begins
    # with a tile more.
    with_keys = tl.where(all_lens > 0, all_tiles, 0)
    mean_17 = tl.sum(with_keys, 0) * 17 // tl.maximum(tl.sum((with_keys > 0).to(tl.int32), 0), 1)
    all_tiles += ((all_tiles > 0) & (tl.max(with_keys, 0) * 16 > mean_17)).to(tl.int32)
    line_end = tl.cumsum(all_tiles, 0) * NUM_KV_HEADS
    total = tl.sum(all_tiles, 0) * NUM_KV_HEADS

    # Equal shares for as many programs as get MIN_TILES each. When whole pairs fit about as well (sequences of equal
    # length), as many programs as take the same number of whole pairs, so that none is cut.
    sharers = tl.maximum(tl.minimum(num_programs, total // MIN_TILES), 1)
    pairs = num_live * NUM_KV_HEADS
    pairs_each = tl.maximum((pairs + sharers - 1) // sharers, 1)
    if (pairs % pairs_each == 0) & (pairs_each * tl.max(all_tiles, 0) * 16 <= (total // sharers) * 17):
        sharers = tl.maximum(pairs // pairs_each, 1)
    tile = share_begin(program, total, sharers)
    last_tile = tl.where(program < sharers, share_begin(program + 1, total, sharers), tile)
    while tile < last_tile:
        # The pair (sequence, head) that `tile` belongs to, and its tiles [pair_begin, pair_end), those with keys last.
        seq = tl.sum((line_end <= tile).to(tl.int32), 0)
        seq_begin = tl.max(tl.where(line_end <= tile, line_end, 0), 0)
        seq_len = tl.load(seq_lens + seq)
        query_start = tl.load(query_start_loc + seq)
        query_len = tl.load(query_start_loc + seq + 1) - query_start
        first, key_tiles = decode_tiles(seq_len, query_len, window, GROUP, BLOCK_M, BLOCK_N, WINDOWED)
        tiles = (tl.min(tl.where(line_end > tile, line_end, 0x7FFFFFFF), 0) - seq_begin) // NUM_KV_HEADS
        head = (tile - seq_begin) // tiles
        pair_begin = seq_begin + head * tiles
        pair_end = pair_begin + tiles
        stop = tl.minimum(pair_end, last_tile)

        shift = first - (pair_end - key_tiles)  # from the line to tiles of the sequence
        begin = tl.maximum(tile + shift, first) * BLOCK_N
        end = tl.minimum(tl.maximum(stop + shift, first) * BLOCK_N, seq_len)
        visible_from = tl.maximum(seq_len - query_len - window + 1, 0) if WINDOWED else 0
        table_row = block_table + seq.to(tl.int64) * table_stride
        row = tl.arange(0, BLOCK_M)
        q_row = q + (query_start + row // GROUP).to(tl.int64) * q_token + (head * GROUP + row % GROUP) * q_head
        row_ok = row < query_len * GROUP
        row_pos = seq_len - query_len + row // GROUP
        if TRANSPOSED:
            tail_row = tl.load(tail_rows + seq) if k.tail is not None else 0
            acc, m, l = attend_quantised(
                q_row, row_ok, k, v, head, tail_row, table_row, begin, end, seq_len, visible_from, row_pos, window,
                inner_scale, score_scale, HEAD_DIM_K, HEAD_DIM_V, DK, DV, BLOCK_SIZE, BLOCK_M, BLOCK_N, STAGES,
                SAME_STRIDES, K_INT4, K_SCALE, K_CHANNELS, V_INT4, V_SCALE, V_CHANNELS,
                MULTI_QUERY, SOFTCAP, WINDOWED, PRECISION,
            )  # fmt: skip
        else:
            acc, m, l = attend(
                q_row, row_ok, k.codes + head.to(tl.int64) * k.head, v.codes + head.to(tl.int64) * v.head, table_row,
                begin, end, visible_from, row_pos, window, inner_scale, score_scale, k.block, k.slot, v.block, v.slot,
                HEAD_DIM_K, HEAD_DIM_V, DK, DV, BLOCK_SIZE, BLOCK_M, BLOCK_N, STAGES, SAME_STRIDES,
                MULTI_QUERY, SOFTCAP, WINDOWED, PRECISION,
            )  # fmt: skip

        if (tile == pair_begin) & (stop == pair_end):
            q_head_index = head * GROUP + row % GROUP
            out_row = out + (query_start + row // GROUP).to(tl.int64) * out_token + q_head_index * out_head
            store_output(acc, m, l, sinks, q_head_index, out_row, row_ok, HEAD_DIM_V, DV, HAS_SINKS, V_INT4)
        else:
            slot = (2 * program + (tile == pair_begin).to(tl.int32)) * ROWS + row
            d = tl.arange(0, DV)
            kept = row < ROWS
            tl.store(partial_acc + slot[:, None] * DV + d[None, :], acc, mask=kept[:, None])
            tl.store(partial_m + slot, m, mask=kept)
            tl.store(partial_l + slot, l, mask=kept)
            first_program = owner(pair_begin, total, sharers)
            last_program = owner(pair_end - 1, total, sharers)
            tl.debug_barrier()  # all threads have stored before one of them announces it
            arrived = tl.atomic_add(arrivals + first_program, 1, sem="acq_rel")
            if arrived == last_program - first_program:
                acc_all, m_all, l_all = merge_parts(
                    partial_acc, partial_m, partial_l, first_program, last_program, ROWS, DV, PARTS
                )
                tl.store(arrivals + first_program, 0)  # ready for the next launch
                r = tl.arange(0, ROWS)
                q_head_index = head * GROUP + r % GROUP
                out_row = out + (query_start + r // GROUP).to(tl.int64) * out_token + q_head_index * out_head
                r_ok = r < query_len * GROUP
                store_output(
                    acc_all, m_all, l_all, sinks, q_head_index, out_row, r_ok, HEAD_DIM_V, DV, HAS_SINKS, V_INT4
                )
        tile = stop

    # Rows of q that belong to no sequence: padding at the end of a captured batch.
    d = tl.arange(0, DV)
    spare = tl.load(query_start_loc + num_seqs) + program
    while spare < num_rows_out:
        for h in range(NUM_KV_HEADS * GROUP):
            at = out + spare.to(tl.int64) * out_token + h * out_head + d
            tl.store(at, tl.zeros([DV], dtype=out.dtype.element_ty), mask=d < HEAD_DIM_V)
        spare += num_programs
