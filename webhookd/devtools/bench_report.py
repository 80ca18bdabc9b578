"""What a bench found: one JSON object, or lines that say what it means. Pure, but for the printing."""

from enum import StrEnum

import msgspec
from rich.text import Text

from webhookd.cli import output
from webhookd.cli.text import duration
from webhookd.devtools.bench_processors import Processors

MILLION = 1_000_000
# A part that is busy so much of the time is what the others wait for.
SATURATED = 0.85
_UNITS = ("B", "kB", "MB", "GB", "TB")
_UNIT_STEP = 1000


class Limit(StrEnum):
    """What kept the rate from being higher."""

    RECEIVER = "receiver"
    DAEMON = "daemon"
    MACHINE = "machine"
    DATABASE = "database"
    UNKNOWN = "unknown"


_MEANING = {
    Limit.RECEIVER: "the bench's own receiver: webhookd could do more",
    Limit.DAEMON: "the daemon's one processor: a second instance adds to it",
    Limit.MACHINE: "this machine's processors, which all parts share",
    Limit.DATABASE: "the database: faster commits, or a nearer server, help",
    Limit.UNKNOWN: "not known: this system does not tell who was busy",
}


class Latency(msgspec.Struct, frozen=True):
    """From publish to arrival."""

    events: int
    events_per_second: float | None  # None: one at a time
    p50_ms: float | None
    p99_ms: float | None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything, in the order of what is asked first."""

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
    """Who was busy all the time; if nobody was, all waited for the database."""
    if processors is None:
        return Limit.UNKNOWN
    if processors.machine >= SATURATED * processors.there_are:
        return Limit.MACHINE
    if processors.daemon >= SATURATED:
        return Limit.DAEMON
    if processors.receiver >= SATURATED:
        return Limit.RECEIVER
    return Limit.DATABASE


def show(report: Report) -> None:
    """For a person."""
    rate, bare = report.deliveries_per_second, report.without_database_per_second
    idle, busy = report.latency_idle, report.latency_busy
    wal, storage = report.wal_bytes_per_delivery, report.storage_bytes_per_delivery
    commit = f"{report.commit_ms:.1f} ms on the disk, {report.round_trip_ms:.1f} ms of it there and back"
    rows: list[tuple[str, output.Cell]] = [
        ("throughput", Text.assemble((f"{rate:,.0f} deliveries/s", "bold green"))),
        ("the same POSTs alone", f"{bare:,.0f}/s: with the database {rate / bare:.0%} of that"),
        ("publish to arrival", Text.assemble((_latency(idle), "bold"), " when idle")),
        ("", Text.assemble((_latency(busy), "bold"), f" at {busy.events_per_second or 0:,.0f} events/s")),
        ("a delivery", f"{size(wal)} of WAL, {size(storage)} of database"),
        ("a commit", commit),
        ("processors", _processors(report.processors)),
        ("daemon's memory", size(report.daemon_memory_bytes) if report.daemon_memory_bytes else output.NONE),
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
    for unit in _UNITS[:-1]:
        if count < _UNIT_STEP:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= _UNIT_STEP
    return f"{count:.1f} {_UNITS[-1]}"


def _latency(latency: Latency) -> str:
    if latency.p50_ms is None or latency.p99_ms is None:
        return "nothing arrived"
    return f"p50 {latency.p50_ms:.1f} ms, p99 {latency.p99_ms:.1f} ms"


def _processors(found: Processors | None) -> str:
    if found is None:
        return output.NONE
    database = f"PostgreSQL {found.postgresql:.2f}, " if found.postgresql is not None else ""
    return f"daemon {found.daemon:.2f}, {database}receiver {found.receiver:.2f} of {found.there_are}"
