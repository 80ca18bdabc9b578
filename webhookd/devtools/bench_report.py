"""What `webhookd bench` shows: its progress, and its results as one JSON object or as text."""

import sys
from enum import StrEnum
from typing import Self

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from webhookd.cli import output
from webhookd.cli.output import duration
from webhookd.devtools.processes import Processors

STEPS = 6
MILLION = 1_000_000
# A part that is busy for this share of the time limits the rate.
SATURATED = 0.85
_UNIT_BYTES = {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3}


class Limit(StrEnum):
    """The part that limited the rate."""

    RECEIVER = "receiver"
    DAEMON = "daemon"
    MACHINE = "machine"
    DATABASE = "database"
    UNKNOWN = "unknown"


_MEANING = {
    Limit.RECEIVER: "the receiver of this benchmark: webhookd can do more",
    Limit.DAEMON: "the daemon, which uses one processor: add a second instance",
    Limit.MACHINE: "the processors of this machine, which all parts share",
    Limit.DATABASE: "the database: faster commits or a shorter round trip help",
    Limit.UNKNOWN: "unknown: this system has no /proc",
}


class Latency(msgspec.Struct, frozen=True):
    """From publish to arrival."""

    events: int
    events_per_second: float | None  # None: one event at a time
    p50_ms: float | None
    p99_ms: float | None


class BenchReport(msgspec.Struct, frozen=True, kw_only=True):
    """All results, the most important first."""

    deliveries_per_second: float
    deliveries: int
    seconds: float
    without_database_per_second: float
    latency_idle: Latency
    latency_busy: Latency
    wal_bytes_per_delivery: float
    storage_bytes_per_delivery: float
    round_trip_ms: float
    commit_ms: float
    processors: Processors | None
    daemon_memory_bytes: int | None
    limit: Limit
    subscriptions: int
    payload_bytes: int
    postgresql: str
    embedded: bool
    webhookd: str
    notes: list[str]


def limit(processors: Processors | None) -> Limit:
    """The part that was always busy; if there is none, all parts waited for the database."""
    if processors is None:
        return Limit.UNKNOWN
    if processors.machine >= SATURATED * processors.there_are:
        return Limit.MACHINE
    if processors.daemon >= SATURATED:
        return Limit.DAEMON
    if processors.receiver >= SATURATED:
        return Limit.RECEIVER
    return Limit.DATABASE


def show(report: BenchReport) -> None:
    """Print the report as text."""
    rate, bare = report.deliveries_per_second, report.without_database_per_second
    idle, busy = report.latency_idle, report.latency_busy
    wal, storage = report.wal_bytes_per_delivery, report.storage_bytes_per_delivery
    memory = report.daemon_memory_bytes
    rows: list[tuple[str, output.Cell]] = [
        ("throughput", Text.assemble((f"{rate:,.0f} deliveries/s", "bold green"))),
        ("requests only", f"{bare:,.0f}/s without a database; deliveries reach {rate / bare:.0%} of that"),
        ("publish to arrival", Text.assemble((_latency(idle), "bold"), " when idle")),
        ("", Text.assemble((_latency(busy), "bold"), f" at {busy.events_per_second or 0:,.0f} events/s")),
        ("per delivery", f"{size(wal)} of WAL, {size(storage)} of database"),
        ("commit", f"{report.commit_ms:.1f} ms, of which the round trip takes {report.round_trip_ms:.1f} ms"),
        ("busy processors", _processors(report.processors)),
        ("daemon's memory", size(memory) if memory else output.NONE),
        ("limited by", _MEANING[report.limit]),
    ]
    output.show(
        Text(
            f"{report.deliveries:,} deliveries of {report.payload_bytes} bytes to {report.subscriptions}"
            f" subscriptions; PostgreSQL {report.postgresql}{', embedded' * report.embedded}\n",
            "dim",
        ),
        output.fields(rows),
        Text(
            f"\n1 million deliveries take {duration(MILLION / rate)},"
            f" {size(MILLION * wal)} of WAL"
            f" and {size(MILLION * storage)} of database.",
            "bold",
        ),
        *(Text(f"Note: {note}", "yellow") for note in report.notes),
    )


def size(count: float) -> str:
    """A number of bytes with its unit."""
    for unit, unit_bytes in _UNIT_BYTES.items():
        if count >= unit_bytes:
            return f"{count / unit_bytes:.1f} {unit}"
    return f"{count:.0f} B"


def _latency(latency: Latency) -> str:
    if latency.p50_ms is None or latency.p99_ms is None:
        return "nothing arrived"
    return f"p50 {latency.p50_ms:.1f} ms, p99 {latency.p99_ms:.1f} ms"


def _processors(found: Processors | None) -> str:
    if found is None:
        return output.NONE
    database = f"PostgreSQL {found.postgresql:.2f}, " if found.postgresql is not None else ""
    return f"daemon {found.daemon:.2f}, {database}receiver {found.receiver:.2f} of {found.there_are}"


class ProgressBar:
    """A bar if stderr is a terminal, otherwise one line of stdout for each step, or nothing."""

    def __init__(self, *, quiet: bool) -> None:
        self._step = 0
        self._quiet = quiet
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.fields[step]}", style="dim"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            console=Console(stderr=True, markup=False, highlight=False),
            disable=not sys.stderr.isatty(),
            transient=True,
            # Low, because drawing takes processor time from the measurement.
            refresh_per_second=5,
        )
        self._task: TaskID = self._bar.add_task("", step="", total=None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.pause()

    def step(self, text: str, total: float | None = None) -> None:
        """Show the next step, with the total that `done` counts up to."""
        self._step += 1
        self.say(text, f"{self._step}/{STEPS}", total)

    def say(self, text: str, step: str = "", total: float | None = None) -> None:
        """Show something that may not be a step."""
        self._bar.start()
        self._bar.update(self._task, description=text, step=step, total=total, completed=0)
        if not self._quiet and not sys.stderr.isatty():
            click.echo(f"{step} {text}".strip())

    def pause(self) -> None:
        """Hide the bar until the next step, so that a question can be asked."""
        self._bar.stop()

    def done(self, count: int) -> None:
        self._bar.update(self._task, completed=count)
