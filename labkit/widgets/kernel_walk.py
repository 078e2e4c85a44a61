"""One decode step as the kernel divides it: which program reads which block."""

from __future__ import annotations

from html import escape
from typing import Any

import ipywidgets as widgets

from .kernel_work import Part, work_list
from .palette import RequestStyle, request_styles

_WIDTH, _LEFT, _ROW, _HEAD = 900, 150, 22, 18
_ALL = -1
_GREY = "#808080"


class KernelWalk(widgets.VBox):
    """Sliders for the number of programs and for one of them, above the blocks of every sequence and KV head.

    ::

        KernelWalk(block_table, seq_lens, num_kv_heads=2)

    A row is a (sequence, KV head) pair, a cell a block with its id, coloured by the program that reads it; a cell that
    two programs share has both colours. ``parts`` is the work list that is shown.
    """

    parts: list[Part]

    def __init__(
        self,
        block_table: Any,
        seq_lens: Any,
        num_kv_heads: int,
        *,
        block_size: int = 16,
        block_n: int = 16,
        min_tokens: int = 32,
        num_programs: int = 6,
    ) -> None:
        """``block_table`` [num_seqs, max_blocks] and ``seq_lens`` [num_seqs]: lists or tensors of whole numbers.

        ``block_n`` keys are a tile, the least that is handed out; no share is below the tiles of ``min_tokens`` keys.
        Raises ValueError for numbers that are not positive.
        """
        self._table = [[int(block) for block in row] for row in block_table]
        self._lengths = [int(length) for length in seq_lens]
        self._heads, self._block_size, self._tile = num_kv_heads, block_size, (block_n, min_tokens)
        self.parts = self._divided(num_programs)
        wide: dict[str, Any] = dict(style={"description_width": "110px"}, layout=widgets.Layout(width="460px"))
        everyone = sum(-(-length // block_n) + 1 for length in self._lengths) * num_kv_heads  # a tile each
        most = max(1 + max(part.program for part in self._divided(everyone)), num_programs)
        self.num_programs: Any = widgets.IntSlider(num_programs, 1, most, description="programs", **wide)
        self.program: Any = widgets.Dropdown(description="show", **wide)
        self.picture = widgets.HTML()
        self.words = widgets.HTML()
        self.num_programs.observe(lambda _: self._divide(), "value")
        self.program.observe(lambda _: self._draw(), "value")
        super().__init__([self.num_programs, self.program, self.picture, self.words])
        self._divide()

    def _divided(self, num_programs: int) -> list[Part]:
        block_n, min_tokens = self._tile
        return work_list(self._lengths, self._heads, num_programs, block_n=block_n, min_tokens=min_tokens)

    def _divide(self) -> None:
        self.parts = self._divided(self.num_programs.value)
        chosen, used = self.program.value, self._num_used
        self.program.options = [("all programs", _ALL), *((f"program {p}", p) for p in range(used))]
        self.program.value = chosen if chosen is not None and chosen < used else _ALL
        self._draw()

    def _draw(self) -> None:
        self.picture.value = self.to_svg()
        self.words.value = f"<div style='line-height:1.5'>{escape(self._said())}</div>"

    @property
    def _num_used(self) -> int:
        return max(part.program for part in self.parts) + 1

    def _said(self) -> str:
        """What is shown, in words."""
        if self.program.value not in (None, _ALL):
            own = [part for part in self.parts if part.program == self.program.value]
            return f"program {self.program.value} reads " + "; ".join(map(self._part_in_words, own))
        keys = [sum(p.end - p.begin for p in self.parts if p.program == i) for i in range(self._num_used)]
        cut = {(part.sequence, part.head) for part in self.parts if part.slot is not None}
        merged = sum(part.slot is not None for part in self.parts)
        used = f"{self._num_used} of {self.num_programs.value} programs have work"
        cuts = f"{len(cut)} of {len(self._lengths) * self._heads} pairs are cut, {merged} parts to merge"
        return f"{used}: {min(keys)} to {max(keys)} keys each; {cuts}"

    def _part_in_words(self, part: Part) -> str:
        blocks = self._table[part.sequence][part.begin // self._block_size : -(-part.end // self._block_size)]
        keys = f"keys {part.begin} to {part.end - 1} (blocks {' '.join(map(str, blocks))})" if blocks else "no keys yet"
        left = "whole" if part.slot is None else f"a part, left in slot {part.slot}"
        return f"sequence {part.sequence}, head {part.head}, {keys}: {left}"

    def to_svg(self) -> str:
        """The picture as it is now."""
        scale = (_WIDTH - _LEFT) / (-(-max(self._lengths) // self._block_size) * self._block_size)
        styles, shapes = request_styles(), []
        for part in self.parts:
            x, y, width = (
                _LEFT + part.begin * scale,
                self._top(part.sequence, part.head),
                (part.end - part.begin) * scale,
            )
            shown = self.program.value in (None, _ALL, part.program)
            title = f"<title>{escape(f'program {part.program}: {self._part_in_words(part)}')}</title>"
            box = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_ROW - 4}"'
            shapes.append(f"<g>{title}{_filled(box, styles[part.program % len(styles)], 1 if shown else 0.15)}</g>")
        for sequence, length in enumerate(self._lengths):
            for head in range(self._heads):
                shapes.append(self._grid(sequence, head, length, scale))
        height = self._top(len(self._lengths), 0)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
            f'style="width:100%;max-width:{_WIDTH}px" font-family="sans-serif" font-size="11">'
            f"<title>{escape(self._said())}</title>{''.join(shapes)}</svg>"
        )

    def _top(self, sequence: int, head: int) -> int:
        return 4 + sequence * (self._heads * _ROW + 8) + head * _ROW

    def _grid(self, sequence: int, head: int, length: int, scale: float) -> str:
        """Borders and ids of the blocks of one pair, and its name."""
        y, size = self._top(sequence, head), self._block_size
        name = f'<text x="0" y="{y + 13}" fill="{_GREY}">sequence {sequence}, KV head {head}</text>'
        cells = []
        for index in range(-(-length // size)):
            x, width = _LEFT + index * size * scale, size * scale
            box = f'x="{x:.1f}" y="{y}" width="{width - 1:.1f}" height="{_ROW - 4}" fill="none" stroke="{_GREY}"'
            cells.append(f"<rect {box}/>")
            if width >= _HEAD:
                place = f'x="{x + width / 2:.1f}" y="{y + 13}" text-anchor="middle" fill="#000"'
                halo = 'stroke="#fff" stroke-width="3" paint-order="stroke"'
                cells.append(f'<text {place} {halo} pointer-events="none">{self._table[sequence][index]}</text>')
        return name + "".join(cells)

    def __repr__(self) -> str:
        return f"KernelWalk({self._said()})"

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        bundle = super()._repr_mimebundle_(**kwargs)
        return bundle and bundle | {"text/plain": repr(self), "image/svg+xml": self.to_svg()}


def _filled(box: str, style: RequestStyle, opacity: float) -> str:
    """A rectangle in a program's style; a hatched style gets a dashed border."""
    shape = f'<rect {box} fill="{style["fill"]}" opacity="{opacity}"/>'
    if style["hatch"]:
        stripes = f'stroke="{style["hatch"]}" stroke-width="2" stroke-dasharray="3 3"'
        shape += f'<rect {box} fill="none" {stripes} opacity="{opacity}"/>'
    return shape
