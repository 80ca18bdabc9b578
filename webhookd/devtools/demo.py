"""`webhookd demo`: deliveries, retries, dead letters and a requeue, on a temporary webhookd.

Everything it shows comes from the daemon's API and from the demo's own endpoints.
"""

import asyncio
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import click
import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from webhookd.cli import output
from webhookd.cli.client import Client
from webhookd.cli.options import INTERRUPTED, escaped
from webhookd.core.errors import WebhookdError
from webhookd.core.states import SagaStatus
from webhookd.devtools.processes import TemporaryDaemon, interruptible, temporary_folder
from webhookd.devtools.receiver import Arrival, ReceivedWebhooks, receiving
from webhookd.embedded.server import running
from webhookd.local_certificate import LocalCertificate

EVENT_TYPE = "order.paid"
ORDERS = 4
# A step may take long on a busy machine.
STEP_TIMEOUT_SECONDS = 60.0
POLL_INTERVAL_SECONDS = 0.1
# Pauses that let a person follow on a terminal; there are none elsewhere.
PAUSE_SECONDS = 1.2
ANSWER_SECONDS = 0.25
GOOD, BUSY, BAD, QUIET = "green", "yellow", "red", "dim"
# Rows of the screen that the picture, the table and the gaps take; the rest shows the latest lines.
FIXED_ROWS = 16
MIN_LINES, MAX_LINES = 3, 12

NEXT_STEPS = f"""
Try it yourself, each command in its own terminal:
  webhookd serve --local                        start webhookd on an embedded PostgreSQL
  webhookd listen {EVENT_TYPE}                    start a receiver that subscribes itself
  webhookd publish {EVENT_TYPE} '{{"order": 7}}'    publish an event and see it arrive"""


@dataclass
class Endpoint:
    """A receiver of the demo, and the requests it got."""

    name: str
    description: str
    received: ReceivedWebhooks
    max_attempts: int
    base_delay_seconds: float
    url: str = ""
    requests: int = 0
    accepted: int = 0
    unverified: int = 0


@dataclass
class Counts:
    """Rows in the daemon's lists."""

    events: int = 0
    deliveries: Counter[str] = field(default_factory=Counter)
    dead_letters: int = 0
    requeued: int = 0


@dataclass
class Screen:
    """A live picture on a terminal; elsewhere, one line for each thing that happens."""

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
        endpoint.requests += 1
        endpoint.accepted += arrival.accepted
        endpoint.unverified += arrival.problem is not None
        message_id, attempt = (escaped(arrival.headers.get(f"webhook-{it}", "?")) for it in ("id", "attempt"))
        signature = "✓ signature" if arrival.problem is None else f"✗ {arrival.problem}"
        line = Text(f"  {message_id} → {endpoint.name:9} attempt {attempt}, {signature}, answer ")
        self._add(line.append(str(arrival.status), GOOD if arrival.accepted else BAD))

    def _add(self, line: Text) -> None:
        stamped = Text(f"{self.seconds:5.1f} s  ", QUIET, no_wrap=True, overflow="ellipsis").append_text(line)
        self.lines.append(stamped)
        if not self.console.is_terminal:
            click.echo(stamped.plain)

    def __rich__(self) -> Group:
        room = max(MIN_LINES, min(MAX_LINES, self.console.height - FIXED_ROWS))
        title = Table.grid(expand=True)
        title.add_column(no_wrap=True, overflow="ellipsis")
        title.add_column(justify="right", style=QUIET)
        title.add_row(self._spinner, f"{self.seconds:.0f} s")
        latest = list(self.lines)[-room:]
        return Group(title, Text(), *self._picture(), Text(), self._table(), Text(), *latest)

    def _picture(self) -> list[Text]:
        """The stages of a delivery, with the number of events or deliveries in each."""
        counts, deliveries = self.counts, self.counts.deliveries
        waiting = _number(deliveries[SagaStatus.PENDING], BUSY)
        sending = _number(deliveries[SagaStatus.IN_PROGRESS], BUSY)
        delivered = _number(deliveries[SagaStatus.COMPLETED], GOOD)
        gap, indent = " " * 5, " " * 20
        return [
            Text("   events   ──▶  waiting   ──▶  sending   ──▶ delivered"),
            Text.assemble("  ", _number(counts.events, "cyan"), gap, waiting, gap, sending, gap, delivered),
            Text(f"{indent}▲             │"),
            Text.assemble(f"{indent}├── retry ◀───┤", _number(deliveries[SagaStatus.PENDING_RETRY], BUSY)),
            Text(f"{indent}│             ▼"),
            Text(f"{indent}└─ requeue ◀─ dead letters"),
            Text.assemble(
                f"{indent}  ", _number(counts.requeued, GOOD), gap, _number(counts.dead_letters, BAD)
            ),
        ]

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 2), header_style=QUIET)
        table.add_column("endpoint", style="bold")
        table.add_column(style=QUIET)
        table.add_column("requests", justify="right")
        table.add_column("accepted", justify="right")
        for endpoint in self.endpoints:
            accepted = Text(str(endpoint.accepted), GOOD if endpoint.accepted else QUIET)
            table.add_row(endpoint.name, endpoint.description, str(endpoint.requests), accepted)
        return table


def _number(count: int, style: str) -> Text:
    """Centred in the width of a word of the picture; zero is dim."""
    return Text(f"{count:^9}", f"bold {style}" if count else QUIET)


@click.command("demo")
def command() -> None:
    """Watch deliveries, retries, dead letters and a requeue.

    Starts a temporary webhookd with an embedded PostgreSQL, publishes some events, and removes everything
    again. It takes less than half a minute and does not touch any other webhookd or database.
    """
    endpoints = [
        Endpoint("billing", "works", ReceivedWebhooks(), 5, 1.0),
        Endpoint("mail", "fails twice, then works", ReceivedWebhooks(failures=2), 5, 0.8),
        Endpoint("warehouse", "is down", ReceivedWebhooks(status=503), 3, 0.8),
    ]
    screen = Screen(endpoints, output.console())
    interrupted = partial(
        screen.step, "Interrupted: stopping webhookd and PostgreSQL, removing the temporary folder"
    )
    summary = asyncio.run(interruptible(partial(_demo, screen), interrupted))
    if summary is None:
        sys.exit(INTERRUPTED)
    click.echo(f"\n{summary}\n{NEXT_STEPS}")


async def _demo(screen: Screen) -> str:
    """Run the demo and clean up, also after an error or a signal. Returns the summary."""
    on_terminal = screen.console.is_terminal
    live = Live(screen, console=screen.console, refresh_per_second=8, vertical_overflow="crop")
    with live if on_terminal else nullcontext():
        async with AsyncExitStack() as stack:
            screen.step("Starting PostgreSQL and webhookd in a temporary folder")
            daemon = DemoDaemon(stack.enter_context(temporary_folder("webhookd-demo-")))
            tls = LocalCertificate.in_folder(daemon.data_dir).server_tls()
            answer_seconds = ANSWER_SECONDS if on_terminal else 0
            # Started before the daemon, so stopped after it: requests in flight still get an answer.
            for endpoint in screen.endpoints:
                on_arrival = partial(screen.arrived, endpoint)
                receiver = receiving(0, tls, endpoint.received, on_arrival, answer_seconds)
                endpoint.url = await stack.enter_async_context(receiver)
            await stack.enter_async_context(daemon)
            summary = await _Story(screen, daemon.client).tell()
            screen.step("Stopping webhookd and PostgreSQL, removing the temporary folder")
        screen.step("Done: everything is removed")
    return summary


class DemoDaemon(TemporaryDaemon):
    """A webhookd with an embedded PostgreSQL that ignores all settings of the user."""

    def __init__(self, folder: Path) -> None:
        self.data_dir: Final = folder / "data"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("WEBHOOKD_")}
        environment |= {
            "WEBHOOKD_DATABASE_DATA_DIR": str(self.data_dir),
            "WEBHOOKD_SERVICES_POLL_INTERVAL_SECONDS": "0.2",
            "WEBHOOKD_LOG_FORMAT": "json",
        }
        super().__init__(folder, "demo", None, environment)

    def _stop(self) -> bool:
        stopped = super()._stop()
        if not stopped and (self.data_dir / "pgdata").is_dir():
            # A killed daemon leaves PostgreSQL running. It stops when its last user leaves.
            with running(self.data_dir):
                pass
        return stopped


@dataclass
class _Story:
    """The steps of the demo, each after the one before is visible in the daemon."""

    screen: Screen
    client: Client

    async def _subscribe(self, endpoint: Endpoint) -> None:
        request = {
            "event_type": EVENT_TYPE,
            "callback_url": endpoint.url,
            "max_attempts": endpoint.max_attempts,
            "base_delay_seconds": endpoint.base_delay_seconds,
            "description": endpoint.name,
        }
        created = await self._post("/v1/subscriptions", request)
        endpoint.received.secrets.append(created["secret"])
        await self._post(f"/v1/subscriptions/{created['id']}/verify")

    async def tell(self) -> str:
        """Run all steps. Returns the summary."""
        for endpoint in self.screen.endpoints:
            await self._subscribe(endpoint)
        names = ", ".join(endpoint.name for endpoint in self.screen.endpoints)
        self.screen.step(f"Subscribed and verified over HTTPS: {names}")
        await self._pause()
        self.screen.step(f"Publishing {ORDERS} {EVENT_TYPE} events; each goes to every endpoint")
        orders = [{"event_type": EVENT_TYPE, "payload": {"order": number}} for number in range(1, ORDERS + 1)]
        await self._post("/v1/events/batch", {"events": orders})
        await self._until(lambda counts: counts.deliveries[SagaStatus.COMPLETED] >= ORDERS)
        self.screen.step("billing received its events; failed attempts are retried with growing delays")
        await self._until(
            lambda counts: (
                counts.dead_letters == ORDERS and counts.deliveries[SagaStatus.COMPLETED] == 2 * ORDERS
            )
        )
        self.screen.step(f"mail received its events; warehouse failed 3 times: {ORDERS} dead letters")
        await self._pause()
        warehouse = self.screen.endpoints[-1]
        warehouse.description, warehouse.received.status = "repaired: works", None
        self.screen.step("warehouse works again: requeueing the dead letters")
        await self._pause()
        await self._post("/v1/dead-letters/requeue", {"filter": {}, "dry_run": False})
        await self._until(
            lambda counts: counts.requeued == ORDERS and counts.deliveries[SagaStatus.COMPLETED] == 3 * ORDERS
        )
        await self._pause()
        return await self._summary()

    async def _summary(self) -> str:
        done = [it for it in await self._rows("/v1/deliveries") if it["status"] == SagaStatus.COMPLETED]
        requeued = sum(it["dead_letter_id"] is not None for it in done)
        retried = sum(it["dead_letter_id"] is None and it["attempt_count"] > 1 for it in done)
        requests = sum(endpoint.requests for endpoint in self.screen.endpoints)
        unverified = sum(endpoint.unverified for endpoint in self.screen.endpoints)
        signed = "all with a valid signature" if not unverified else f"{unverified} without a valid signature"
        return (
            f"{len(done)} deliveries completed: {len(done) - retried - requeued} at the first attempt, "
            f"{retried} after retries, {requeued} as requeued dead letters.\n"
            f"They took {requests} requests, {signed}, in {self.screen.seconds:.0f} seconds."
        )

    async def _until(self, condition: Callable[[Counts], bool]) -> None:
        deadline = time.monotonic() + STEP_TIMEOUT_SECONDS
        while not condition(await self._counts()):
            if time.monotonic() > deadline:
                raise WebhookdError(
                    f"the demo is stuck: no progress for {STEP_TIMEOUT_SECONDS:.0f} s after"
                    f' "{self.screen.current_step}"'
                )
            await asyncio.sleep(POLL_INTERVAL_SECONDS)

    async def _counts(self) -> Counts:
        events, deliveries, dead_letters = [
            await self._rows(f"/v1/{noun}") for noun in ("events", "deliveries", "dead-letters")
        ]
        self.screen.counts = Counts(
            events=len(events),
            deliveries=Counter(it["status"] for it in deliveries),
            dead_letters=len(dead_letters),
            requeued=sum(it["requeued_saga_id"] is not None for it in dead_letters),
        )
        return self.screen.counts

    async def _rows(self, path: str) -> list[dict[str, Any]]:
        return [
            msgspec.json.decode(row, type=dict[str, Any])
            async for page in self.client.pages(path)
            for row in page
        ]

    async def _post(self, path: str, value: object = None) -> Any:
        return (await self.client.request("POST", path, value)).value

    async def _pause(self) -> None:
        if self.screen.console.is_terminal:
            await asyncio.sleep(PAUSE_SECONDS)
