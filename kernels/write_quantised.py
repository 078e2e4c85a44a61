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
from .pages import QuantisedKVPages
from .quantise import LARGEST_VALUE, CodeFormat, code_format, extremes, half_codes
from .rope import launch_options


@triton.jit
def load_rows(new_row, is_new, tail_row, is_waiting, at, ok):
    """Values of rows that are new, or wait in a tail (None: none does), as float32."""
    x = tl.load(new_row + at, mask=is_new & ok, other=0.0)
    if tail_row is not None:
        # Through the tail's dtype in any case: what a block holds does not depend on how its tokens came.
        x = x.to(tail_row.dtype.element_ty).to(tl.float32)
        x += tl.load(tail_row + at, mask=is_waiting & ok, other=0.0).to(tl.float32)
    return tl.clamp(x.to(tl.float32), -LARGEST_VALUE, LARGEST_VALUE)


@triton.jit
def write_rows(
    pages, new_row, is_new, tail_row, is_waiting, block, head, offset, FORMAT: CodeFormat, OVER_TOKENS: tl.constexpr
):
    """Quantise rows of one head each and store their codes and scales.

    new_row, tail_row: pointers [rows, 1, 1] to the first channel. is_new, is_waiting: where to load which.
    block, head, offset: place of each row, [rows, 1, 1] or scalars. OVER_TOKENS: the rows are a block and share scales.
    """
    g = tl.arange(0, triton.next_power_of_2(FORMAT.groups))[None, :, None]
    c = tl.arange(0, triton.next_power_of_2(FORMAT.width))[None, None, :]
    half = FORMAT.groups * FORMAT.width
    at = g * FORMAT.width + c
    inside = (g < FORMAT.groups) & (c < FORMAT.width)
    row_ok = is_new if tail_row is None else is_new | is_waiting
    ok = row_ok & inside

    scale_at = None
    scale_ok = None
    if pages.scales is not None:
        scale_at = block * pages.scale_block + head * pages.scale_head + g
        if not OVER_TOKENS:
            scale_at += offset * pages.scale_slot
        scale_ok = (g < FORMAT.groups) & (tl.max(row_ok.to(tl.int32), 0, keep_dims=True) > 0 if OVER_TOKENS else row_ok)

    x = load_rows(new_row, is_new, tail_row, is_waiting, at, inside)
    low, high = extremes(x, ok, pages.zero_points, OVER_TOKENS)
    if FORMAT.halves == 2:
        x_high = load_rows(
            new_row + half, is_new, None if tail_row is None else tail_row + half, is_waiting, at, inside
        )
        low_2, high_2 = extremes(x_high, ok, pages.zero_points, OVER_TOKENS)
        if FORMAT.one_group:
            low = tl.minimum(low, low_2)
            high = tl.maximum(high, high_2)
            codes_high = half_codes(x_high, low, high, pages, scale_at, scale_ok, FORMAT)
        else:
            codes_high = half_codes(x_high, low_2, high_2, pages, scale_at + FORMAT.groups, scale_ok, FORMAT)
        codes = half_codes(x, low, high, pages, scale_at, scale_ok, FORMAT) | (codes_high << 4)
    else:
        codes = half_codes(x, low, high, pages, scale_at, scale_ok, FORMAT)
    code_row = pages.codes + block * pages.block + head * pages.head + offset * pages.slot
    tl.store(code_row + at, codes, mask=ok)


@triton.jit
def write_token(
    new, new_token, new_head, pages, slot_mapping, token, heads,
    NUM_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, FORMAT: CodeFormat,
):  # fmt: skip
    """Quantise the rows of a token's heads, each on its own, into its slot."""
    slot = tl.load(slot_mapping + token)
    row = new + token * new_token + heads * new_head
    ok = (heads < NUM_HEADS) & (slot >= 0)
    write_rows(pages, row, ok, None, None, slot // BLOCK_SIZE, heads, slot % BLOCK_SIZE, FORMAT, False)


@triton.jit
def write_block(
    new, new_token, new_head, pages, slot_mapping, first, num_waiting, tail_index, head,
    BLOCK_SIZE: tl.constexpr, FORMAT: CodeFormat,
):  # fmt: skip
    """Quantise one head of a block: slots below num_waiting from the tail, slot s of the others is token first + s."""
    slot = tl.arange(0, triton.next_power_of_2(BLOCK_SIZE))[:, None, None]
    new_row = new + (first + slot) * new_token + head * new_head
    tail_row = pages.tail + tail_index * pages.tail_row + head * pages.tail_head + slot * pages.tail_slot
    block = tl.load(slot_mapping + first + BLOCK_SIZE - 1) // BLOCK_SIZE
    is_new = (slot >= num_waiting) & (slot < BLOCK_SIZE)
    write_rows(pages, new_row, is_new, tail_row, slot < num_waiting, block, head, slot, FORMAT, True)


@triton.jit
def write_through_tail(
    new, new_token, new_head, pages, slot_mapping, seq_lens, query_start_loc, tail_rows, num_tokens, num_seqs,
    program, head, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, FORMAT: CodeFormat,
):  # fmt: skip
    """One head of what sequence `program` completes and leaves waiting; then of the whole block begun in a window."""
    slot = tl.arange(0, triton.next_power_of_2(BLOCK_SIZE))
    if program >= num_seqs:
        token = (program - num_seqs).to(tl.int64) * BLOCK_SIZE + slot
        last = token + BLOCK_SIZE - 1
        candidate = (slot < BLOCK_SIZE) & (last < num_tokens)
        place = tl.load(slot_mapping + token, mask=candidate, other=-1)
        last_place = tl.load(slot_mapping + last, mask=candidate, other=-1)
        is_whole = (place >= 0) & (place % BLOCK_SIZE == 0) & (last_place == place + BLOCK_SIZE - 1)
        first = tl.max(tl.where(is_whole, token, -1), 0)
        if first >= 0:
            write_block(new, new_token, new_head, pages, slot_mapping, first, 0, 0, head, BLOCK_SIZE, FORMAT)
    else:
        begin = tl.load(query_start_loc + program).to(tl.int64)
        query_len = tl.load(query_start_loc + program + 1) - begin
        seq_len = tl.load(seq_lens + program)
        if tl.load(slot_mapping + begin, mask=query_len > 0, other=-1) >= 0:
            tail_index = tl.load(tail_rows + program).to(tl.int64)
            num_waiting = (seq_len - query_len) % BLOCK_SIZE
            if num_waiting > 0 and num_waiting + query_len >= BLOCK_SIZE:
                first = begin - num_waiting
                write_block(
                    new, new_token, new_head, pages, slot_mapping, first, num_waiting, tail_index, head,
                    BLOCK_SIZE, FORMAT,
                )  # fmt: skip
                tl.debug_barrier()  # all threads have read the tail before one of them writes to it
            first = begin + query_len - seq_len % BLOCK_SIZE
            d = tl.arange(0, triton.next_power_of_2(DIM))[None, :]
            waits = (slot < seq_len % BLOCK_SIZE) & (first + slot >= begin)
            ok = waits[:, None] & (d < DIM)
            x = tl.load(new + ((first + slot) * new_token + head * new_head)[:, None] + d, mask=ok)
            tail_row = pages.tail + tail_index * pages.tail_row + head * pages.tail_head + slot * pages.tail_slot
            tl.store(tail_row[:, None] + d, x.to(pages.tail.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["num_tokens", "num_seqs"])
def write_quantised_kv_kernel(
    k_new, v_new, k, v, slot_mapping, seq_lens, query_start_loc, tail_rows, num_tokens, num_seqs,
    k_new_token, k_new_head, v_new_token, v_new_head,
    NUM_HEADS: tl.constexpr, HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM_K: tl.constexpr, DIM_V: tl.constexpr,
    K_FORMAT: tl.constexpr, V_FORMAT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Programs in a line: with tails (sequence, head) ... (window, head) ..., then (token, HEADS heads) ... without."""
    if EARLY:
        gdc_wait()
    program = tl.program_id(0)
    block_programs = 0
    if k.tail is not None or v.tail is not None:
        block_programs = (num_seqs + num_tokens // BLOCK_SIZE) * NUM_HEADS
    if program < block_programs:
        head = program % NUM_HEADS
        if k.tail is not None:
            write_through_tail(
                k_new, k_new_token, k_new_head, k, slot_mapping, seq_lens, query_start_loc, tail_rows, num_tokens,
                num_seqs, program // NUM_HEADS, head, BLOCK_SIZE, DIM_K, K_FORMAT,
            )  # fmt: skip
        if v.tail is not None:
            write_through_tail(
                v_new, v_new_token, v_new_head, v, slot_mapping, seq_lens, query_start_loc, tail_rows, num_tokens,
                num_seqs, program // NUM_HEADS, head, BLOCK_SIZE, DIM_V, V_FORMAT,
            )  # fmt: skip
    else:
        head_groups: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
        token_program = program - block_programs
        token = (token_program // head_groups).to(tl.int64)
        heads = (token_program % head_groups * HEADS + tl.arange(0, HEADS))[:, None, None]
        if k.tail is None:
            write_token(k_new, k_new_token, k_new_head, k, slot_mapping, token, heads, NUM_HEADS, BLOCK_SIZE, K_FORMAT)
        if v.tail is None:
            write_token(v_new, v_new_token, v_new_head, v, slot_mapping, token, heads, NUM_HEADS, BLOCK_SIZE, V_FORMAT)


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
    check_write_inputs(k_new, v_new, kv, slot_mapping, seq_lens, query_start_loc, tail_rows)
    if k_new.shape[0]:
        grid, arguments, constants, num_warps = write_launch(
            k_new, v_new, kv, slot_mapping, seq_lens, query_start_loc, tail_rows
        )
        write_quantised_kv_kernel[grid](*arguments, **constants, **launch_options(k_new.device), num_warps=num_warps)


def write_launch(
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    kv: QuantisedKVPages,
    slot_mapping: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    tail_rows: torch.Tensor | None,
) -> tuple[tuple[Any], tuple[Any, ...], dict[str, Any], Any]:
    """(grid, arguments, constants, num_warps) of the kernel."""
    num_tokens, num_heads, _ = k_new.shape
    num_seqs, block_size = seq_lens.shape[0], kv.block_size
    k_waits, v_waits = kv.k_tail is not None, kv.v_tail is not None
    dim = triton.next_power_of_2(max(kv.head_dim_k, kv.head_dim_v))
    block_numbers = triton.next_power_of_2(block_size) * dim if k_waits or v_waits else 0
    num_warps = min(16, max(4, block_numbers // 512))  # 16 numbers a thread
    heads = min(triton.next_power_of_2(num_heads), max(1, 512 * num_warps // dim))
    block_programs = (num_seqs + num_tokens // block_size) * num_heads if k_waits or v_waits else 0
    token_programs = 0 if k_waits and v_waits else num_tokens * triton.cdiv(num_heads, heads)
    arguments = (
        k_new, v_new, stored(kv.k, kv.k_tail), stored(kv.v, kv.v_tail), slot_mapping, seq_lens, query_start_loc,
        slot_mapping if tail_rows is None else tail_rows, num_tokens, num_seqs,
        k_new.stride(0), k_new.stride(1), v_new.stride(0), v_new.stride(1),
    )  # fmt: skip
    constants = dict(
        NUM_HEADS=num_heads, HEADS=heads, BLOCK_SIZE=block_size, DIM_K=kv.head_dim_k, DIM_V=kv.head_dim_v,
        K_FORMAT=code_format(kv.k, kv.head_dim_k, k_waits), V_FORMAT=code_format(kv.v, kv.head_dim_v, v_waits),
    )  # fmt: skip
    return (block_programs + token_programs,), arguments, constants, num_warps


def check_write_inputs(
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    kv: QuantisedKVPages,
    slot_mapping: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    tail_rows: torch.Tensor | None,
) -> None:
    for name, new, head_dim in (("k_new", k_new, kv.head_dim_k), ("v_new", v_new, kv.head_dim_v)):
        if new.ndim != 3 or new.shape[1:] != (kv.num_kv_heads, head_dim) or new.shape[0] != k_new.shape[0]:
            raise ValueError(
                f"{name} must be [num_tokens, {kv.num_kv_heads}, {head_dim}], got {tuple(new.shape)} "
                f"beside k_new {tuple(k_new.shape)}"
            )
        if new.stride(2) != 1:
            raise ValueError(f"{name} must be contiguous along head_dim")
    if slot_mapping.dtype != torch.int64:
        raise TypeError(f"slot_mapping must be int64, got {slot_mapping.dtype}")
    if slot_mapping.shape != k_new.shape[:1]:
        raise ValueError(f"slot_mapping must be [{k_new.shape[0]}], got {tuple(slot_mapping.shape)}")
    num_seqs = seq_lens.shape[0]
    if query_start_loc.shape != (num_seqs + 1,):
        raise ValueError(f"query_start_loc must be [{num_seqs + 1}], got {tuple(query_start_loc.shape)}")
    has_tails = kv.k_tail is not None or kv.v_tail is not None
    if has_tails and (tail_rows is None or tail_rows.shape != (num_seqs,)):
        got = None if tail_rows is None else tuple(tail_rows.shape)
        raise ValueError(f"tail_rows must be [{num_seqs}] where blocks are quantised as a whole, got {got}")
