"""A still picture of a block pool, for where the widget cannot run: a static page, an untrusted notebook."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from .block_cells import MAX_REF_CNT, Cells, PoolSplit
from .palette import RequestStyle

WIDTH = 720
MAX_HEIGHT = 360
MAX_PITCH = 36
MAX_DRAWN_BLOCKS = 16_384
"""Larger pools get the bar only, so that a notebook does not grow by megabytes."""

_GREY = "#80808040"


@dataclass(frozen=True, slots=True)
class StillPool:
    """A pool at one moment. ``joins_runs``: neighbours that follow each other in a block table have no gap between."""

    caption: str
    cells: Cells
    split: PoolSplit
    joins_runs: bool = False

    def __str__(self) -> str:
        return f"{self.caption}: {self.split}"


def block_svg(pools: Sequence[StillPool], styles: list[RequestStyle]) -> str:
    """Pools as SVG, one below the other: a bar for the split, then one square a block, filled by its tokens."""
    body, top = [], 0
    for pool in pools:
        picture, height = _pool(pool, styles)
        body.append(f'<g transform="translate(0 {top})">{picture}</g>')
        top += height
    title = html.escape("; ".join(map(str, pools)))
    size = f'viewBox="0 0 {WIDTH} {top}" width="{WIDTH}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><title>{title}</title>{"".join(body)}</svg>'


def _pool(pool: StillPool, styles: list[RequestStyle]) -> tuple[str, int]:
    """One pool with its caption, and its height."""
    num_blocks, height, grid = pool.split.num_blocks, 24, ""
    if num_blocks <= MAX_DRAWN_BLOCKS:
        pitch, columns = _layout(num_blocks)
        grid = f'<g transform="translate(0 {height})">{_grid(pool, styles, pitch, columns)}</g>'
        height += -(-num_blocks // columns) * pitch
    text = f'<text y="{height + 16}" font-family="sans-serif" font-size="12" fill="#808080">{html.escape(str(pool))}'
    return f"{_bar(pool.split)}{grid}{text}</text>", height + 26


def _layout(num_blocks: int) -> tuple[int, int]:
    """Pitch in pixels and number of columns."""
    for pitch in range(MAX_PITCH, 1, -1):
        columns = WIDTH // pitch
        if -(-num_blocks // columns) * pitch <= MAX_HEIGHT:
            break
    return pitch, columns


def _bar(split: PoolSplit) -> str:
    size = split.block_size
    parts = [
        (split.num_live_tokens, "#0072b2"),
        (split.num_fragmented_slots, "#d55e00"),
        (split.num_cached_free_blocks * size, "#56b4e999"),
        (split.num_in_flight_blocks * size, "#cc79a7"),
        (split.num_free_blocks * size, _GREY),
    ]
    x, rects = 0.0, []
    for slots, colour in parts:
        width = WIDTH * slots / (split.num_blocks * size)
        rects.append(f'<rect x="{x:.1f}" width="{width:.1f}" height="14" fill="{colour}"/>')
        x += width
    return "".join(rects)


def _grid(pool: StillPool, styles: list[RequestStyle], pitch: int, columns: int) -> str:
    """One path a colour. A held block is outlined and filled from below; a cached one is pale; a free one grey."""
    side = pitch - 1 if pitch > 3 else pitch
    paths: dict[str, list[str]] = {}
    rows = pool.cells.tolist()
    for block_id, (request, logical, word) in enumerate(rows):
        x, y = block_id % columns * pitch, block_id // columns * pitch
        tokens, ref_cnt = word & 0xFFFF, word >> 16 & MAX_REF_CNT
        if request == 0:
            paths.setdefault(_GREY, []).append(f"M{x} {y}h{side}v{side}h-{side}z")
            continue
        fill = styles[(request - 1) % len(styles)]["fill"]
        if ref_cnt == 0:
            paths.setdefault(fill + "66", []).append(f"M{x} {y}h{side}v{side}h-{side}z")
            continue
        goes_on = pool.joins_runs and (block_id + 1) % columns and block_id + 1 < len(rows) and rows[block_id + 1]
        width = pitch if goes_on and goes_on[:2] == [request, logical + 1] else side
        paths.setdefault(fill + "40", []).append(f"M{x} {y}h{width}v{side}h-{width}z")
        height = max(1, round(side * tokens / pool.split.block_size)) if tokens else 0
        paths.setdefault(fill, []).append(f"M{x} {y + side - height}h{width}v{height}h-{width}z")
    return "".join(f'<path fill="{colour}" d="{"".join(squares)}"/>' for colour, squares in paths.items())
