"""How much of everything a run does. Pure: the command line picks one of two scales."""

from dataclasses import dataclass, field

PAYLOAD_BYTES = 400
# Event types with a subscription each, so that the window of one subscription is not what is measured.
SUBSCRIPTIONS = 10
# webhookd's default, and so everybody's.
CONCURRENCY = 400


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
    """Counts for a round; the defaults are the full run's, 5 to 10 seconds for each contender."""

    deliveries: dict[str, int] = field(default_factory=_full_deliveries)
    warm_up: int = 2_000
    variant_deliveries: int = 20_000  # of webhookd, with and without what a measure adds
    slow_deliveries: int = 2_500  # for each instance, at endpoints that take 200 ms
    history: int = 1_000_000
    backlog: int = 1_000_000
    small_backlog: int = 1_000
    backlog_seconds: float = 20.0
    idle_events: int = 200
    latency_seconds: float = 10.0
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
    backlog=40_000,
    backlog_seconds=4.0,
    idle_events=40,
    latency_seconds=3.0,
    load_seconds=2.0,
)


def payload(number: int) -> str:
    """A JSON text of exactly PAYLOAD_BYTES, another for each number."""
    head = f'{{"number": {number}, "padding": "'
    return f'{head}{"x" * (PAYLOAD_BYTES - len(head) - 2)}"}}'
