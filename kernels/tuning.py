"""Tile sizes per GPU generation: one table, read once a launch. `labkit bench kernels --tune` measures a new one.

Nothing is searched at import or at the first call. A GPU that is not listed takes the newest row not newer than itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """block_m: query rows of a tile. block_n: keys of a tile.

    programs_per_sm: programs that run side by side on a multiprocessor (see decode_programs).
    min_tokens: no share is smaller than the tiles of this many keys, so that short work is not cut into crumbs.
    max_registers: cap on registers a thread, so that more programs share a multiprocessor; None lets ptxas choose.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    min_tokens: int
    max_registers: int | None = None


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """block_m: query rows of a tile (tokens x heads of a group). block_n: keys of a tile. max_registers: as above."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


@dataclass(frozen=True, slots=True)
class WriteTile:
    """How `write_quantised_kv` cuts its work.

    token_numbers: of K, and as many of V, that a program quantises where each token is quantised alone.
    num_warps: of those programs, where there are no others.
    block_numbers: that a thread takes of one head of a block quantised as a whole; gives such programs their warps.
    block_parts: programs that share the channels of such a block, at most; what shares a scale stays together.
    block_vector: channels side by side of those, or pairs of them (quantise_pairs.py); few of them leave a thread more
        tokens, and less to exchange.
    block_registers: cap on registers a thread where there are such blocks.
    """

    token_numbers: int
    num_warps: int
    block_numbers: int
    block_vector: int
    block_registers: int | None = None
    block_parts: int = 1


ANY = 1 << 30
MANY_PAIRS = 16  # a multiprocessor: about four programs in turn for each of the four that fit side by side

# 16-bit KV. Rows (query heads a KV head <=, head size <=, (sequence, KV head) pairs a multiprocessor <=, tile); the
# first row that fits is taken. Few pairs must be split over many programs, many pairs keep them busy as they are.
DECODE = {
    80: [
        (ANY, 64, ANY, DecodeTile(16, 64, 4, 3, 4, 256)),
        (ANY, 128, ANY, DecodeTile(16, 64, 4, 3, 4, 256)),
        (ANY, 256, ANY, DecodeTile(16, 32, 4, 3, 4, 256)),
    ],
    89: [
        (ANY, 64, ANY, DecodeTile(16, 64, 4, 3, 4, 256)),
        (ANY, 128, ANY, DecodeTile(16, 32, 4, 3, 4, 256)),
        (ANY, 256, ANY, DecodeTile(16, 16, 4, 3, 4, 256)),
    ],
    90: [
        (ANY, 64, ANY, DecodeTile(16, 32, 1, 5, 6, 256)),
        (1, 128, 4, DecodeTile(16, 64, 2, 5, 2, 256)),
        (1, 128, 8, DecodeTile(16, 32, 2, 5, 8, 256)),
        (1, 128, ANY, DecodeTile(16, 64, 2, 5, 32, 256)),
        (16, 128, 0.25, DecodeTile(16, 128, 4, 5, 1, 128)),
        (16, 128, 2, DecodeTile(16, 64, 2, 5, 2, 128)),
        (16, 128, ANY, DecodeTile(16, 64, 2, 3, 4, 256)),
        (ANY, 128, 0.5, DecodeTile(32, 128, 4, 5, 1, 128)),
        (ANY, 128, ANY, DecodeTile(32, 64, 4, 5, 2, 256)),
        (ANY, 192, ANY, DecodeTile(16, 32, 2, 3, 6, 256)),
        (ANY, 256, ANY, DecodeTile(16, 64, 4, 3, 2, 256)),
    ],
}
DECODE[100] = [  # compiled, never measured; the largest tile spills without a cap
    (ANY, 64, ANY, DecodeTile(16, 64, 2, 3, 6, 256)),
    *(
        (group, dim, pairs, replace(tile, max_registers=224) if tile.block_m * tile.block_n > 2048 else tile)
        for group, dim, pairs, tile in DECODE[90][1:]
    ),
]

# Quantised KV. Rows (K in int4, query heads a KV head <=, head size <=, tile). block_m 8: keys are the wide side of the
# product (decode_quantised.py). One warp a program: nothing to wait for but memory; the more programs, the better. int4
# on 90: capped, 12 programs of MHA share a multiprocessor, as they do uncapped with GQA; 6 % faster than 8 of them.
QUANTISED_DECODE = {
    80: [
        (False, ANY, 128, DecodeTile(8, 64, 4, 3, 3, 256)),
        (True, ANY, 128, DecodeTile(8, 32, 2, 3, 4, 256)),
        (False, ANY, 256, DecodeTile(8, 32, 4, 2, 2, 256, 192)),
        (True, ANY, 256, DecodeTile(8, 32, 4, 2, 2, 256, 192)),
    ],
    90: [
        (False, ANY, 128, DecodeTile(8, 32, 1, 3, 8, 256)),
        (True, 1, 128, DecodeTile(8, 32, 1, 2, 12, 256, 168)),
        (True, ANY, 128, DecodeTile(8, 32, 1, 2, 12, 256)),
        (False, ANY, 256, DecodeTile(8, 32, 4, 2, 2, 256)),
        (True, ANY, 256, DecodeTile(8, 32, 4, 2, 2, 256)),
    ],
}
QUANTISED_DECODE[89] = QUANTISED_DECODE[80]  # 89 and 100: compiled, never measured
QUANTISED_DECODE[100] = [(False, ANY, 128, DecodeTile(8, 64, 4, 3, 2, 256, 192)), *QUANTISED_DECODE[80][1:]]

# As timed on 90 (data/results/h200/tiles_quantised.json). Tokens alone: four warps cost a prefill 2 % at most and save
# one token a sequence 8 to 11 %. Blocks: two parts are 4 % faster than one for a prefill, 1 % slower for one token a
# sequence; 80 registers are 2 % faster than 96, and 72 would be 2 % faster still, but Triton 3.7 spills then.
QUANTISED_WRITE = WriteTile(2048, 4, 64, 2, 80, 2)
QUANTISED_WRITE_BY_ONE = replace(QUANTISED_WRITE, block_registers=104)  # no pairs: float32, symmetric; fewer spill

# Rows (head size <=, tile).
PREFILL = {
    80: [(64, PrefillTile(128, 64, 4, 3)), (128, PrefillTile(128, 64, 8, 2)), (256, PrefillTile(64, 32, 4, 2))],
    89: [(64, PrefillTile(128, 64, 4, 2)), (128, PrefillTile(128, 32, 8, 2)), (256, PrefillTile(64, 32, 4, 1))],
    90: [
        (64, PrefillTile(128, 128, 8, 3, 128)),
        (128, PrefillTile(128, 64, 8, 3, 128)),
        (256, PrefillTile(128, 64, 8, 2)),
    ],
}
PREFILL[100] = PREFILL[90]


def generation(capability: int) -> int:
    """The row of the tables for a compute capability such as 90 (= 9.0): the newest one not newer than it."""
    known = [row for row in PREFILL if row <= capability]
    if not known:
        raise ValueError(f"compute capability {capability / 10:.1f} is not supported: 8.0 or newer is needed")
    return max(known)


def decode_tile(
    capability: int, group: int, head_dim: int, pairs_per_sm: float = 0, element_size: int = 2
) -> DecodeTile:
    """Tile of the decode kernel; group = query heads a KV head. 4-byte KV halves block_n to keep the shared memory."""
    _check_head_dim(head_dim)
    tile = next(
        tile
        for most_group, most_dim, most_pairs, tile in DECODE[generation(capability)]
        if group <= most_group and head_dim <= most_dim and pairs_per_sm <= most_pairs
    )
    block_m = max(tile.block_m, 1 << (group - 1).bit_length())
    return replace(tile, block_m=block_m, block_n=max(16, tile.block_n * 2 // max(2, element_size)))


def quantised_decode_tile(capability: int, int4: bool, group: int, head_dim: int) -> DecodeTile:
    """Tile of the decode kernel over quantised pages; int4: K's format."""
    _check_head_dim(head_dim)
    rows = QUANTISED_DECODE[generation(capability)]
    tile = next(
        tile
        for of_int4, most_group, most_dim, tile in rows
        if of_int4 == int4 and group <= most_group and head_dim <= most_dim
    )
    return replace(tile, block_m=max(tile.block_m, 1 << (group - 1).bit_length()))


def decode_programs(pairs: int, programs_per_sm: int, num_sms: int) -> int:
    """Programs of a decode launch over `pairs` (sequence, KV head) pairs.

    Few pairs: programs_per_sm a multiprocessor, rounded to a multiple of the pairs where that costs little, so that
    sequences of equal length are cut alike. Very many pairs: one program a pair, handed out as others end. In between,
    one a pair would leave most of the GPU idle during a last, partial wave: equal shares again.
    """
    resident = programs_per_sm * num_sms
    if pairs >= max(resident, MANY_PAIRS * num_sms):
        return pairs
    if pairs > resident:
        return resident
    whole = resident // pairs * pairs
    return whole if whole * 10 >= resident * 9 else resident


def prefill_tile(capability: int, group: int, head_dim: int, element_size: int = 2) -> PrefillTile:
    """Tile of the prefill kernel, with at least one token's group of query heads in block_m."""
    _check_head_dim(head_dim)
    packed = 1 << (group - 1).bit_length()
    if element_size > 2:  # float32 is for tests: small tiles, no tensor cores
        return PrefillTile(max(32, packed), 32, 4, 1)
    tile = next(tile for most_dim, tile in PREFILL[generation(capability)] if head_dim <= most_dim)
    return replace(tile, block_m=max(tile.block_m, packed))


def _check_head_dim(head_dim: int) -> None:
    if head_dim > 256:
        raise ValueError(f"head sizes up to 256 are supported, got {head_dim}")
