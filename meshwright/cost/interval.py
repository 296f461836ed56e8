"""How often saving pays."""

from math import sqrt


def best_interval_s(cost_s: float, mtbf_s: float) -> float:
    """The interval that loses least to saving and to repeating: √(2 · cost · mean time between failures).

    Young (CACM 17, 1974) and, to first order, Daly (FGCS 22, 2006).
    """
    return sqrt(2.0 * cost_s * mtbf_s)
