"""How much a run does, and the order of its rounds. Pure: the command line picks one of two scales."""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

# Event types with one subscription each, so that the window of one subscription does not limit the rate.
SUBSCRIPTIONS = 10
# The default of webhookd, used for every contender.
CONCURRENCY = 400
# Deliveries per second of the measure `paced`.
PACED_RATE = 350
# The same of the measure `live`. The first is nearly idle.
LIVE_RATES = (1, 50)
# What a contender says when all work of a request is committed.
COMMITTED = "committed"

Side = TypeVar("Side")

# The numbers of one round of a measure, by the names that tests/bench/rows.py uses.
Numbers = dict[str, float]


def _full_deliveries() -> dict[str, int]:
    return {
        "bare": 30_000,
        "webhookd": 20_000,
        "pgqueuer": 20_000,
        "procrastinate": 2_000,
        "graphile": 40_000,
        "graphile https": 25_000,
    }


@dataclass(frozen=True)
class Scale:
    """Counts per round. The defaults are those of a full run: 5 to 10 seconds for each contender."""

    deliveries: dict[str, int] = field(default_factory=_full_deliveries)
    warm_up: int = 2_000
    variant_deliveries: int = 20_000  # of webhookd, with and without the condition of a measure
    slow_deliveries: int = 2_500  # per instance, to endpoints that take 200 ms
    history: int = 1_000_000
    sweep_history: int = 500_000
    backlog: int = 1_000_000
    small_backlog: int = 1_000
    backlog_seconds: float = 20.0
    idle_events: int = 200
    latency_seconds: float = 10.0
    paced_seconds: float = 15.0
    load_seconds: float = 6.0
    fan_out: int = 1_000


QUICK = Scale(
    deliveries={
        "bare": 5_000,
        "webhookd": 4_000,
        "pgqueuer": 3_000,
        "procrastinate": 300,
        "graphile": 5_000,
        "graphile https": 5_000,
    },
    warm_up=500,
    variant_deliveries=4_000,
    slow_deliveries=800,
    history=40_000,
    sweep_history=300_000,
    backlog=40_000,
    backlog_seconds=4.0,
    idle_events=40,
    latency_seconds=3.0,
    paced_seconds=3.0,
    load_seconds=2.0,
)


def alternate(number: int, sides: Iterable[Side]) -> list[Side]:
    """Reverse the order of the sides in every second round, so that drift favours none of them."""
    forwards = list(sides)
    return forwards if number % 2 == 0 else forwards[::-1]


async def measure_sides(number: int, sides: Mapping[str, Callable[[], Awaitable[float]]]) -> Numbers:
    """Measure the sides of a round in alternating order. Returns the number of each by its name."""
    return {name: await sides[name]() for name in alternate(number, sides)}
