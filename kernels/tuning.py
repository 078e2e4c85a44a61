"""Tile sizes per GPU generation: one table, read once a launch. `labkit bench kernels --tune` measures a new one.

Nothing is searched at import or at the first call. A GPU that is not listed takes the newest row not newer than itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """block_m: query rows of a tile; 1 = no tensor cores (MHA only). block_n: keys of a tile.

    programs_per_sm: the launch has this many programs a multiprocessor, each with an equal share of all tiles.
    min_tokens: no share is smaller than this many keys, so that short work is not cut into crumbs.
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


# (largest padded head size, tile); the first row that fits is taken. 16-bit KV.
DECODE_MHA = {
    80: [(64, DecodeTile(1, 32, 4, 3, 16, 128)), (128, DecodeTile(1, 32, 4, 3, 16, 128)), (256, DecodeTile(1, 16, 4, 3, 8, 128))],
    89: [(64, DecodeTile(1, 32, 4, 3, 16, 128)), (128, DecodeTile(1, 32, 4, 3, 16, 128)), (256, DecodeTile(1, 16, 4, 2, 8, 128))],
    90: [(64, DecodeTile(1, 32, 4, 3, 16, 128)), (128, DecodeTile(1, 32, 4, 3, 16, 128)), (256, DecodeTile(1, 16, 4, 3, 8, 128))],
    100: [(64, DecodeTile(1, 32, 4, 3, 16, 128)), (128, DecodeTile(1, 32, 4, 3, 16, 128)), (256, DecodeTile(1, 16, 4, 3, 8, 128))],
}  # fmt: skip
DECODE_GQA = {
    80: [(64, DecodeTile(16, 64, 2, 3, 8, 256)), (128, DecodeTile(16, 64, 2, 3, 8, 256)), (256, DecodeTile(16, 32, 4, 2, 4, 256))],
    89: [(64, DecodeTile(16, 64, 2, 3, 8, 256)), (128, DecodeTile(16, 32, 2, 3, 8, 256)), (256, DecodeTile(16, 32, 4, 2, 4, 256))],
    90: [(64, DecodeTile(16, 64, 2, 3, 8, 256)), (128, DecodeTile(16, 64, 2, 3, 8, 256)), (256, DecodeTile(16, 32, 4, 2, 4, 256))],
    100: [(64, DecodeTile(16, 64, 2, 3, 8, 256)), (128, DecodeTile(16, 64, 2, 3, 8, 256)), (256, DecodeTile(16, 32, 4, 2, 4, 256))],
}  # fmt: skip
PREFILL = {
    80: [(64, PrefillTile(128, 64, 4, 3)), (128, PrefillTile(128, 64, 8, 2)), (256, PrefillTile(64, 32, 4, 2))],
    89: [(64, PrefillTile(128, 64, 4, 2)), (128, PrefillTile(128, 32, 8, 2)), (256, PrefillTile(64, 32, 4, 1))],
    90: [(64, PrefillTile(128, 128, 8, 2)), (128, PrefillTile(128, 64, 8, 2)), (256, PrefillTile(64, 64, 4, 2))],
    100: [(64, PrefillTile(128, 128, 8, 2)), (128, PrefillTile(128, 64, 8, 2)), (256, PrefillTile(64, 64, 4, 2))],
}


def generation(capability: int) -> int:
    """The row of the tables for a compute capability such as 90 (= 9.0): the newest one not newer than it."""
    known = [row for row in PREFILL if row <= capability]
    if not known:
        raise ValueError(f"compute capability {capability / 10:.1f} is not supported: 8.0 or newer is needed")
    return max(known)


def decode_tile(capability: int, group: int, padded_head_dim: int, element_size: int = 2) -> DecodeTile:
    """Tile of the decode kernel; group = query heads a KV head. 4-byte KV halves block_n to keep the shared memory."""
    if group == 1:
        tile = _lookup(DECODE_MHA[generation(capability)], padded_head_dim)
    else:
        tile = _lookup(DECODE_GQA[generation(capability)], padded_head_dim)
    block_m = 1 if group == 1 and tile.block_m == 1 else max(tile.block_m, 1 << (group - 1).bit_length())
    block_n = max(16, tile.block_n * 2 // max(2, element_size))
    return replace(tile, block_m=block_m, block_n=block_n)


def prefill_tile(capability: int, group: int, padded_head_dim: int, element_size: int = 2) -> PrefillTile:
    """Tile of the prefill kernel, with at least one token's group of query heads in block_m."""
    tile = _lookup(PREFILL[generation(capability)], padded_head_dim)
    block_m = max(tile.block_m, 1 << (group - 1).bit_length())
    if element_size > 2:  # float32 is for tests: small tiles, no tensor cores
        return PrefillTile(max(32, 1 << (group - 1).bit_length()), 32, 4, 1)
    return replace(tile, block_m=block_m)


def _lookup(rows, padded_head_dim: int):
    for largest, tile in rows:
        if padded_head_dim <= largest:
            return tile
    raise ValueError(f"head size {padded_head_dim} is not supported: at most {rows[-1][0]}")
