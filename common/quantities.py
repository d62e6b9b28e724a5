"""Write counts, durations and sizes of memory; a GB has 10^9 bytes, as in datasheets (docs/parallelism.md)."""

from __future__ import annotations

GIGA = 1e9
UNITS = {"day": 86_400.0, "hour": 3600.0, "minute": 60.0}  # in seconds


def counted(number: float, noun: str) -> str:
    """Write a number of things: `1 step`, `1,200 steps`."""
    if number == 1:
        return f"{number:,} {noun}"
    return f"{number:,} {noun}{'es' if noun.endswith(('s', 'batch')) else 's'}"


def duration(seconds: float) -> str:
    """Write a time with three digits, in a unit that suits it: `4.2 ms`, `17.3 s`, `1 minute`, `2.5 days`."""
    for noun, size in UNITS.items():
        if seconds >= size:
            digits = _digits(seconds / size)
            return f"{digits} {noun}" if digits == "1" else f"{digits} {noun}s"
    return f"{_digits(seconds)} s" if seconds >= 1 else f"{_digits(1000 * seconds)} ms"


def gigabytes(size: float) -> str:
    """Write a number of bytes: `32.99 GB`, `0.0042 GB`."""
    return f"{size / GIGA:.{2 if size >= GIGA / 100 else 4}f} GB"


def _digits(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
