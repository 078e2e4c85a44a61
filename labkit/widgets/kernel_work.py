"""The work list of a decode step, as the kernel makes it for itself: who reads which keys of which sequence.

The same arithmetic as in :mod:`labkit.kernels.decode`, on the host; a test holds one against the other. All (sequence,
KV head) pairs stand in one line of tiles, and each program takes an equal share of the line. Where lengths differ, each
pair begins with a tile without keys: what it takes to begin it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Part:
    """What one program reads of one (sequence, KV head) pair: keys ``begin`` to ``end`` (exclusive).

    Both are 0 for a program whose share ends with the pair's first tile where that one holds no keys.
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


def lengths_differ(tiles: Sequence[int]) -> bool:
    """Whether the longest sequence is more than a 16th above the mean."""
    return max(tiles) * len(tiles) * 16 > sum(tiles) * 17


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

    ``block_n`` keys are a tile, and no share is smaller than the tiles of ``min_tokens`` keys (:class:`DecodeTile` of
    :mod:`labkit.kernels.tuning`). Raises ValueError unless there is a sequence and all numbers are positive.
    """
    for name, value in (("num_kv_heads", num_kv_heads), ("num_programs", num_programs), ("block_n", block_n)):
        if value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}")
    if not seq_lens or min(seq_lens) < 1:
        raise ValueError(f"seq_lens must hold at least one length, each >= 1, got {list(seq_lens)}")
    tiles = [decode_tiles(seq_len, block_n) for seq_len in seq_lens]
    begin_tiles = int(lengths_differ(tiles))
    counts = [count + begin_tiles for count in tiles for _ in range(num_kv_heads)]
    total, pair_ends = sum(counts), list(accumulate(counts))
    sharers = num_sharers(counts[::num_kv_heads], num_kv_heads, num_programs, -(-min_tokens // block_n))
    borders = [share_begin(program, total, sharers) for program in range(sharers + 1)]
    parts = []
    for pair, (pair_end, count) in enumerate(zip(pair_ends, counts, strict=True)):
        sequence, head = divmod(pair, num_kv_heads)
        pair_begin = pair_end - count
        programs = range(bisect_right(borders, pair_begin) - 1, bisect_left(borders, pair_end))
        for program in programs:
            first, stop = max(borders[program], pair_begin), min(borders[program + 1], pair_end)
            begin, end = (max(at - pair_begin - begin_tiles, 0) * block_n for at in (first, stop))
            slot = None if len(programs) == 1 else 2 * program + (first == pair_begin)
            parts.append(Part(program, sequence, head, begin, min(end, seq_lens[sequence]), slot))
    return parts
