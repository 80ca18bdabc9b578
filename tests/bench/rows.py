"""What the numbers of a run mean: the rows of its table, with the goals of issue 5. Pure.

A row is a number of each round, or the ratio of two of them; a goal is a bound of its median.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tests.bench.summary import Summary, ratios, summarize


class Unit(NamedTuple):
    """How a number is shown."""

    name: str
    factor: float = 1.0
    digits: int = 0


RATE = Unit("/s")
RATIO = Unit("", digits=2)
COUNT = Unit("", digits=3)
MICROSECONDS = Unit("µs", 1e6)
MILLISECONDS = Unit("ms", digits=1)
SECONDS = Unit("s", digits=3)
KILOBYTES = Unit("kB", 1e-3, 2)
MEGABYTES = Unit("MB", 1e-6)


class Goal(NamedTuple):
    """A bound, in the row's unit."""

    bound: float
    at_least: bool

    def is_met(self, value: float) -> bool:
        return value >= self.bound if self.at_least else value <= self.bound

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.bound:g}"


def at_least(bound: float) -> Goal:
    """More is better."""
    return Goal(bound, at_least=True)


def at_most(bound: float) -> Goal:
    """Less is better."""
    return Goal(bound, at_least=False)


@dataclass(frozen=True)
class Row:
    """One line of the table, before there are numbers."""

    label: str
    over: str
    unit: Unit
    under: str | None = None
    goal: Goal | None = None


class Line(NamedTuple):
    """One line of the table: its median and spread, or a note why there are none."""

    label: str
    unit: Unit
    summary: Summary | None
    goal: Goal | None
    note: str

    @property
    def verdict(self) -> str:
        """Whether the goal is met; why it is not known."""
        if self.summary is None:
            return self.note
        if self.goal is None:
            return ""
        return "met" if self.goal.is_met(self.summary.median) else "missed"


ROWS: dict[str, tuple[Row, ...]] = {
    "throughput": (
        Row("bare aiohttp + uvloop loop, no database", "bare", RATE),
        Row("webhookd, commit to Completed", "webhookd", RATE),
        Row("graphile-worker, undici", "graphile", RATE),
        Row("graphile-worker, node:https", "graphile https", RATE),
        Row("pgqueuer", "pgqueuer", RATE),
        Row("procrastinate", "procrastinate", RATE),
        Row("end to end ÷ bare loop", "webhookd", RATIO, "bare", at_least(0.70)),
        Row("end to end ÷ graphile-worker, undici", "webhookd", RATIO, "graphile", at_least(1.0)),
        Row("end to end ÷ graphile-worker, node:https", "webhookd", RATIO, "graphile https", at_least(1.0)),
        Row("end to end ÷ pgqueuer", "webhookd", RATIO, "pgqueuer", at_least(1.5)),
        Row("end to end ÷ procrastinate", "webhookd", RATIO, "procrastinate", at_least(10)),
        Row("SQL statements per delivery", "statements", COUNT, goal=at_most(0.1)),
        Row("commits that write, per delivery", "commits", COUNT),
        Row("WAL per delivery, publishing included", "wal", KILOBYTES, goal=at_most(3.5)),
        Row("processor per delivery, daemon", "daemon processor", MICROSECONDS),
        Row("processor per delivery, PostgreSQL", "server processor", MICROSECONDS),
        Row("processor per POST, bare loop", "bare processor", MICROSECONDS),
        Row("resident memory of the daemon", "memory", MEGABYTES),
    ),
    "idle": (
        Row("publish to arrival, idle, SQL, p50", "idle SQL p50", MILLISECONDS, goal=at_most(10)),
        Row("publish to arrival, idle, SQL, p99", "idle SQL p99", MILLISECONDS, goal=at_most(40)),
        Row("publish to arrival, idle, API, p50", "idle API p50", MILLISECONDS, goal=at_most(10)),
        Row("publish to arrival, idle, API, p99", "idle API p99", MILLISECONDS, goal=at_most(40)),
    ),
    "latency": tuple(
        Row(f"publish to arrival, {share} % of the maximum, {kind}", f"{share} % {kind}", MILLISECONDS)
        for share in (10, 50, 90)
        for kind in ("p50", "p99")
    ),
    "history": (
        Row("beside a long history", "history", RATE),
        Row("with a long history ÷ empty", "history", RATIO, "history without", at_least(0.9)),
    ),
    "snapshot": (
        Row("while a foreign snapshot is held", "snapshot", RATE),
        Row("with a held snapshot ÷ without", "snapshot", RATIO, "snapshot without", at_least(0.6)),
    ),
    "hanging": (
        Row("healthy endpoints while one with half the traffic hangs", "hanging", RATE),
        Row("with a hanging endpoint ÷ without", "hanging", RATIO, "hanging without", at_least(0.9)),
    ),
    "instances": (
        Row("4 instances, 200 ms endpoints, concurrency 100 each", "instances", RATE),
        Row("1 instance of them", "instances one", RATE),
        Row("4 instances ÷ 1", "instances", RATIO, "instances one", at_least(3.6)),
    ),
    "backlog": (
        Row("peak memory, long backlog", "backlog memory", MEGABYTES),
        Row("long backlog ÷ 1,000", "backlog memory", RATIO, "backlog memory short", at_most(1.2)),
    ),
    "single": (
        Row("API, single events, 64 clients", "api", RATE),
        Row("its handler without database", "handler", RATE),
        Row("single events ÷ handler without database", "api", RATIO, "handler", at_least(0.6)),
        Row("the same, service api alone", "api alone", RATIO, "handler"),
    ),
    "batch": (
        Row("API, batches of 1,000, 4 clients", "batch", RATE),
        Row("bare INSERT … SELECT unnest", "insert", RATE),
        Row("batches ÷ bare INSERT", "batch", RATIO, "insert", at_least(0.5)),
        Row("the same, service api alone", "batch alone", RATIO, "insert"),
    ),
    "fan-out": (
        Row("one event to 1,000 subscriptions, first to last arrival", "fan-out", SECONDS),
        Row("the same, publish to last arrival", "fan-out from publish", SECONDS),
        Row("first to last ÷ bare loop's 1,000", "fan-out", RATIO, "fan-out bare", at_most(2.0)),
    ),
}


def lines(
    rows: Sequence[Row],
    rounds: Sequence[Mapping[str, float]],
    missing: Mapping[str, str],
    failure: str | None = None,
) -> list[Line]:
    """The lines of one measure: of the rounds there are, or why there are none."""
    return [_line(row, rounds, missing, failure) for row in rows]


def _line(
    row: Row, rounds: Sequence[Mapping[str, float]], missing: Mapping[str, str], failure: str | None
) -> Line:
    names = [name for name in (row.over, row.under) if name is not None]
    # A round that failed half-way has some numbers: only those with both sides give a ratio.
    whole = [numbers for numbers in rounds if all(name in numbers for name in names)]
    if not whole:
        reasons = [missing[name] for name in names if name in missing]
        return Line(row.label, row.unit, None, row.goal, (reasons or [failure or "not measured"])[0])
    over = [numbers[row.over] * row.unit.factor for numbers in whole]
    if row.under is not None:
        over = ratios(over, [numbers[row.under] * row.unit.factor for numbers in whole])
    return Line(row.label, row.unit, summarize(over), row.goal, "")
