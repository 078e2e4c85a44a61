"""Quantising new K and V on their way into the pages (quantise.py), all in one launch.

Where a token has scales of its own (or they were fixed before the run), it is quantised alone. Where scales span the
tokens of a block, a token waits in its sequence's tail until the block is full. A step may bring any number of tokens:

    positions   | 4  5  6  7 | 8  9 10 11 |12 13  .  . |     blocks of 4, this step brings 6 ... 13

    4  5        were waiting in the tail
    4 ... 7     is completed: quantised from the tail and new tokens, by the sequence's program
    8 ... 11    is whole: quantised from new tokens alone, by a program of its own
    12 13       wait: copied into the tail, by the sequence's program, which has read the tail before

A window of block_size tokens of the batch holds the beginning of at most one whole block, so num_tokens // block_size
programs find them all without a look at sequences, and the launch depends on nothing but the sizes of the batch.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from .dequantise import stored
from .pages import QuantisedKVPages, check_quantised_write_inputs
from .quantise import CodeFormat, code_format, row_codes
from .quantise_pairs import pair_codes
from .rope import launch_options
from .tuning import QUANTISED_WRITE, QUANTISED_WRITE_BY_ONE, WriteTile

LEAST_CHANNELS = 16  # of 16 bits, side by side: what memory is read by


@triton.jit
def row_channels(part, FORMAT: CodeFormat, VECTOR: tl.constexpr):
    """(group, offset in a row, whether the group and the channel exist) of a tile [1, groups, width] of half a row.

    VECTOR: as many elements of it side by side are loaded and stored by a thread at most (0: what suits the memory
    best). All tokens of a block share a channel's extremes; few channels a thread leave it more of the tokens.
    """
    groups: tl.constexpr = FORMAT.groups // FORMAT.parts
    g = tl.arange(0, triton.next_power_of_2(groups))[None, :, None]
    c = tl.arange(0, triton.next_power_of_2(FORMAT.width))[None, None, :]
    group_ok = g < groups
    inside = group_ok & (c < FORMAT.width)
    g += part * groups
    at = g * FORMAT.width + c
    if VECTOR:
        at = at // VECTOR * VECTOR + at % VECTOR  # the same numbers; the compiler sees no longer runs than VECTOR
    return g, at, group_ok, inside


@triton.jit
def load_rows(row, ok, part, FORMAT: CodeFormat, VECTOR: tl.constexpr):
    """Rows of one head each, row: pointers [rows, 1, 1], as tiles of their two halves (not int4: the whole, twice)."""
    _, at, _, inside = row_channels(part, FORMAT, VECTOR)
    if FORMAT.channels == 2:
        row = row.to(tl.pointer_type(tl.int32))
    low = tl.load(row + at, mask=ok & inside, other=0.0)
    high = low
    if FORMAT.halves == 2:
        high = tl.load(row + FORMAT.groups * FORMAT.width + at, mask=ok & inside, other=0.0)
    return low, high


@triton.jit
def write_rows(
    pages, x, x_high, dtype: tl.dtype, ok, block, head, offset, part, FORMAT: CodeFormat, OVER_TOKENS: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    """Quantise rows (load_rows) of numbers of a dtype and store their codes and scales.

    ok, block, head, offset: whether each row exists and its place, [rows, 1, 1] or scalars. OVER_TOKENS: the rows are a
    block and share scales.
    """
    g, at, group_ok, inside = row_channels(part, FORMAT, VECTOR)
    scale_at = None
    scale_ok = None
    if pages.scales is not None:
        scale_at = block * pages.scale_block + head * pages.scale_head + FORMAT.channels * g
        scale_ok = group_ok
        if not OVER_TOKENS:
            scale_at += offset * pages.scale_slot
            scale_ok &= ok

    counts = inside & ok if OVER_TOKENS else inside
    if FORMAT.channels == 2:
        codes = pair_codes(x, x_high, counts, pages, scale_at, scale_ok, dtype, FORMAT)
    else:
        codes = row_codes(x, x_high, counts, pages, scale_at, scale_ok, FORMAT, OVER_TOKENS)
    code_row = pages.codes + block * pages.block + head * pages.head + offset * pages.slot
    if FORMAT.channels == 2:
        code_row = code_row.to(tl.pointer_type(tl.uint16))
    tl.store(code_row + at, codes.to(code_row.dtype.element_ty), mask=ok & inside)


@triton.jit
def keep_in_tail(
    new_row, new_token, tail_row, tail_slot, first, last, part, BLOCK_SIZE: tl.constexpr, FORMAT: CodeFormat
):
    """Copy slots [first, last) of a block into the tail; new_row: where slot 0 would be among the new tokens."""
    half: tl.constexpr = FORMAT.groups * FORMAT.width * FORMAT.channels
    width: tl.constexpr = half // FORMAT.parts
    slot = tl.arange(0, triton.next_power_of_2(BLOCK_SIZE))[:, None]
    d = tl.arange(0, triton.next_power_of_2(FORMAT.halves * width))[None, :]
    ok = (slot >= first) & (slot < last) & (d < FORMAT.halves * width)
    channel = d // width * half + part * width + d % width
    values = tl.load(new_row + slot * new_token + channel, mask=ok)
    tl.store(tail_row + slot * tail_slot + channel, values, mask=ok)


@triton.jit
def write_through_tail(
    new, new_token, new_head, pages, slot_mapping, seq_lens, query_start_loc, tail_rows, num_tokens, num_seqs,
    program, head, part, BLOCK_SIZE: tl.constexpr, FORMAT: CodeFormat, VECTOR: tl.constexpr,
):  # fmt: skip
    """Part of one head of what sequence `program` completes and leaves waiting; then of the block begun in a window."""
    new += head * new_head
    tail_row = pages.tail + head * pages.tail_head
    of_sequence = program < num_seqs
    begin = tl.zeros([], dtype=tl.int64)
    end = begin  # tokens [begin, end) of the batch are the sequence's, after num_waiting in its tail
    num_waiting = begin
    if of_sequence:
        begin = tl.load(query_start_loc + program).to(tl.int64)
        end = tl.load(query_start_loc + program + 1).to(tl.int64)
        if tl.load(slot_mapping + begin, mask=end > begin, other=-1) < 0:  # padding
            end = begin
        tail_row += tl.load(tail_rows + program).to(tl.int64) * pages.tail_row
        num_waiting = tl.maximum(tl.load(seq_lens + program) - (end - begin), 0) % BLOCK_SIZE
        block_begin = begin - num_waiting
        is_full = (num_waiting > 0) & (end - block_begin >= BLOCK_SIZE)
        rows = tail_row
        row_stride = pages.tail_slot
        if is_full:
            keep_in_tail(
                new + block_begin * new_token, new_token, tail_row, pages.tail_slot, num_waiting, BLOCK_SIZE,
                part, BLOCK_SIZE, FORMAT,
            )  # fmt: skip
            tl.debug_barrier()  # what one thread has copied another one reads
    else:
        slot = tl.arange(0, triton.next_power_of_2(BLOCK_SIZE))
        token = (program - num_seqs).to(tl.int64) * BLOCK_SIZE + slot
        last = token + BLOCK_SIZE - 1
        candidate = (slot < BLOCK_SIZE) & (last < num_tokens)
        place = tl.load(slot_mapping + token, mask=candidate, other=-1)
        last_place = tl.load(slot_mapping + last, mask=candidate, other=-1)
        is_whole = (place >= 0) & (place % BLOCK_SIZE == 0) & (last_place == place + BLOCK_SIZE - 1)
        block_begin = tl.max(tl.where(is_whole, token, -1), 0)
        is_full = block_begin >= 0
        rows = new + block_begin * new_token
        row_stride = new_token

    if is_full:
        slot = tl.arange(0, triton.next_power_of_2(BLOCK_SIZE))[:, None, None]
        ok = slot < BLOCK_SIZE
        block = tl.load(slot_mapping + block_begin + BLOCK_SIZE - 1) // BLOCK_SIZE
        x, x_high = load_rows(rows + slot * row_stride, ok, part, FORMAT, VECTOR)
        write_rows(pages, x, x_high, new.dtype.element_ty, ok, block, head, slot, part, FORMAT, True, VECTOR)
    if of_sequence:
        tl.debug_barrier()  # the tail has been read before it is written to
        last_begin = end - (num_waiting + end - begin) % BLOCK_SIZE
        keep_in_tail(
            new + last_begin * new_token, new_token, tail_row, pages.tail_slot, tl.maximum(begin - last_begin, 0),
            end - last_begin, part, BLOCK_SIZE, FORMAT,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "num_seqs"])
def write_quantised_kv_kernel(
    k_new, v_new, k, v, slot_mapping, seq_lens, query_start_loc, tail_rows, num_tokens, num_seqs,
    k_new_token, k_new_head, v_new_token, v_new_head,
    NUM_HEADS: tl.constexpr, HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, PARTS: tl.constexpr,
    K_FORMAT: tl.constexpr, V_FORMAT: tl.constexpr, VECTOR: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Programs in a line: with tails (sequence, head, part) ... (window, head, part) ..., then (token, HEADS heads)."""
    if EARLY:
        gdc_wait()
    program = tl.program_id(0)
    block_programs = 0
    if k.tail is not None or v.tail is not None:
        block_programs = (num_seqs + num_tokens // BLOCK_SIZE) * NUM_HEADS * PARTS
    if program < block_programs:
        line = program // PARTS
        part = program % PARTS
        if k.tail is not None:
            write_through_tail(
                k_new, k_new_token, k_new_head, k, slot_mapping, seq_lens, query_start_loc, tail_rows, num_tokens,
                num_seqs, line // NUM_HEADS, line % NUM_HEADS, part, BLOCK_SIZE, K_FORMAT, VECTOR,
            )  # fmt: skip
        if v.tail is not None:
            write_through_tail(
                v_new, v_new_token, v_new_head, v, slot_mapping, seq_lens, query_start_loc, tail_rows, num_tokens,
                num_seqs, line // NUM_HEADS, line % NUM_HEADS, part, BLOCK_SIZE, V_FORMAT, VECTOR,
            )  # fmt: skip
    else:
        head_groups: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
        token_program = program - block_programs
        token = (token_program // head_groups).to(tl.int64)
        heads = (token_program % head_groups * HEADS + tl.arange(0, HEADS))[:, None, None]
        slot = tl.load(slot_mapping + token)
        ok = (heads < NUM_HEADS) & (slot >= 0)
        block = slot // BLOCK_SIZE
        offset = slot % BLOCK_SIZE
        # K and V are both on their way before either is looked at.
        if k.tail is None:
            k_row, k_high = load_rows(k_new + token * k_new_token + heads * k_new_head, ok, 0, K_FORMAT, 0)
        if v.tail is None:
            v_row, v_high = load_rows(v_new + token * v_new_token + heads * v_new_head, ok, 0, V_FORMAT, 0)
        if k.tail is None:
            write_rows(k, k_row, k_high, k_new.dtype.element_ty, ok, block, heads, offset, 0, K_FORMAT, False, 0)
        if v.tail is None:
            write_rows(v, v_row, v_high, v_new.dtype.element_ty, ok, block, heads, offset, 0, V_FORMAT, False, 0)


def write_quantised_kv(
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    kv: QuantisedKVPages,
    slot_mapping: torch.Tensor,
    *,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    tail_rows: torch.Tensor | None,
) -> None:
    """Quantise each new token's K and V into its slot, or let it wait in its sequence's tail.

    k_new, v_new: [num_tokens, num_kv_heads, head_dim], finite, contiguous along head_dim; values beyond +-2^126, and
        beyond what fixed scales reach, saturate. Codes and scales are those of labkit.quant, bit for bit.
    slot_mapping: int64 [num_tokens], slot = block * block_size + offset; -1 writes nothing (a padded row).
    seq_lens, query_start_loc: int32 [num_seqs] and [num_seqs + 1], lengths with this step's tokens, as in attention.
    tail_rows: integers [num_seqs], the row of the tails that is each sequence's own; None where kv has no tails.

    Reads no tensor on the host. Raises TypeError or ValueError, naming the argument, on other shapes or types, and for
    layouts of scales that are measured over several heads, or over an odd number of int4 groups.
    """
    check_quantised_write_inputs(k_new, v_new, kv, slot_mapping, seq_lens, query_start_loc, tail_rows)
    if k_new.shape[0]:
        grid, arguments, constants, options = write_launch(
            k_new, v_new, kv, slot_mapping, seq_lens, query_start_loc, tail_rows
        )
        write_quantised_kv_kernel[grid](*arguments, **constants, **launch_options(k_new.device), **options)


def most_parts(format: CodeFormat) -> int:
    """Programs that may share a block of one head: none splits a group, or reads less than 32 bytes in a row of it."""
    widest = format.groups * format.width * format.channels // LEAST_CHANNELS
    return max(n for n in (1, 2, 4, 8, 16) if n == 1 or (format.groups % n == 0 and n <= widest))


def write_launch(
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    kv: QuantisedKVPages,
    slot_mapping: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    tail_rows: torch.Tensor | None,
    tile: WriteTile | None = None,
) -> tuple[tuple[Any], tuple[Any, ...], dict[str, Any], dict[str, Any]]:
    """(grid, arguments, constants, options) of the kernel; tile None is the one for what is written."""
    num_tokens, num_heads, _ = k_new.shape
    num_seqs, block_size = seq_lens.shape[0], kv.block_size
    k_waits, v_waits = waits = kv.k_tail is not None, kv.v_tail is not None
    dim = triton.next_power_of_2(max(kv.head_dim_k, kv.head_dim_v))
    formats = code_format(k_new, kv.k, kv.k_tail), code_format(v_new, kv.v, kv.v_tail)
    waiting = [formats[side] for side in range(2) if waits[side]]
    tile = tile or (QUANTISED_WRITE if all(format.channels == 2 for format in waiting) else QUANTISED_WRITE_BY_ONE)
    num_warps, registers, parts = tile.num_warps, None, 1
    if waiting:
        parts = min(tile.block_parts, *map(most_parts, waiting))
        formats = tuple(formats[side]._replace(parts=parts if waits[side] else 1) for side in range(2))
        numbers = triton.next_power_of_2(block_size) * dim // parts
        num_warps = min(16, max(1, numbers // (32 * tile.block_numbers)))
        registers = tile.block_registers and min(tile.block_registers, 2048 // num_warps)  # 2^16 a multiprocessor
    heads = min(triton.next_power_of_2(num_heads), max(1, max(tile.token_numbers, 512 * num_warps) // dim))
    block_programs = (num_seqs + num_tokens // block_size) * num_heads * parts if k_waits or v_waits else 0
    token_programs = 0 if k_waits and v_waits else num_tokens * triton.cdiv(num_heads, heads)
    arguments = (
        k_new, v_new, stored(kv.k, kv.k_tail), stored(kv.v, kv.v_tail), slot_mapping, seq_lens, query_start_loc,
        slot_mapping if tail_rows is None else tail_rows, num_tokens, num_seqs,
        k_new.stride(0), k_new.stride(1), v_new.stride(0), v_new.stride(1),
    )  # fmt: skip
    constants = dict(
        NUM_HEADS=num_heads, HEADS=heads, BLOCK_SIZE=block_size, PARTS=parts,
        K_FORMAT=formats[0], V_FORMAT=formats[1], VECTOR=tile.block_vector,
    )  # fmt: skip
    options = dict(num_warps=num_warps) | ({} if registers is None else dict(maxnreg=registers))
    return (block_programs + token_programs,), arguments, constants, options
