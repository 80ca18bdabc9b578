"""The service `retention` in real daemons: what it removes, reloads, erasure through the API, and crashes."""

import asyncio

from tests.flow.conftest import MakeApi, MakeDaemon
from tests.flow.test_lifecycle import publish_many
from tests.support.endpoint import Endpoint
from tests.support.flow import Flow
from tests.support.sweeps import let_pass, rows
from tests.support.waiting import until
from webhookd.deliveries import subscriptions

DELIVERED = "select count(*) = $1 from webhookd.webhook_delivery_sagas where status = 'Completed'"
REMOVED = "webhookd_retention_removed_total"
WAITS_FOR_LOCK = """
    select exists (
        select from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database())
"""
MONTH = {"events_days": 30, "dead_letters_days": 30}


async def test_old_events_are_removed_after_a_reload(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """By default everything is kept. The new period takes effect without a restart, and is shown."""
    await flow.subscribe("orders", endpoint.url())
    daemon = await make_daemon().start()
    await publish_many(flow, 50, ["orders"])
    await until(flow.daemon, DELIVERED, 50)
    await let_pass(flow.superuser, 31)
    await publish_many(flow, 5, ["orders"])
    await until(flow.daemon, DELIVERED, 55)
    status = daemon.get_json("/status")["retention"]
    assert (status["events_days"], status["lag_seconds"]) == (0, None)
    daemon.configure(retention=MONTH)
    assert await daemon.reload()
    await until(flow.daemon, "select count(*) = 5 from webhookd.events")
    await daemon.until(lambda: daemon.metric(REMOVED, kind="events") == 50, "counted")
    assert daemon.metric(REMOVED, kind="deliveries") == 50
    assert await rows(flow.superuser) == {
        "events": 5,
        "webhook_delivery_sagas": 5,
        "webhook_delivery_jobs": 5,
    }
    await daemon.until(lambda: daemon.get_json("/status")["retention"]["lag_seconds"] == 0, "up to date")
    assert daemon.faults() == []


async def test_lag_is_reported_while_nothing_sweeps(flow: Flow, make_daemon: MakeDaemon) -> None:
    """An instance without the service reports how far all instances are behind."""
    await publish_many(flow, 3, ["orders"])
    await flow.route()
    await let_pass(flow.superuser, 40)
    daemon = await make_daemon(services={"enabled": ["api"]}, retention=MONTH).start()
    lag = "webhookd_retention_lag_seconds"
    await daemon.until(lambda: daemon.metric(lag) > 9 * 86_400, "behind")
    daemon.stop()
    sweeping = await make_daemon(retention=MONTH).start()
    await until(flow.daemon, "select not exists (select from webhookd.events)")
    await sweeping.until(lambda: sweeping.metric(lag) == 0, "up to date")


async def test_two_instances_share_the_work(flow: Flow, make_daemon: MakeDaemon) -> None:
    """Each row is removed once, and one dies in the middle."""
    await publish_many(flow, 1000, ["orders"])
    await flow.route()
    await let_pass(flow.superuser, 31)
    first, second = [await make_daemon(retention=MONTH).start() for _ in range(2)]
    first.kill()
    # The turn of the dead instance is over after a minute; here it is over now.
    await flow.superuser.execute("update webhookd.retention_turn set held_until = '-infinity'")
    second.sighup()
    await until(flow.daemon, "select not exists (select from webhookd.events)")
    assert await rows(flow.superuser) == {}
    assert second.faults() == []


async def test_stopped_instance_gives_its_turn_back(flow: Flow, make_daemon: MakeDaemon) -> None:
    """A graceful stop in the middle of a sweep: another instance need not wait for the end of the turn."""
    await publish_many(flow, 10, ["orders"])
    await flow.route()
    await let_pass(flow.superuser, 31)
    is_taken = "select held_until > clock_timestamp() from webhookd.retention_turn"
    async with flow.superuser.transaction():
        await flow.superuser.execute("select from webhookd.retention_progress for update")
        daemon = await make_daemon(retention=MONTH).start()
        # Erasures come first in a pass, so the turn is committed when the sweep of events waits for our lock.
        await until(flow.daemon, WAITS_FOR_LOCK)
        assert await flow.daemon.fetchval(is_taken)
        daemon.sigterm()
        assert await daemon.ended() == 0
        assert not await flow.daemon.fetchval(is_taken)


async def test_tenant_is_erased_through_the_api(flow: Flow, endpoint: Endpoint, make_api: MakeApi) -> None:
    """202 with a link to its progress; afterwards the tenant is gone, and the evidence stays."""
    client = await make_api()
    created = await subscriptions.create(flow.daemon, "orders", endpoint.url(), tenant="acme")
    await flow.verify(created.subscription_id)
    event = {"event_type": "orders", "payload": {"name": "Ada"}, "tenant": "acme"}
    for _ in range(3):
        assert (await client.post("/v1/events", event)).status == 202
    await until(flow.daemon, DELIVERED, 3)
    accepted = await client.request("DELETE", "/v1/tenants/acme")
    assert accepted.status == 202
    assert accepted.body["status"] == "running"
    progress = accepted.headers["Location"]
    async with asyncio.timeout(30):
        while (found := await client.get(progress)).body["status"] == "running":  # noqa: ASYNC110  it is polled
            await asyncio.sleep(0.05)
    assert (found.body["events"], found.body["deliveries"], found.body["subscriptions"]) == (3, 3, 1)
    assert found.body["tenant"] is None
    assert (await client.get("/v1/tenants/acme")).status == 404
    assert (await client.request("DELETE", "/v1/tenants/acme")).status == 404
    assert (await client.get("/v1/events/1")).status == 404
    assert [row["id"] for row in (await client.get("/v1/erasures")).body["items"]] == [found.body["id"]]
    assert await rows(flow.superuser) == {}


async def test_subscription_is_erased_through_the_api(
    flow: Flow, endpoint: Endpoint, make_api: MakeApi
) -> None:
    """204 without `erase`; with it 202, and its deliveries are removed in the background."""
    client = await make_api()
    first = await flow.subscribe("orders", endpoint.url())
    second = await flow.subscribe("orders", endpoint.url())
    await client.post("/v1/events", {"event_type": "orders", "payload": 1})
    await until(flow.daemon, DELIVERED, 2)
    assert (await client.request("DELETE", f"/v1/subscriptions/{first}")).status == 204
    for bad in ("?erase=perhaps", "?remove=true"):
        assert (await client.request("DELETE", f"/v1/subscriptions/{second}{bad}")).status == 422
    accepted = await client.request("DELETE", f"/v1/subscriptions/{second}?erase=true")
    assert (accepted.status, accepted.body["subscription_id"]) == (202, second)
    await until(
        flow.daemon,
        "select not exists (select from webhookd.webhook_delivery_sagas where subscription_id = $1)",
        second,
    )
    again = await client.request("DELETE", f"/v1/subscriptions/{second}?erase=true")
    assert again.body["id"] == accepted.body["id"]
    event = (await client.get("/v1/events/1")).body
    assert [delivery["subscription_id"] for delivery in event["deliveries"]] == [first]


async def test_removed_payload_is_shown_as_removed(flow: Flow, endpoint: Endpoint, make_api: MakeApi) -> None:
    """The event tells when, and a resend is refused with a code of its own."""
    await flow.subscribe("orders", endpoint.url())
    client = await make_api(retention={"payloads_days": 7})
    await client.post("/v1/events", {"event_type": "orders", "payload": {"name": "Ada"}})
    await until(flow.daemon, DELIVERED, 1)
    assert (await client.get("/v1/events/1")).body["payload_removed_at"] is None
    await let_pass(flow.superuser, 8)
    client.daemon.sighup()
    await until(flow.daemon, "select payload_removed_at is not null from webhookd.events")
    event = (await client.get("/v1/events/1")).body
    assert event["payload"] is None
    assert event["payload_removed_at"] is not None
    refused = await client.post("/v1/deliveries/1/resend")
    assert (refused.status, refused.body["code"]) == (409, "payload_removed")
