"""Numbers as people read them: thousands, counts, durations."""

import math

_SUFFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_COUNT_SUFFIXES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))


def short(value: float) -> str:
    """A number in few characters: 950, 12.5k, 3.2M, 0.0123, 3e-4."""
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else "∞" if value > 0 else "−∞"
    size = abs(value)
    for unit, suffix in _SUFFIXES:
        if size >= unit * 0.99995:
            return f"{_trimmed(value / unit, 4)}{suffix}"
    if 0 < size < 1e-2:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{_trimmed(float(mantissa), 3)}e{int(exponent)}"
    return _trimmed(value, 4)


def exact(value: float) -> str:
    """A setting as it was given, without binary rounding noise: 10,000, 0.1, 1e-5."""
    if not math.isfinite(value) or abs(value) >= 1e9:
        return short(value)
    if value == int(value):
        return f"{value:,.0f}"
    return f"{value:.8g}".replace("e-0", "e-")


def count(value: float) -> str:
    """A number of parameters or tokens as people write it: 22.1M, 1.24B."""
    if abs(value) >= 1e15:
        return short(value)
    for unit, suffix in _COUNT_SUFFIXES:
        if abs(value) >= 0.9995 * unit:
            return f"{value / unit:.3g}{suffix}"
    return f"{value:,.0f}"


def duration(seconds: float) -> str:
    """Seconds in the two largest units that matter: 2 h 05 min, 3 min 20 s, 4.2 s."""
    if not math.isfinite(seconds):
        return "—"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02d} min"
    days, hours = divmod(hours, 24)
    return f"{days:,} d {hours:02d} h" if days < 1e6 else f"{short(days)} d"


def _trimmed(value: float, digits: int) -> str:
    text = f"{value:.{digits}g}"
    return text if "e" not in text or abs(value) >= 1e15 else f"{value:.0f}"
