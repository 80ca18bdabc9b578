"""The table of a run: its rows with their goals, the summary of the rounds, and the text. Pure.

A row shows a number of each round, or the ratio of two numbers; a goal limits its median.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tests.bench.scale import LIVE_RATES, PACED_RATE


class Summary(NamedTuple):
    """The median of the rounds, and their spread."""

    median: float
    minimum: float
    maximum: float


def summarize(values: Sequence[float]) -> Summary:
    """Summarize at least one value."""
    return Summary(statistics.median(values), min(values), max(values))


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Ratios round by round, so that a disturbance of both sides of a round cancels out."""
    return [one / other for one, other in zip(over, under, strict=True)]


class Unit(NamedTuple):
    """How a number is printed."""

    name: str
    factor: float = 1.0
    digits: int = 0


RATE = Unit("/s")
RATIO = Unit("", digits=2)
COUNT = Unit("", digits=3)
PERCENT = Unit("%", 100)
TENTHS = Unit("%", 100, 1)
MICROSECONDS = Unit("µs", 1e6)
MILLISECONDS = Unit("ms", digits=1)
SECONDS = Unit("s", digits=3)
KILOBYTES = Unit("kB", 1e-3, 2)
MEGABYTES = Unit("MB", 1e-6)


class Goal(NamedTuple):
    """A limit in the unit of the row."""

    bound: float
    at_least: bool

    def is_met(self, value: float) -> bool:
        return value >= self.bound if self.at_least else value <= self.bound

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.bound:g}"


def at_least(bound: float) -> Goal:
    """A goal for a number of which more is better."""
    return Goal(bound, at_least=True)


def at_most(bound: float) -> Goal:
    """A goal for a number of which less is better."""
    return Goal(bound, at_least=False)


@dataclass(frozen=True)
class Row:
    """Defines one line of the table."""

    label: str
    over: str
    unit: Unit
    under: str | None = None
    goal: Goal | None = None
    contender: bool = False  # shows the processor time of the contender `over` beside its rate


def own_processor(contender: str) -> str:
    """The name of the number: processor seconds per delivery, of the contender's own processes."""
    return f"{contender} processor"


def server_processor(contender: str) -> str:
    """The name of the number: processor seconds per delivery, of all processes of PostgreSQL."""
    return f"{contender} PostgreSQL processor"


class Line(NamedTuple):
    """One line of the table: median and spread, or a note why they are missing."""

    label: str
    unit: Unit
    summary: Summary | None
    goal: Goal | None
    note: str
    processor: str = ""  # per delivery: the contender's own, and PostgreSQL's
    disturbed: bool = False  # the machine was not idle in at least one round

    @property
    def verdict(self) -> str:
        """Whether the goal is met, or why that is unknown."""
        if self.summary is None:
            return self.note
        if self.goal is None:
            return ""
        return "met" if self.goal.is_met(self.summary.median) else "missed"


ROWS: dict[str, tuple[Row, ...]] = {
    "throughput": (
        Row("bare aiohttp + uvloop loop, no database", "bare", RATE, contender=True),
        Row("webhookd, commit to Completed", "webhookd", RATE, contender=True),
        Row("graphile-worker, undici", "graphile", RATE, contender=True),
        Row("graphile-worker, node:https", "graphile https", RATE, contender=True),
        Row("pgqueuer", "pgqueuer", RATE, contender=True),
        Row("procrastinate", "procrastinate", RATE, contender=True),
        Row("end to end ÷ bare loop", "webhookd", RATIO, "bare", at_least(1.3)),
        Row("end to end ÷ graphile-worker, undici", "webhookd", RATIO, "graphile", at_least(1.0)),
        Row("end to end ÷ graphile-worker, node:https", "webhookd", RATIO, "graphile https", at_least(1.0)),
        Row("end to end ÷ pgqueuer", "webhookd", RATIO, "pgqueuer", at_least(2.0)),
        Row("end to end ÷ procrastinate", "webhookd", RATIO, "procrastinate", at_least(10)),
        Row("SQL statements per delivery", "statements", COUNT, goal=at_most(0.1)),
        Row("commits that write, per delivery", "commits", COUNT),
        Row("WAL per delivery, publishing included", "wal", KILOBYTES, goal=at_most(3.3)),
        Row("processor per delivery, daemon", own_processor("webhookd"), MICROSECONDS, goal=at_most(150)),
        Row(
            "processor per delivery, PostgreSQL",
            server_processor("webhookd"),
            MICROSECONDS,
            goal=at_most(140),
        ),
        Row("resident memory of the daemon", "memory", MEGABYTES),
    ),
    "idle": (
        Row("publish to arrival, idle, SQL, p50", "idle SQL p50", MILLISECONDS, goal=at_most(10)),
        Row("publish to arrival, idle, SQL, p99", "idle SQL p99", MILLISECONDS, goal=at_most(40)),
        Row("publish to arrival, idle, API, p50", "idle API p50", MILLISECONDS, goal=at_most(10)),
        Row("publish to arrival, idle, API, p99", "idle API p99", MILLISECONDS, goal=at_most(40)),
        Row("INSERT of one row, committed, idle, p50", "idle insert p50", Unit("ms", digits=2)),
        Row("idle, SQL, p50 ÷ INSERT of one row", "idle SQL p50", RATIO, "idle insert p50", at_most(4)),
        Row("idle, API, p50 ÷ INSERT of one row", "idle API p50", RATIO, "idle insert p50", at_most(4)),
    ),
    "paced": (
        Row(f"one event at a time, {PACED_RATE} /s offered", "paced", RATE),
        Row(f"processor per delivery at {PACED_RATE} /s, daemon", own_processor("paced"), MICROSECONDS),
        Row(
            f"processor per delivery at {PACED_RATE} /s, PostgreSQL, publishing included",
            server_processor("paced"),
            MICROSECONDS,
        ),
        Row(f"both at {PACED_RATE} /s, of one core", "paced share", PERCENT),
    ),
    "latency": tuple(
        Row(f"publish to arrival, {share} % of the maximum, {kind}", f"{share} % {kind}", MILLISECONDS)
        for share in (10, 50, 90)
        for kind in ("p50", "p99")
    ),
    "history": (
        Row("with a long history", "history", RATE),
        Row("with a long history ÷ empty", "history", RATIO, "history without", at_least(0.93)),
    ),
    "snapshot": (
        Row("while another transaction holds a snapshot", "snapshot", RATE),
        Row("with a held snapshot ÷ without", "snapshot", RATIO, "snapshot without", at_least(0.6)),
    ),
    "hanging": (
        Row("healthy endpoints while one with half the traffic hangs", "hanging", RATE),
        Row("with a hanging endpoint ÷ without", "hanging", RATIO, "hanging without", at_least(0.9)),
    ),
    "instances": (
        Row("4 instances, 200 ms endpoints, concurrency 100 each", "instances", RATE),
        Row("1 instance, 200 ms endpoints, concurrency 100", "instances one", RATE),
        Row("4 instances ÷ 1", "instances", RATIO, "instances one", at_least(3.6)),
    ),
    "backlog": (
        Row("peak memory, long backlog", "backlog memory", MEGABYTES),
        Row("long backlog ÷ backlog of 1,000", "backlog memory", RATIO, "backlog memory short", at_most(1.2)),
    ),
    "statistics": (
        Row("with statistics", "stats", RATE),
        Row("with statistics ÷ without", "stats", RATIO, "stats without", at_least(0.97)),
        Row(
            "processor per delivery, daemon and PostgreSQL, with statistics ÷ without",
            "stats processor of both",
            RATIO,
            "stats without processor of both",
            at_most(1.03),
        ),
        Row(
            "processor per delivery, PostgreSQL, with statistics ÷ without",
            server_processor("stats"),
            RATIO,
            server_processor("stats without"),
        ),
        Row("WAL per delivery, with statistics ÷ without", "stats WAL", RATIO, "stats without WAL"),
    ),
    "sweep": (
        Row("while retention removes old events ÷ without", "sweep", RATIO, "sweep without", at_least(0.95)),
        Row(
            f"publish to arrival at {PACED_RATE}/s, p50, without retention ÷ with",
            "sweep without p50",
            RATIO,
            "sweep p50",
        ),
        Row("the same, p99", "sweep without p99", RATIO, "sweep p99", at_least(0.95)),
        Row("events that retention removed", "sweep removed", Unit("events")),
    ),
    "live": tuple(
        row
        for rate in LIVE_RATES
        for row in (
            Row(f"daemon and PostgreSQL at {rate}/s, 50 live pages, of one core", f"live {rate}/s", TENTHS),
            Row(f"of it for the pages, at {rate}/s", f"live {rate}/s added", TENTHS, goal=at_most(5)),
        )
    ),
    "single": (
        Row("API, single events, 64 clients", "api", RATE),
        Row("API handler without a database", "handler", RATE),
        Row("single events ÷ handler without a database", "api", RATIO, "handler", at_least(0.6)),
        Row("single events, only service api ÷ handler", "api alone", RATIO, "handler"),
    ),
    "batch": (
        Row("API, batches of 1,000, 4 clients", "batch", RATE),
        Row("bare INSERT … SELECT unnest", "insert", RATE),
        Row("batches ÷ bare INSERT", "batch", RATIO, "insert", at_least(0.5)),
        Row("batches, only service api ÷ bare INSERT", "batch alone", RATIO, "insert"),
    ),
    "fan-out": (
        Row("one event to 1,000 subscriptions, first to last arrival", "fan-out", SECONDS),
        Row("one event to 1,000 subscriptions, publish to last arrival", "fan-out from publish", SECONDS),
        Row(
            "first to last arrival ÷ 1,000 POSTs of the bare loop",
            "fan-out",
            RATIO,
            "fan-out bare",
            at_most(2.0),
        ),
    ),
}


def lines(
    rows: Sequence[Row],
    rounds: Sequence[Mapping[str, float]],
    missing: Mapping[str, str],
    failure: str | None = None,
    *,
    disturbed: bool = False,
) -> list[Line]:
    """The lines of one measure, from its rounds or with the reason why there are none."""
    return [_line(row, rounds, missing, failure)._replace(disturbed=disturbed) for row in rows]


def _line(
    row: Row, rounds: Sequence[Mapping[str, float]], missing: Mapping[str, str], failure: str | None
) -> Line:
    names = [name for name in (row.over, row.under) if name is not None]
    # A round that failed has only some of its numbers; a ratio needs both sides.
    complete = [numbers for numbers in rounds if all(name in numbers for name in names)]
    if not complete:
        reasons = [missing[name] for name in names if name in missing]
        return Line(row.label, row.unit, None, row.goal, (reasons or [failure or "not measured"])[0])
    over = [numbers[row.over] * row.unit.factor for numbers in complete]
    if row.under is not None:
        over = ratios(over, [numbers[row.under] * row.unit.factor for numbers in complete])
    processor = _processor(row.over, complete) if row.contender else ""
    return Line(row.label, row.unit, summarize(over), row.goal, "", processor)


def _processor(contender: str, rounds: Sequence[Mapping[str, float]]) -> str:
    """The medians of the contender and of PostgreSQL, such as `85 + 120 µs`."""
    names = (own_processor(contender), server_processor(contender))
    found = [[numbers[name] for numbers in rounds if name in numbers] for name in names]
    medians = [f"{statistics.median(values) * MICROSECONDS.factor:,.0f}" for values in found if values]
    return f"{' + '.join(medians)} {MICROSECONDS.name}" if medians else ""


# Beside a number from a machine that was not idle; a footnote explains it.
DISTURBED = "†"
HEADINGS = ("measure", "median", "spread", "processor", "goal", "")
LEFT = (True, False, False, False, False, True)


def plain_table(lines: Sequence[Line]) -> str:
    """The table for a terminal."""
    cells = [HEADINGS, *map(_cells, lines)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(HEADINGS))]
    return "\n".join(
        "  ".join(
            text.ljust(width) if left else text.rjust(width)
            for text, width, left in zip(row, widths, LEFT, strict=True)
        ).rstrip()
        for row in cells
    )


def markdown_table(lines: Sequence[Line]) -> str:
    """The table for a document."""
    marks = ["---" if left else "--:" for left in LEFT]
    rows = [HEADINGS, marks, *map(_cells, lines)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cells(line: Line) -> tuple[str, ...]:
    goal = "" if line.goal is None else str(line.goal)
    if line.summary is None:
        return line.label, "—", "", "", goal, line.verdict
    median, minimum, maximum = (f"{value:,.{line.unit.digits}f}" for value in line.summary)
    unit = f" {line.unit.name}" if line.unit.name else ""
    label = f"{line.label} {DISTURBED}" if line.disturbed else line.label
    return label, f"{median}{unit}", f"{minimum} to {maximum}", line.processor, goal, line.verdict
