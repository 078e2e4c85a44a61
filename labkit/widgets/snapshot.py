"""A still picture of a block table as SVG, for where no JavaScript runs: GitHub, an untrusted notebook, a report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from labkit.observe import BlockTableState

from .palette import request_colour

_WIDTH, _MAX_HEIGHT, _MAX_CELL = 720, 320, 20
_BACKGROUND = 'fill="#888" fill-opacity="0.15"'


def svg_snapshot(state: BlockTableState, number_of: Callable[[str], int], summary: str) -> str:
    """Draw all blocks; ``number_of`` says which colour a request has. One path a colour keeps the file small."""
    cell = max(1, min(_MAX_CELL, int((_WIDTH * _MAX_HEIGHT / state.num_blocks) ** 0.5)))
    gap = 2 if cell >= 10 else 1 if cell >= 4 else 0
    columns = _WIDTH // cell
    rows = -(-state.num_blocks // columns)
    paths: dict[str, list[str]] = defaultdict(list)
    for block_id in range(state.num_blocks):
        view = state.block(block_id)
        x, y, size = block_id % columns * cell, block_id // columns * cell, cell - gap
        if view.request_id is None:
            paths[_BACKGROUND].append(_box(x, y, size, size))
            continue
        fill = f'fill="{request_colour(number_of(view.request_id))}"'
        if view.ref_cnt == 0:
            paths[f'{fill} fill-opacity="0.3"'].append(_box(x, y, size, size))
            continue
        filled = round(size * view.num_tokens / state.block_size)
        paths[f'{fill} fill-opacity="0.25"'].append(_box(x, y, size, size - filled))
        paths[fill].append(_box(x, y + size - filled, size, filled))
    drawn = "".join(f'<path {style} d="{"".join(boxes)}"/>' for style, boxes in sorted(paths.items()))
    width, height = columns * cell, rows * cell
    # Grey text is readable on white and on black.
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height + 22}" role="img">'
        f"<title>{summary}</title>{drawn}"
        f'<text x="0" y="{height + 16}" font-family="sans-serif" font-size="12" fill="#808080">{summary}</text></svg>'
    )


def _box(x: int, y: int, width: int, height: int) -> str:
    return f"M{x} {y}h{width}v{height}h-{width}z" if height else ""
