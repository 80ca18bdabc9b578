"""Tenants, patterns, filters and labels: which event reaches which subscription, and which is held."""

from datetime import timedelta
from itertools import product
from typing import Any

import pytest

from tests.support.catalog import refusal
from tests.support.flow import ADDRESS, Flow
from tests.support.history import watch
from webhookd.deliveries import ingest, router, subscriptions, tenants

ROUTED = """
    select e.id, array_agg(s.subscription_id order by s.subscription_id) from webhookd.events e
    join webhookd.webhook_delivery_sagas s on s.event_id = e.id group by e.id"""


async def subscribe(flow: Flow, *event_types: str, **fields: Any) -> int:
    """Create a verified subscription."""
    created = await subscriptions.create(flow.daemon, None, ADDRESS, event_types=list(event_types), **fields)
    await flow.verify(created.subscription_id)
    return created.subscription_id


async def publish(flow: Flow, event_type: str, tenant: str = "", labels: str | None = None) -> int:
    """Publish an event."""
    [accepted] = await ingest.publish(
        flow.daemon, [ingest.NewEvent(event_type, "{}", tenant=tenant, labels=labels)]
    )
    return accepted.id


async def routed(flow: Flow) -> dict[int, list[int]]:
    """Route everything, and return the subscriptions of each event that has any."""
    await router.route(flow.daemon, 10_000)
    return dict(await flow.superuser.fetch(ROUTED))  # type: ignore[arg-type]


async def test_each_pattern_matches_its_types(flow: Flow) -> None:
    """An exact type, everything below a prefix, or everything; a prefix matches whole words only."""
    patterns = ["order", "order.created", "order.*", "order.item.*", "*", "ord.*", "other.type"]
    ids = {pattern: await subscribe(flow, pattern) for pattern in patterns}
    expected = {
        "order": {"order", "*"},
        "order.created": {"order.created", "order.*", "*"},
        "order.item.added": {"order.*", "order.item.*", "*"},
        "orders.created": {"*"},
        "x": {"*"},
    }
    events = {await publish(flow, event_type): event_type for event_type in expected}
    found = await routed(flow)
    names = {subscription_id: pattern for pattern, subscription_id in ids.items()}
    assert {events[event_id]: {names[each] for each in found[event_id]} for event_id in found} == expected


async def test_overlapping_patterns_make_one_delivery(flow: Flow) -> None:
    """However many patterns of a subscription match, and however often one is repeated."""
    subscription_id = await subscribe(flow, "order.created", "order.*", "*", "order.*")
    event_id = await publish(flow, "order.created")
    assert await routed(flow) == {event_id: [subscription_id]}


async def test_tenants_do_not_see_each_other(flow: Flow) -> None:
    """Every event reaches only the subscriptions of its own tenant, and without one only those without."""
    names = ["", "acme", "globex"]
    owners = {await subscribe(flow, "*", tenant=name): name for name in names}
    events = {await publish(flow, "order.created", name): name for name in names}
    found = await routed(flow)
    assert {events[event_id]: [owners[each] for each in ids] for event_id, ids in found.items()} == {
        name: [name] for name in names
    }


async def test_database_refuses_a_delivery_to_another_tenant(flow: Flow) -> None:
    """Also for the table's owner."""
    subscription_id = await subscribe(flow, "*", tenant="acme")
    event_id = await publish(flow, "order.created", "globex")
    insert = "insert into webhookd.webhook_delivery_sagas (event_id, subscription_id) values ($1, $2)"
    assert await refusal(flow.superuser, insert, event_id, subscription_id) == "WH411"


async def test_filter_asks_for_labels(flow: Flow) -> None:
    """All labels of the filter must be there with their values; more labels do not matter."""
    filters: list[dict[str, str]] = [{}, {"region": "eu"}, {"region": "us"}, {"region": "eu", "tier": "gold"}]
    ids = [await subscribe(flow, "*", filter=each) for each in filters]
    labels: list[str | None] = [None, "{}", '{"region": "eu"}', '{"tier": "gold", "region": "eu", "a": "b"}']
    events = [await publish(flow, "order.created", labels=each) for each in labels]
    found = await routed(flow)
    assert [[ids.index(each) for each in found[event_id]] for event_id in events] == [
        [0],
        [0],
        [0, 1],
        [0, 1, 3],
    ]


async def test_same_type_with_other_labels_is_routed_by_its_own_labels(flow: Flow) -> None:
    """Events are routed in groups; a group has one tenant, type and set of labels."""
    eu = await subscribe(flow, "*", filter={"region": "eu"}, tenant="acme")
    combinations = list(product(["", "acme"], [None, '{"region": "eu"}', '{"region": "us"}']))
    events = {await publish(flow, "order.created", *each): each for each in combinations}
    assert {events[event_id]: ids for event_id, ids in (await routed(flow)).items()} == {
        ("acme", '{"region": "eu"}'): [eu]
    }


async def test_changed_patterns_and_filters_apply_to_later_events(flow: Flow) -> None:
    """`event_type` alone replaces all patterns, and an empty filter accepts every event again."""
    subscription_id = await subscribe(flow, "order.*", filter={"region": "eu"})
    await publish(flow, "order.created")
    assert await routed(flow) == {}
    await subscriptions.update(flow.daemon, subscription_id, {"filter": {}, "event_type": "invoice.paid"})
    await publish(flow, "order.created")
    paid = await publish(flow, "invoice.paid")
    assert await routed(flow) == {paid: [subscription_id]}
    await subscriptions.update(flow.daemon, subscription_id, {"event_types": ["a", "b.*"]})
    found = await flow.superuser.fetchrow("select event_type, event_types from webhookd.subscriptions")
    assert found is not None
    assert tuple(found) == ("a", ["a", "b.*"])


async def test_routing_uses_one_set_of_patterns(flow: Flow, database: Any) -> None:
    """While a change of patterns is not committed, the old ones hold, all of them."""
    subscription_id = await subscribe(flow, "a", "b")
    other = await database.connect("daemon")
    async with other.transaction():
        await subscriptions.update(other, subscription_id, {"event_types": ["c", "d"]})
        before = [await publish(flow, event_type) for event_type in "abcd"]
        assert set(await routed(flow)) == set(before[:2])
    after = [await publish(flow, event_type) for event_type in "abcd"]
    assert set(await routed(flow)) == {*before[:2], *after[2:]}


async def test_key_is_unique_in_its_tenant(flow: Flow) -> None:
    """The same key of another tenant is another event; with other labels it is a conflict."""

    async def publish_key(tenant: str, labels: str | None = None) -> tuple[int, bool]:
        event = ingest.NewEvent("order.created", "{}", "key", None, tenant, labels)
        [accepted] = await ingest.publish(flow.daemon, [event])
        return accepted.id, accepted.duplicate

    first, second, third = [await publish_key(tenant) for tenant in ("", "acme", "globex")]
    assert len({first, second, third}) == 3
    assert await publish_key("acme") == (second[0], True)
    statement = (
        "select webhookd.publish('order.created', '{}', 'key', tenant => 'acme', labels => '{\"a\": \"b\"}')"
    )
    assert await refusal(flow.daemon, statement) == "WH409"


@pytest.mark.parametrize(
    "payload", ["'{\"a\": 1}'", "'{\"a\": 1}'::text", "'{\"a\": 1}'::json", "'{\"a\": 1}'::jsonb"]
)
async def test_payload_of_each_type_is_published(flow: Flow, payload: str) -> None:
    """A literal without a type is text."""
    await flow.daemon.execute(f"select webhookd.publish('order.created', {payload}, labels => '{{}}')")
    assert await flow.daemon.fetchval("select payload::text from webhookd.events") == '{"a": 1}'


async def test_paused_subscription_collects_deliveries(flow: Flow) -> None:
    """All events that were published meanwhile are delivered after it is resumed."""
    subscription_id = await subscribe(flow, "*")
    await subscriptions.update(flow.daemon, subscription_id, {"paused": True})
    for _ in range(3):
        await publish(flow, "order.created")
    await flow.route()
    assert await flow.attempt(200) == []
    await subscriptions.update(flow.daemon, subscription_id, {"paused": False})
    assert len(await flow.attempt(200)) == 3


async def test_tenant_that_is_not_active_is_held(flow: Flow) -> None:
    """With all its subscriptions, also new ones, and no others."""
    await subscribe(flow, "*", tenant="acme")
    assert await tenants.put(flow.daemon, "acme", {"active": False}) is False
    await subscribe(flow, "*", tenant="acme")
    await subscribe(flow, "*", tenant="globex")
    for tenant in ("acme", "globex"):
        await publish(flow, "order.created", tenant)
    await flow.route()
    assert len(await flow.attempt(200)) == 1
    await tenants.put(flow.daemon, "acme", {"active": True})
    assert len(await flow.attempt(200)) == 2


async def test_tenant_is_created_by_put_or_by_its_first_subscription(flow: Flow) -> None:
    """And limited: also if its limit is lowered below what it has."""
    assert await tenants.put(flow.daemon, "acme", {"name": "Acme", "max_subscriptions": 1}) is True
    assert await tenants.put(flow.daemon, "acme", {}) is False
    await subscribe(flow, "*", tenant="acme")
    await subscribe(flow, "*", tenant="globex")
    create = f"select webhookd.create_subscription('a', '{ADDRESS}', tenant => 'acme')"
    assert await refusal(flow.daemon, create) == "WH414"
    await tenants.put(flow.daemon, "acme", {"max_subscriptions": None})
    await subscribe(flow, "*", tenant="acme")
    found = await flow.superuser.fetch("select tenant, name, active from webhookd.tenants order by tenant")
    assert [tuple(row) for row in found] == [("acme", "Acme", True), ("globex", None, True)]


async def test_rate_limit_bounds_what_is_started(flow: Flow) -> None:
    """A bucket holds the attempts of one second, refills with time, and counts attempts without a lease."""
    limited = await subscribe(flow, "*", max_per_second=2)
    free = await subscribe(flow, "*")
    for _ in range(12):
        await publish(flow, "order.created")
    await flow.route()

    async def started() -> dict[int, int]:
        return {each.subscription_id: each.started for each in await flow.start([limited, free])}

    async def let_pass(seconds: float) -> None:
        await flow.superuser.execute(
            "update webhookd.subscription_rates set refilled_at = refilled_at - make_interval(secs => $1)",
            seconds,
        )

    assert await started() == {limited: 2, free: 12}
    await let_pass(10)
    assert await started() == {limited: 0, free: 0}, "two attempts wait for a worker"
    await flow.claim()
    await let_pass(0.6)
    assert (await started())[limited] == 1
    await flow.claim()
    await let_pass(100)
    assert (await started())[limited] == 2, "the bucket holds no more than one second's worth"
    await flow.claim()
    await subscriptions.update(flow.daemon, limited, {"max_per_second": None})
    assert (await started())[limited] == 7


async def test_interrupted_replay_creates_each_delivery_once(flow: Flow) -> None:
    """However it is cut into batches, and however often a batch is repeated."""
    for number in range(7):
        await publish(flow, "order.created" if number % 2 else "other.type")
    await flow.route()
    subscription_id = await subscribe(flow, "order.*")
    now = await flow.daemon.fetchval("select clock_timestamp()")
    what = router.Replay(subscription_id, now - timedelta(days=1), now, None, True, now)
    after_id, created = 0, 0
    while True:
        for _ in range(2):
            batch = await router.replay(flow.daemon, what, after_id, 2, dry_run=False)
            created += batch.created
        after_id = batch.last_event_id
        if batch.examined < 2:
            break
    assert created == 3
    rows = await flow.daemon.fetch("select event_id from webhookd.webhook_delivery_sagas order by id")
    assert [row[0] for row in rows] == [2, 4, 6]


async def test_routing_reads_few_blocks_beside_many_tenants(flow: Flow) -> None:
    """100,000 subscriptions of 10,000 tenants: an event costs as much as with a few."""
    async with flow.superuser.transaction():
        await flow.superuser.execute("set local session_replication_role = replica")
        await flow.superuser.execute(
            """
            insert into webhookd.subscriptions (event_type, event_types, callback_url, verified, tenant)
            select t.pattern, array[t.pattern], 'https://receiver.example/', true, 't' || i % 10000
            from generate_series(0, 99999) i
            cross join lateral (
                select (array['*', 'order.*', 'order.created', 'other.a', 'other.b'])[1 + i / 10000 % 5]
            ) as t (pattern)
            """
        )
        await flow.superuser.execute(
            "insert into webhookd.subscription_types (tenant, pattern, subscription_id, routable) "
            "select tenant, event_type, id, routable from webhookd.subscriptions"
        )
    for number in range(20):
        await publish(flow, "order.created", f"t{number}")
    routed_events, touched = await watch(flow.superuser, lambda connection: router.route(connection, 20))
    assert (routed_events.events, routed_events.sagas) == (20, 120)
    assert touched.scans["subscription_types"] == 0, "no sequential scan"
    # For each of four patterns a descent of three levels, and a block of the table for each match.
    assert touched.blocks["subscription_types"] <= 20 * (4 * 4 + 6)
