"""The router's loop: when it runs again, and where it continues."""

import pytest

from tests.flow.test_lifecycle import publish_many
from tests.stage.conftest import Parts, running
from tests.support.database import Database
from tests.support.flow import EVENT_TYPE, Flow
from tests.support.waiting import until
from webhookd.core.settings import RoutingSettings, ServicesSettings, Settings
from webhookd.deliveries.router import Routed, Router

ROUTED = "select not exists (select from webhookd.event_routing_queue where event_id = $1)"
EMPTY = "select not exists (select from webhookd.event_routing_queue)"
LONG = ServicesSettings(poll_interval_seconds=3600)


def router_of(parts: Parts) -> Router:
    """Return a router of this process."""
    return Router(parts.context)


async def test_batch_cut_short_by_its_fan_out_continues_at_once(flow: Flow, parts: Parts) -> None:
    """300 events to 60 subscriptions exceed one transaction; the rest does not wait for the poll interval."""
    parts.settings = Settings(services=LONG)
    for _ in range(60):
        await flow.subscribe()
    await publish_many(flow, 300, [EVENT_TYPE])
    async with running(router_of(parts).run):
        await until(flow.daemon, EMPTY)


async def test_late_commit_is_routed_during_a_long_backlog(
    flow: Flow, database: Database, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router starts from the lowest id once per poll interval, although batches stay full."""
    parts.settings = Settings(
        services=ServicesSettings(poll_interval_seconds=0.1), routing=RoutingSettings(batch_size=5)
    )
    await flow.subscribe()
    slow = await database.connect("application")
    transaction = slow.transaction()
    await transaction.start()
    late = await slow.fetchval("select webhookd.publish($1, '{}')", EVENT_TYPE)
    await publish_many(flow, 10, [EVENT_TYPE])
    router = router_of(parts)
    assert (await router.run_once()).events == 5
    await transaction.commit()
    route = router.run_once
    batches: list[Routed] = []

    async def publish_and_route() -> Routed:
        # Every batch stays full, however slow the machine is.
        await publish_many(flow, 5, [EVENT_TYPE])
        batches.append(await route())
        return batches[-1]

    monkeypatch.setattr(router, "run_once", publish_and_route)
    async with running(router.run):
        await until(flow.superuser, ROUTED, late)
    assert all(batch.more for batch in batches)
