"""Colours of requests: the Okabe-Ito palette, which colour-blind readers can tell apart, in four variants."""

from __future__ import annotations

from typing import TypedDict

# Okabe and Ito, "Color Universal Design" (2008), without black.
OKABE_ITO = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442")


class RequestStyle(TypedDict):
    """``fill`` colours a block; ``hatch`` is the colour of diagonal lines on it, empty for none. Both #rrggbb."""

    fill: str
    hatch: str


def request_styles() -> list[RequestStyle]:
    """Styles by request number (modulo their count): plain, hatched, light, and light hatched versions of each hue."""
    plain = [RequestStyle(fill=hue, hatch="") for hue in OKABE_ITO]
    hatched = [RequestStyle(fill=hue, hatch=_mixed(hue, "#000000", 0.5)) for hue in OKABE_ITO]
    light = [RequestStyle(fill=_mixed(hue, "#ffffff", 0.5), hatch="") for hue in OKABE_ITO]
    light_hatched = [RequestStyle(fill=_mixed(hue, "#ffffff", 0.5), hatch=hue) for hue in OKABE_ITO]
    return plain + hatched + light + light_hatched


def _mixed(colour: str, other: str, share: float) -> str:
    """``colour`` with ``share`` of ``other`` in it."""
    channels = [(int(colour[i : i + 2], 16), int(other[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in channels)
