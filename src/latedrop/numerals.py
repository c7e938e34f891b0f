"""Format numbers for readers: few digits, separated thousands, no long rows of zeros."""

import math
from collections.abc import Iterable
from typing import TypeGuard

__all__ = ["column", "nats", "percent", "plain"]

_DIGITS = 4
_LARGE, _SMALL = 1e9, 1e-4  # from here on, and below here, powers of ten are easier to read than zeros


def plain(value: float | None, digits: int = _DIGITS) -> str:
    """Format a number with `digits` significant digits; None gives a dash.

    >>> [plain(value) for value in (0.5, 1234567.8, 0.00001234, -31.41592, None)]
    ['0.5', '1,235,000', '1.234e-5', '-31.42', '-']
    """
    if value is None or math.isnan(value):
        return "-"
    if not math.isfinite(value):
        return "infinity" if value > 0 else "-infinity"
    if value == 0:
        return "0"
    rounded = float(f"{value:.{digits - 1}e}")
    if not _SMALL <= abs(rounded) < _LARGE:
        return _power(value, digits)
    places = max(0, digits - 1 - math.floor(math.log10(abs(rounded))))
    text = f"{rounded:,.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def column(values: Iterable[float | None], digits: int = _DIGITS) -> list[str]:
    """Format the numbers of a column with equal decimals: `digits` significant for the largest, 2 for all.

    >>> column([23.2946, 8.4, None, 25.31])
    ['23.29', '8.40', '-', '25.31']
    >>> column([1234567.5, 998.4]), column([0.0, 1.0])
    (['1,234,568', '998'], ['0', '1'])
    >>> column([577350.27, 0.31])
    ['577,400', '0.31']
    """
    listed = list(values)
    sizes = [abs(value) for value in listed if value is not None and math.isfinite(value) and value != 0]
    if not sizes:
        return [plain(value) for value in listed]
    if not _SMALL * 100 <= max(sizes) < _LARGE:
        return [_power(value, digits, cut=False) if _is_finite(value) else plain(value) for value in listed]
    if all(size == int(size) for size in sizes):
        return [f"{value:,.0f}" if _is_finite(value) else plain(value) for value in listed]
    first, last = (math.floor(math.log10(size)) for size in (max(sizes), min(sizes)))
    if first - last > digits:  # with one number of decimals the small ones would be 0
        return [plain(value, digits) for value in listed]
    places = max(0, digits - 1 - first, min(1 - last, digits + 1 - first))
    return [f"{_unsigned(value, places):,.{places}f}" if _is_finite(value) else plain(value) for value in listed]


def percent(share: float | None, places: int = 1) -> str:
    """Format a share in percent; None gives a dash.

    >>> percent(0.1234), percent(0.9, 0)
    ('12.3 %', '90 %')
    """
    return "-" if share is None else f"{_unsigned(100 * share, places):.{places}f} %"


def nats(value: float) -> str:
    """Format a size in nats, or another score, with three decimals; fewer if it is large.

    >>> nats(0.0123), nats(31873.477)
    ('0.012', '31,870')
    """
    return f"{_unsigned(value, 3):.3f}" if abs(value) < 100 else plain(value)


def _is_finite(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def _power(value: float, digits: int, *, cut: bool = True) -> str:
    mantissa, _, power = f"{value:.{digits - 1}e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.') if cut or not value else mantissa}{f'e{int(power)}' if value else ''}"


def _unsigned(value: float, places: int) -> float:
    """Remove the minus sign of a number that was rounded to 0."""
    return 0.0 if abs(value) < 0.5 * 10**-places else value
