"""Bytes, said right: GiB is 2**30 and GB is 10**9, and a string never shows one as the other."""

from __future__ import annotations

KIB, MIB, GIB = 2**10, 2**20, 2**30
GB = 10**9


def format_bytes(num_bytes: float) -> str:
    """Binary units, two decimals: ``format_bytes(53_687_091_200)`` is ``"50.00 GiB"``."""
    return _with_unit(num_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def format_bytes_decimal(num_bytes: float) -> str:
    """Decimal units, two decimals: ``format_bytes_decimal(53_687_091_200)`` is ``"53.69 GB"``."""
    return _with_unit(num_bytes, 1000, ("B", "kB", "MB", "GB", "TB"))


def _with_unit(num_bytes: float, step: int, units: tuple[str, ...]) -> str:
    size, unit = abs(num_bytes), 0
    while unit + 1 < len(units) and round(size, 2) >= step:  # rounded first: never "1024.00 MiB"
        size, unit = size / step, unit + 1
    sign = "-" if num_bytes < 0 else ""
    return f"{sign}{size:.2f} {units[unit]}" if unit else f"{sign}{size:g} B"


def ceil_div(a: int, b: int) -> int:
    """``a / b`` rounded up, exact for integers of any size."""
    return -(-a // b)


def require_int(name: str, value: object, minimum: int) -> int:
    """Return ``value``; raises TypeError unless it is an int, ValueError if it is below ``minimum``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int >= {minimum}, got {value!r} of type {type(value).__name__}")
    if value < minimum:
        raise ValueError(f"{name} must be >= {minimum}, got {value}")
    return value
