"""`webhookd demo`: the whole life of some deliveries, on a webhookd of its own that is gone afterwards.

What it shows is what the daemon's API tells and what its endpoints saw.
"""

import asyncio
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import click
import msgspec
from rich.live import Live

from webhookd.cli import output
from webhookd.cli.client import Client
from webhookd.cli.options import INTERRUPTED
from webhookd.core.errors import WebhookdError
from webhookd.core.states import SagaStatus
from webhookd.devtools.demo_daemon import DemoDaemon
from webhookd.devtools.demo_scene import Counts, Endpoint, Scene
from webhookd.devtools.inbox import Behaviour, Inbox
from webhookd.devtools.own_daemon import temporary_folder
from webhookd.devtools.receiver import receiving
from webhookd.http.server import listening_socket
from webhookd.local_certificate import LocalCertificate

EVENT_TYPE = "order.paid"
ORDERS = 4
# How long a step may take on a busy machine, and how often is asked whether it is done.
STEP_TIMEOUT_SECONDS = 60.0
LOOK_INTERVAL_SECONDS = 0.1
# For eyes. Where nobody watches, nobody waits.
PAUSE_SECONDS = 1.2
ANSWER_SECONDS = 0.25

NEXT_STEPS = f"""
Now yourself, each in a terminal of its own:
  webhookd serve --local                        on an embedded PostgreSQL
  webhookd listen {EVENT_TYPE}                    a receiver that subscribes itself
  webhookd publish {EVENT_TYPE} '{{"order": 7}}'    an event: see it arrive"""


@click.command("demo")
def command() -> None:
    """Watch deliveries, retries, dead letters and a requeue.

    Starts a webhookd of its own with an embedded PostgreSQL in a temporary folder, sends it some events, and
    removes everything again. It takes less than half a minute, and touches nothing else.
    """
    endpoints = [
        Endpoint("billing", "answers", Inbox(), 5, 1.0),
        Endpoint("mail", "fails twice, then answers", Inbox(behaviour=Behaviour(failures=2)), 5, 0.8),
        Endpoint("warehouse", "is down", Inbox(behaviour=Behaviour(status=503)), 3, 0.8),
    ]
    scene = Scene(endpoints, output.console())
    try:
        asyncio.run(_demo(scene))
    except asyncio.CancelledError:
        sys.exit(INTERRUPTED)


async def _demo(scene: Scene) -> None:
    """Nothing of it is left, whether it ends, fails or is told to stop."""
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("a coroutine runs in no task")

    def stop() -> None:
        """Once: the end that it begins is not cut short."""
        if not task.cancelling():
            scene.step("Told to stop: stopping webhookd and PostgreSQL, and removing the folder")
            task.cancel()

    for order in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(order, stop)
    live = Live(scene, console=scene.console, refresh_per_second=8, vertical_overflow="crop")
    with live if scene.console.is_terminal else nullcontext():
        async with AsyncExitStack() as stack:
            scene.step("Starting PostgreSQL and webhookd in a temporary folder")
            daemon = DemoDaemon(stack.enter_context(temporary_folder("webhookd-demo-")))
            certificate = LocalCertificate.in_folder(daemon.data_dir)
            # Before the daemon, and so after it too: what is on its way when it is stopped is still answered.
            urls = [
                await stack.enter_async_context(
                    receiving(
                        listening_socket("127.0.0.1:0"),
                        certificate.server_tls(),
                        endpoint.inbox,
                        partial(scene.arrived, endpoint),
                        ANSWER_SECONDS if scene.console.is_terminal else 0,
                    )
                )
                for endpoint in scene.endpoints
            ]
            await stack.enter_async_context(daemon)
            story = _Story(scene, daemon.client)
            for endpoint, url in zip(scene.endpoints, urls, strict=True):
                await story.subscribe(endpoint, url)
            summary = await story.tell()
            scene.step("Stopping webhookd and PostgreSQL, and removing the folder")
        scene.step("Done, and nothing of it is left")
    click.echo(f"\n{summary}\n{NEXT_STEPS}")


@dataclass
class _Story:
    """What is done, and when the next thing is done."""

    scene: Scene
    client: Client

    async def subscribe(self, endpoint: Endpoint, url: str) -> None:
        asked = {
            "event_type": EVENT_TYPE,
            "callback_url": url,
            "max_attempts": endpoint.max_attempts,
            "base_delay_seconds": endpoint.base_delay_seconds,
            "description": endpoint.name,
        }
        created = await self._post("/v1/subscriptions", asked)
        endpoint.subscription_id = created["id"]
        endpoint.inbox.secrets.append(created["secret"])
        await self._post(f"/v1/subscriptions/{created['id']}/verify")

    async def tell(self) -> str:
        """All of it; and in the end, what there is to say."""
        names = ", ".join(endpoint.name for endpoint in self.scene.endpoints)
        self.scene.step(f"Subscribed and verified over HTTPS: {names}")
        await self._pause()
        self.scene.step(f"Publishing {ORDERS} events {EVENT_TYPE}; each goes to every endpoint")
        orders = [{"event_type": EVENT_TYPE, "payload": {"order": number}} for number in range(1, ORDERS + 1)]
        await self._post("/v1/events/batch", {"events": orders})
        await self._until(lambda counts: counts.deliveries[SagaStatus.COMPLETED] >= ORDERS)
        self.scene.step("billing has them; what failed is tried again, each time later")
        await self._until(
            lambda counts: (
                counts.dead_letters == ORDERS and counts.deliveries[SagaStatus.COMPLETED] == 2 * ORDERS
            )
        )
        self.scene.step(f"mail has them; the warehouse failed 3 times: {ORDERS} dead letters")
        await self._pause()
        self.scene.endpoints[-1].mend()
        self.scene.step("The warehouse is mended: the dead letters are requeued")
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
        requests = sum(endpoint.requests for endpoint in self.scene.endpoints)
        unverified = sum(endpoint.unverified for endpoint in self.scene.endpoints)
        signed = "every one of them signed" if not unverified else f"{unverified} of them not well signed"
        return (
            f"{len(done)} deliveries arrived: {len(done) - retried - requeued} at once, "
            f"{retried} after retries, {requeued} as requeued dead letters.\n"
            f"It took {requests} requests, {signed}, and {self.scene.seconds:.0f} seconds."
        )

    async def _until(self, condition: Callable[[Counts], bool]) -> None:
        deadline = time.monotonic() + STEP_TIMEOUT_SECONDS
        while not condition(await self._look()):
            if time.monotonic() > deadline:
                raise WebhookdError(f"the demo came to a halt: {self.scene.now}")
            await asyncio.sleep(LOOK_INTERVAL_SECONDS)

    async def _look(self) -> Counts:
        """Ask the daemon how far it is."""
        events, deliveries, dead_letters = [
            await self._rows(f"/v1/{noun}") for noun in ("events", "deliveries", "dead-letters")
        ]
        self.scene.counts = Counts(
            events=len(events),
            deliveries=Counter(it["status"] for it in deliveries),
            dead_letters=len(dead_letters),
            requeued=sum(it["requeued_saga_id"] is not None for it in dead_letters),
        )
        return self.scene.counts

    async def _rows(self, path: str) -> list[dict[str, Any]]:
        rows = await asyncio.to_thread(lambda: list(self.client.rows(path)))
        return [msgspec.json.decode(row, type=dict[str, Any]) for row in rows]

    async def _post(self, path: str, value: object = None) -> Any:
        return (await asyncio.to_thread(self.client.post, path, value)).value

    async def _pause(self) -> None:
        if self.scene.console.is_terminal:
            await asyncio.sleep(PAUSE_SECONDS)
