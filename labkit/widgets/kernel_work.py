"""The work list of a decode step, as the kernel makes it for itself: who reads which keys of which sequence.

The same arithmetic as in :mod:`labkit.kernels.decode`, on the host; a test holds one against the other. All (sequence,
KV head) pairs stand in one line of tiles, and each program takes an equal share of the line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """What one program reads of one (sequence, KV head) pair: keys ``begin`` to ``end`` (exclusive).

    ``slot`` is where in the workspace it leaves its result for the merge; None if it reads the whole pair.
    """

    program: int
    sequence: int
    head: int
    begin: int
    end: int
    slot: int | None


def decode_tiles(seq_len: int, block_n: int) -> int:
    """Tiles of ``block_n`` keys of a sequence; at least one, which writes the zeros of an empty row."""
    return max(-(-seq_len // block_n), 1)


def share_begin(program: int, total: int, sharers: int) -> int:
    """First tile of a program's share of ``total`` tiles."""
    return program * total // sharers


def owner(tile: int, total: int, sharers: int) -> int:
    """The program whose share holds a tile."""
    return ((tile + 1) * sharers - 1) // total


def num_sharers(tiles: Sequence[int], num_kv_heads: int, num_programs: int, min_tiles: int) -> int:
    """Programs that get a share: none gets less than ``min_tiles``, and no pair is cut where whole ones fit as well."""
    total, pairs = sum(tiles) * num_kv_heads, len(tiles) * num_kv_heads
    sharers = max(min(num_programs, total // min_tiles), 1)
    pairs_each = max(-(-pairs // sharers), 1)
    if pairs % pairs_each == 0 and pairs_each * max(tiles) * 16 <= total // sharers * 17:
        return max(pairs // pairs_each, 1)
    return sharers


def work_list(
    seq_lens: Sequence[int], num_kv_heads: int, num_programs: int, *, block_n: int, min_tokens: int
) -> list[Part]:
    """Every part of a decode step with one new token a sequence, in the order of the line.

    ``block_n`` keys are a tile, and no program gets fewer than ``min_tokens`` keys (:class:`DecodeTile` of
    :mod:`labkit.kernels.tuning`). Raises ValueError unless there is a sequence and all numbers are positive.
    """
    for name, value in (("num_kv_heads", num_kv_heads), ("num_programs", num_programs), ("block_n", block_n)):
        if value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}")
    if not seq_lens or min(seq_lens) < 1:
        raise ValueError(f"seq_lens must hold at least one length, each >= 1, got {list(seq_lens)}")
    tiles = [decode_tiles(seq_len, block_n) for seq_len in seq_lens]
    total = sum(tiles) * num_kv_heads
    sharers = num_sharers(tiles, num_kv_heads, num_programs, -(-min_tokens // block_n))
    parts, pair_begin = [], 0
    for sequence, (seq_len, count) in enumerate(zip(seq_lens, tiles, strict=True)):
        for head in range(num_kv_heads):
            pair_end = pair_begin + count
            programs = range(owner(pair_begin, total, sharers), owner(pair_end - 1, total, sharers) + 1)
            for program in programs:
                first = max(share_begin(program, total, sharers), pair_begin)
                stop = min(share_begin(program + 1, total, sharers), pair_end)
                begin, end = (first - pair_begin) * block_n, min((stop - pair_begin) * block_n, seq_len)
                slot = None if len(programs) == 1 else 2 * program + (first == pair_begin)
                parts.append(Part(program, sequence, head, begin, end, slot))
            pair_begin = pair_end
    return parts
