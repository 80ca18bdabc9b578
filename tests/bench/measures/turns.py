"""The sides of a round one after the other, backwards in every other round: what drifts favours nobody."""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TypeVar

Side = TypeVar("Side")

# What a round of a measure hands on, by the names that tests/bench/rows.py knows.
Numbers = dict[str, float]


def in_order(number: int, sides: Iterable[Side]) -> list[Side]:
    """The sides, as this round has them."""
    forwards = list(sides)
    return forwards if number % 2 == 0 else forwards[::-1]


async def in_turns(number: int, sides: Mapping[str, Callable[[], Awaitable[float]]]) -> Numbers:
    """The number of each side, by its name."""
    return {name: await sides[name]() for name in in_order(number, sides)}
