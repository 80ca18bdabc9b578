"""Numbers of many rounds made into few. Pure."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Summary(NamedTuple):
    """The median of the rounds, and how far they lay apart."""

    median: float
    least: float
    most: float


def summarize(values: Sequence[float]) -> Summary:
    """Of at least one value."""
    return Summary(statistics.median(values), min(values), max(values))


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Round by round: what the two sides of one round share, such as a busy moment, is in neither."""
    return [one / other for one, other in zip(over, under, strict=True)]


def percentile(values: Sequence[float], percent: int) -> float:
    """The smallest value that so many per cent of all do not exceed (nearest rank)."""
    if not values:
        raise ValueError("there are no values")
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)  # rounded up
    return ordered[max(rank, 1) - 1]
