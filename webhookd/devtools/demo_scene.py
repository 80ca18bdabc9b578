"""What the demo shows: counts that the daemon told, requests that the endpoints saw, and what happened last.

A picture on a terminal, a line for each thing that happens elsewhere.
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

from webhookd.cli.text import escaped
from webhookd.core.states import SagaStatus
from webhookd.devtools.inbox import Arrival, Behaviour, Inbox

GOOD, BUSY, BAD, QUIET = "green", "yellow", "red", "dim"
# Rows of a screen that are not for what happened: the picture, the endpoints, and what is between them.
OTHER_ROWS = 16
FEWEST_LINES, MOST_LINES = 3, 12


@dataclass
class Endpoint:
    """A receiver of the demo, and what it saw."""

    name: str
    character: str
    inbox: Inbox
    max_attempts: int
    base_delay_seconds: float
    subscription_id: int = 0
    requests: int = 0
    taken: int = 0
    unverified: int = 0
    last_status: int = 0

    def saw(self, arrival: Arrival) -> None:
        self.requests += 1
        self.taken += arrival.taken
        self.unverified += arrival.problem is not None
        self.last_status = arrival.status

    def mend(self) -> None:
        """From now on it answers."""
        self.character = "mended: answers"
        self.inbox.behaviour = Behaviour()


@dataclass
class Counts:
    """As the daemon told them."""

    events: int = 0
    deliveries: Counter[str] = field(default_factory=Counter)
    dead_letters: int = 0
    requeued: int = 0


@dataclass
class Scene:
    """All that there is to see."""

    endpoints: Sequence[Endpoint]
    console: Console
    counts: Counts = field(default_factory=Counts)
    now: str = ""
    began_at: float = field(default_factory=time.monotonic)
    lines: deque[Text] = field(default_factory=lambda: deque(maxlen=MOST_LINES))
    # One for the whole time, or it would never turn.
    _spinner: Spinner = field(default_factory=lambda: Spinner("dots", style=BUSY))

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began_at

    def step(self, text: str) -> None:
        """The story goes on."""
        self.now = text
        self._spinner.update(text=Text(text, "bold"))
        self._add(Text(text, "bold"))

    def arrived(self, endpoint: Endpoint, arrival: Arrival) -> None:
        """An endpoint was sent something."""
        if arrival.challenge is not None:
            return
        endpoint.saw(arrival)
        message_id, attempt = (escaped(arrival.headers.get(f"webhook-{it}", "?")) for it in ("id", "attempt"))
        believed = "✓ signature" if arrival.problem is None else f"✗ {arrival.problem}"
        line = Text(f"  {message_id} → {endpoint.name:9} attempt {attempt}, {believed}, answers ")
        self._add(line.append(str(arrival.status), GOOD if arrival.taken else BAD))

    def _add(self, line: Text) -> None:
        stamped = Text(f"{self.seconds:5.1f} s  ", QUIET).append_text(line)
        self.lines.append(stamped)
        if not self.console.is_terminal:
            click.echo(stamped.plain)

    def __rich__(self) -> Group:
        room = max(FEWEST_LINES, min(MOST_LINES, self.console.height - OTHER_ROWS))
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
        """The way of an event, with how many are where."""
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
        for name in ("endpoint", "", "requests", "answers 2xx"):
            table.add_column(name, justify="right" if name in ("requests", "answers 2xx") else "left")
        for endpoint in self.endpoints:
            table.add_row(
                Text(endpoint.name, "bold"),
                Text(endpoint.character, QUIET),
                str(endpoint.requests),
                Text(str(endpoint.taken), GOOD if endpoint.taken else QUIET),
            )
        return table


def _number(count: int, style: str) -> Text:
    """As wide as a word of the picture; nothing is quiet."""
    return Text(f"{count:^9}", f"bold {style}" if count else QUIET)


def _cropped(line: Text) -> Text:
    line = line.copy()
    line.no_wrap, line.overflow = True, "ellipsis"
    return line
