"""The screen of `webhookd demo`: counts from the daemon, requests at the endpoints, and the latest lines.

A live picture on a terminal; elsewhere, one line for each thing that happens.
"""

import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import click
from rich.console import Console, Group
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from webhookd.cli.options import escaped
from webhookd.core.states import SagaStatus
from webhookd.devtools.receiver import Arrival, Behaviour, ReceivedWebhooks

GOOD, BUSY, BAD, QUIET = "green", "yellow", "red", "dim"
# Rows of the screen that the picture, the table and the gaps take; the rest shows the latest lines.
FIXED_ROWS = 16
MIN_LINES, MAX_LINES = 3, 12


@dataclass
class Endpoint:
    """A receiver of the demo, and the requests it got."""

    name: str
    description: str
    received: ReceivedWebhooks
    max_attempts: int
    base_delay_seconds: float
    requests: int = 0
    accepted: int = 0
    unverified: int = 0

    def count(self, arrival: Arrival) -> None:
        self.requests += 1
        self.accepted += arrival.accepted
        self.unverified += arrival.problem is not None

    def repair(self) -> None:
        self.description = "repaired: works"
        self.received.behaviour = Behaviour()


@dataclass
class Counts:
    """Rows in the daemon's lists."""

    events: int = 0
    deliveries: Counter[str] = field(default_factory=Counter)
    dead_letters: int = 0
    requeued: int = 0


@dataclass
class Screen:
    """Everything that the demo shows."""

    endpoints: Sequence[Endpoint]
    console: Console
    counts: Counts = field(default_factory=Counts)
    current_step: str = ""
    started_at: float = field(default_factory=time.monotonic)
    lines: deque[Text] = field(default_factory=lambda: deque(maxlen=MAX_LINES))
    # Kept over all refreshes: a new spinner would always show its first frame.
    _spinner: Spinner = field(default_factory=lambda: Spinner("dots", style=BUSY))

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started_at

    def step(self, text: str) -> None:
        """Show the next step of the demo."""
        self.current_step = text
        self._spinner.update(text=Text(text, "bold"))
        self._add(Text(text, "bold"))

    def arrived(self, endpoint: Endpoint, arrival: Arrival) -> None:
        """Show a request that an endpoint received; challenges are left out."""
        if arrival.challenge is not None:
            return
        endpoint.count(arrival)
        message_id, attempt = (escaped(arrival.headers.get(f"webhook-{it}", "?")) for it in ("id", "attempt"))
        signature = "✓ signature" if arrival.problem is None else f"✗ {arrival.problem}"
        line = Text(f"  {message_id} → {endpoint.name:9} attempt {attempt}, {signature}, answer ")
        self._add(line.append(str(arrival.status), GOOD if arrival.accepted else BAD))

    def _add(self, line: Text) -> None:
        stamped = Text(f"{self.seconds:5.1f} s  ", QUIET).append_text(line)
        self.lines.append(stamped)
        if not self.console.is_terminal:
            click.echo(stamped.plain)

    def __rich__(self) -> Group:
        room = max(MIN_LINES, min(MAX_LINES, self.console.height - FIXED_ROWS))
        title = Table.grid(expand=True)
        title.add_column(no_wrap=True, overflow="ellipsis")
        title.add_column(justify="right", style=QUIET)
        title.add_row(self._spinner, f"{self.seconds:.0f} s")
        return Group(
            title,
            Text(),
            *self._picture(),
            Text(),
            self._table(),
            Text(),
            *(_cropped(line) for line in list(self.lines)[-room:]),
        )

    def _picture(self) -> list[Text]:
        """The stages of a delivery, with the number of events or deliveries in each."""
        counts, deliveries = self.counts, self.counts.deliveries
        waiting, sending, delivered = (
            _number(deliveries[status], style)
            for status, style in (
                (SagaStatus.PENDING, BUSY),
                (SagaStatus.IN_PROGRESS, BUSY),
                (SagaStatus.COMPLETED, GOOD),
            )
        )
        gap = " " * 5
        indent = " " * 20
        return [
            Text("   events   ──▶  waiting   ──▶  sending   ──▶ delivered"),
            Text.assemble("  ", _number(counts.events, "cyan"), gap, waiting, gap, sending, gap, delivered),
            Text(f"{indent}▲             │"),
            Text.assemble(f"{indent}├── retry ◀───┤", _number(deliveries[SagaStatus.PENDING_RETRY], BUSY)),
            Text(f"{indent}│             ▼"),
            Text(f"{indent}└─ requeue ◀─ dead letters"),
            Text.assemble(
                indent, "  ", _number(counts.requeued, GOOD), gap, _number(counts.dead_letters, BAD)
            ),
        ]

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 2), header_style=QUIET)
        for name in ("endpoint", "", "requests", "accepted"):
            table.add_column(name, justify="right" if name in ("requests", "accepted") else "left")
        for endpoint in self.endpoints:
            table.add_row(
                Text(endpoint.name, "bold"),
                Text(endpoint.description, QUIET),
                str(endpoint.requests),
                Text(str(endpoint.accepted), GOOD if endpoint.accepted else QUIET),
            )
        return table


def _number(count: int, style: str) -> Text:
    """Centred in the width of a word of the picture; zero is dim."""
    return Text(f"{count:^9}", f"bold {style}" if count else QUIET)


def _cropped(line: Text) -> Text:
    line = line.copy()
    line.no_wrap, line.overflow = True, "ellipsis"
    return line
