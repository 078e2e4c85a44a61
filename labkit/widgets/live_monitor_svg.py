"""What the bars of a live monitor show, and a still picture of them."""

from __future__ import annotations

import html
from collections.abc import Mapping

from labkit.kv_math import format_bytes

# Title and parts of each bar, a part as (name in MemorySnapshot, label, colour). Colours as in labkit.figures.
BARS = (
    (
        "device memory",
        [
            ("weights", "weights", "#009e73"),
            ("kv_pool", "KV pool", "#0072b2"),
            ("graphs", "CUDA graphs", "#f0e442"),
            ("activations", "activations", "#e69f00"),
            ("allocator_reserve", "allocator reserve", "#cc79a7"),
            ("process_other", "this process, other", "#999999"),
            ("other_processes", "other processes", "#666666"),
            ("free", "free", "#80808040"),
        ],
    ),
    (
        "KV pool",
        [
            ("kv_live", "live tokens", "#0072b2"),
            ("kv_fragmentation", "fragmentation", "#d55e00"),
            ("kv_in_flight", "swap in flight", "#a6761d"),
            ("kv_cached", "cached", "#56b4e9"),
            ("kv_tails", "unquantised tails", "#cc79a7"),
            ("kv_free", "free", "#80808040"),
        ],
    ),
)
WIDTH, ROW = 720, 58


def live_monitor_svg(parts: Mapping[str, int], caption: str) -> str:
    """Both bars with the size of each part above 0 bytes."""
    rows = [
        _row(title, [(label, parts.get(name, 0), colour) for name, label, colour in shown], number * ROW)
        for number, (title, shown) in enumerate(BARS)
    ]
    height = len(BARS) * ROW
    text = html.escape(caption)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height + 18}" width="{WIDTH}" role="img" '
        f'font-family="sans-serif" font-size="11" fill="#808080"><title>{text}</title>{"".join(rows)}'
        f'<text y="{height + 12}">{text}</text></svg>'
    )


def _row(title: str, parts: list[tuple[str, int, str]], top: int) -> str:
    total = max(1, sum(size for _, size, _ in parts))
    x, rects = 0.0, []
    for label, size, colour in parts:
        width = WIDTH * size / total
        tip = f"<title>{label} {format_bytes(size)}</title>"
        rects.append(f'<rect x="{x:.1f}" y="{top + 16}" width="{width:.1f}" height="16" fill="{colour}">{tip}</rect>')
        x += width
    sizes = " · ".join(f"{label} {format_bytes(size)}" for label, size, _ in parts if size)
    return f'<text y="{top + 11}">{title}</text>{"".join(rects)}<text y="{top + 46}" font-size="9">{sizes}</text>'
