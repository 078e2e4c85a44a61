"""A still picture of a block pool, for where the widget cannot run: a static page, an untrusted notebook."""

from __future__ import annotations

import html

from .block_cells import MAX_REF_CNT, Cells, PoolSplit
from .palette import RequestStyle

WIDTH = 720
MAX_HEIGHT = 360
MAX_PITCH = 36
MAX_DRAWN_BLOCKS = 16_384
"""Larger pools get the bar only, so that a notebook does not grow by megabytes."""

_GREY = "#80808040"


def block_svg(cells: Cells, split: PoolSplit, styles: list[RequestStyle], title: str) -> str:
    """The pool as SVG: a bar for the split, then one square a block, coloured by request and filled by tokens."""
    body = [_bar(split)]
    height = 24
    if split.num_blocks <= MAX_DRAWN_BLOCKS:
        pitch, columns = _layout(split.num_blocks)
        body.append(f'<g transform="translate(0 {height})">{_grid(cells, split, styles, pitch, columns)}</g>')
        height += -(-split.num_blocks // columns) * pitch
    caption = html.escape(f"{title}: {split}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height + 22}" width="{WIDTH}" role="img">'
        f"<title>{caption}</title>{''.join(body)}"
        f'<text y="{height + 16}" font-family="sans-serif" font-size="12" fill="#808080">{caption}</text></svg>'
    )


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


def _grid(cells: Cells, split: PoolSplit, styles: list[RequestStyle], pitch: int, columns: int) -> str:
    """One path a colour. A held block is outlined and filled from below; a cached one is pale; a free one grey."""
    side = pitch - 1 if pitch > 3 else pitch
    paths: dict[str, list[str]] = {}
    for block_id, (request, _, word) in enumerate(cells.tolist()):
        x, y = block_id % columns * pitch, block_id // columns * pitch
        tokens, ref_cnt = word & 0xFFFF, word >> 16 & MAX_REF_CNT
        if request == 0:
            paths.setdefault(_GREY, []).append(f"M{x} {y}h{side}v{side}h-{side}z")
            continue
        fill = styles[(request - 1) % len(styles)]["fill"]
        if ref_cnt == 0:
            paths.setdefault(fill + "66", []).append(f"M{x} {y}h{side}v{side}h-{side}z")
            continue
        paths.setdefault(fill + "40", []).append(f"M{x} {y}h{side}v{side}h-{side}z")
        height = max(1, round(side * tokens / split.block_size)) if tokens else 0
        paths.setdefault(fill, []).append(f"M{x} {y + side - height}h{side}v{height}h-{side}z")
    return "".join(f'<path fill="{colour}" d="{"".join(squares)}"/>' for colour, squares in paths.items())
