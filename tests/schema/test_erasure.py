"""Erasure in the database: nothing of a tenant or a subscription is left, and nothing else is touched."""

import hashlib
import json
from typing import TYPE_CHECKING

import pytest

from tests.support.flow import POLICY, Flow
from tests.support.sweeps import HOLDER, containing, erase, let_pass, rows
from webhookd.console import links
from webhookd.core.errors import Refusal, Refused
from webhookd.core.states import SagaStatus
from webhookd.db.connection import translated
from webhookd.deliveries import attempts, dead_letters, reads, subscriptions, tenants
from webhookd.deliveries.explain import Limits
from webhookd.retention import queries

if TYPE_CHECKING:
    from tests.support.database import Connection, Database

# Texts that no other row has, one for each column where a customer's text can be.
MARKS = {
    name: f"mark{name}7"
    for name in (
        "tenant", "name", "type", "payload", "key", "correlation", "label", "value", "host", "moved",
        "description", "header", "secret", "filter", "response", "actor",
    )
}  # fmt: skip
TENANT = MARKS["tenant"]
OTHER = "globex"


async def create_everything(flow: Flow, tenant: str, marks: dict[str, str]) -> int:
    """Create rows of a tenant in every table and state; returns its subscription."""
    secret = "whsec_" + "QUFB" * 8 + marks["secret"].ljust(12, "A")[:12]
    await tenants.put(flow.daemon, tenant, {"name": marks["name"]})
    created = await subscriptions.create(
        flow.daemon,
        f"{marks['type']}.*",
        f"https://{marks['host']}.example/hook",
        tenant=tenant,
        filter={"region": marks["filter"]},
        headers={"x-customer": marks["header"]},
        description=marks["description"],
        secret=secret,
    )
    subscription_id = created.subscription_id
    await flow.verify(subscription_id)
    for kind in ("portal", "login"):
        await links.create_link(
            flow.daemon,
            kind,
            token_fingerprint="0a" * 16,
            actor=marks["actor"],
            expires_in_seconds=600,
            tenant=tenant,
            capabilities=["view"] if kind == "portal" else [],
        )
    await subscriptions.update(
        flow.daemon, subscription_id, {"callback_url": f"https://{marks['moved']}.example/hook"}
    )
    labels = json.dumps({"region": marks["filter"], marks["label"]: marks["value"]})

    async def publish(number: int) -> None:
        await flow.daemon.execute(
            "select webhookd.publish($1, $2::text, $3, $4, $5, $6)",
            f"{marks['type']}.created",
            json.dumps({"text": marks["payload"]}),
            f"{marks['key']}-{number}",
            marks["correlation"],
            tenant,
            labels,
        )

    # Completed, DeadLettered with a requeue, PendingRetry, Pending and not routed yet.
    await publish(1)
    await flow.route()
    await attempt(flow, 200, marks["response"])
    await publish(2)
    await flow.route()
    await attempt(flow, 500, marks["response"], max_attempts=1)
    letter_id = await flow.superuser.fetchval("select max(id) from webhookd.dead_letters")
    await dead_letters.requeue(flow.daemon, letter_id)
    await attempt(flow, 500, marks["response"])
    await publish(3)
    await flow.route()
    await publish(4)
    return subscription_id


async def attempt(flow: Flow, status: int, excerpt: str, max_attempts: int = 5) -> None:
    """Make one attempt at everything that is due, with a response that is stored."""
    policy = POLICY._replace(max_attempts=max_attempts, base_delay_seconds=60)
    await flow.start(max_attempts=max_attempts)
    reports = [
        attempts.Report(lease.job_id, lease.lease_token, status, response_excerpt=excerpt.encode())
        for lease in await flow.claim()
    ]
    await attempts.report(flow.daemon, reports)
    await flow.apply(policy)


async def test_no_column_contains_anything_of_an_erased_tenant(flow: Flow) -> None:
    """Every table and column is searched, also those that are added later; before, all marks are found."""
    await create_everything(flow, TENANT, MARKS)
    others = {name: f"other{name}" for name in MARKS}
    await create_everything(flow, OTHER, others)
    untouched = await fingerprint(flow.superuser)
    found = {mark for _, mark in await containing(flow.superuser, list(MARKS.values()))}
    assert found == set(MARKS.values()), "a mark is in no row: the search proves nothing about it"
    row = await flow.superuser.fetchrow(
        """
        with e as (select id from webhookd.events where tenant = $1)
        select (select count(*) from e) as events,
               (select count(*) from webhookd.webhook_delivery_sagas join e on e.id = event_id) as deliveries,
               (select count(*) from webhookd.webhook_delivery_jobs join e on e.id = event_id) as attempts,
               (select count(*) from webhookd.dead_letters join e on e.id = event_id) as dead_letters
        """,
        TENANT,
    )
    expected = dict(row or {})
    erasure = await queries.request_tenant_erasure(flow.daemon, TENANT, "support")
    assert await erase(flow, batch_size=2) == [erasure["id"]]
    assert await containing(flow.superuser, list(MARKS.values())) == []
    assert await fingerprint(flow.superuser) == untouched
    evidence = await queries.erasure(flow.daemon, erasure["id"])
    assert evidence["finished_at"] is not None
    assert evidence["requested_by"] == "support"
    assert evidence["tenant"] is None
    assert evidence["tenant_sha256"] == hashlib.sha256(TENANT.encode()).hexdigest()
    assert {name: evidence[name] for name in expected} == expected
    assert min(expected.values()) > 0


async def fingerprint(superuser: "Connection") -> list[str]:
    """Return the rows of the other tenant."""
    return [
        row[0]
        for table, condition in {
            "events": "t.tenant = $1",
            "event_labels": "t.tenant = $1",
            "subscriptions": "t.tenant = $1",
            "tenants": "t.tenant = $1",
            "dead_letters": "t.tenant = $1",
            "console_links": "t.tenant = $1",
            "webhook_delivery_sagas": "t.event_id in (select id from webhookd.events where tenant = $1)",
            "webhook_delivery_jobs": "t.event_id in (select id from webhookd.events where tenant = $1)",
            "subscription_secrets": "t.subscription_id in"
            " (select id from webhookd.subscriptions where tenant = $1)",
        }.items()
        for row in await superuser.fetch(
            f"select t::text from webhookd.{table} t where {condition} order by 1", OTHER
        )
    ]


async def test_erasure_stops_deliveries_at_once(flow: Flow) -> None:
    """Before the first batch: the secret is gone, nothing is routed, started or claimed."""
    await create_everything(flow, TENANT, MARKS)
    await queries.request_tenant_erasure(flow.daemon, TENANT, "support")
    assert (await flow.route()).sagas == 0
    assert await flow.start() == []
    assert await flow.claim() == []
    assert await flow.superuser.fetchval("select count(*) from webhookd.subscription_secrets") == 0


async def test_erasure_continues_after_a_crash(flow: Flow, database: "Database") -> None:
    """Its position is in the database: another session continues, and counts add up."""
    await create_everything(flow, TENANT, MARKS)
    erasure = await queries.request_tenant_erasure(flow.daemon, TENANT, "support")
    transaction = flow.daemon.transaction()
    await transaction.start()
    await queries.erase(flow.daemon, HOLDER, 1, await queries.database_time(flow.daemon))
    await transaction.rollback()
    await queries.erase(flow.daemon, HOLDER, 1, await queries.database_time(flow.daemon))
    other = await Flow.open(database)
    assert await erase(other, batch_size=1) == [erasure["id"]]
    assert (await queries.erasure(flow.daemon, erasure["id"]))["events"] == 4
    assert await rows(flow.superuser) == {}


async def test_repeated_request_returns_the_running_erasure(flow: Flow) -> None:
    """After its end, the tenant does not exist, and can be created again."""
    await create_everything(flow, TENANT, MARKS)
    first = await queries.request_tenant_erasure(flow.daemon, TENANT, "support")
    second = await queries.request_tenant_erasure(flow.daemon, TENANT, "another")
    assert first["id"] == second["id"]
    for call in (
        tenants.put(flow.daemon, TENANT, {"name": "again"}),
        subscriptions.create(flow.daemon, "a", "https://a.example/", tenant=TENANT),
    ):
        with pytest.raises(Refused) as refused, translated():
            await call
        assert refused.value.refusal is Refusal.BEING_ERASED
    await erase(flow)
    with pytest.raises(Refused) as gone, translated():
        await queries.request_tenant_erasure(flow.daemon, TENANT, "support")
    assert gone.value.refusal is Refusal.NOT_FOUND
    assert await tenants.put(flow.daemon, TENANT, {}) is True


async def test_tenant_that_only_has_events_is_erased(flow: Flow) -> None:
    """An event can have a tenant that has no subscription and no row of its own."""
    await flow.daemon.execute("select webhookd.publish('a', '{}'::text, tenant => 'lonely')")
    await queries.request_tenant_erasure(flow.daemon, "lonely", "support")
    assert len(await erase(flow)) == 1
    assert await rows(flow.superuser) == {}


async def test_jobs_of_erased_events_are_removed(flow: Flow) -> None:
    """A finished job goes with its event; one that runs keeps the event until it is finished."""
    await flow.daemon.execute("select webhookd.fn_job_enable(true, 'me')")
    await flow.daemon.execute("select webhookd.fn_job_register_event('a', 'report', 'DOT', 'me')")
    await flow.daemon.execute(
        "select webhookd.publish('a', '{}'::text, correlation_id => $1, tenant => $2)",
        MARKS["correlation"],
        TENANT,
    )
    await flow.daemon.execute("select webhookd.fn_job_spawn_from_events()")
    await queries.request_tenant_erasure(flow.daemon, TENANT, "support")
    assert await erase(flow) == []
    job_id = await flow.superuser.fetchval("select job_id from webhookd.job_queue")
    await flow.daemon.execute("select webhookd.fn_job_cancel($1, 'gone', 'me')", job_id)
    assert await erase(flow) == [], "the job's own events are not routed yet"
    await flow.route()
    assert len(await erase(flow)) == 1
    assert await containing(flow.superuser, [TENANT, MARKS["correlation"]]) == []


async def test_erased_subscription_leaves_its_events(flow: Flow) -> None:
    """Deliveries, attempts, dead letters, change log and the row are removed; events and others stay."""
    subscription_id = await create_everything(flow, TENANT, MARKS)
    await flow.route()
    erasure = await queries.request_subscription_erasure(flow.daemon, subscription_id, "support", None)
    assert await erase(flow, batch_size=1) == [], "transactions from before the deletion may still run"
    await let_pass(flow.superuser, 20 / 86_400)
    assert await erase(flow, batch_size=1) == [erasure["id"]]
    kept = [
        MARKS[name] for name in ("tenant", "name", "type", "payload", "key", "correlation", "filter", "actor")
    ]
    gone = [mark for mark in MARKS.values() if mark not in (*kept, MARKS["label"], MARKS["value"])]
    assert await containing(flow.superuser, gone) == []
    left = await rows(flow.superuser)
    assert left.pop("event_labels") == 8
    assert left == {"events": 4}
    assert await flow.superuser.fetchval("select count(*) from webhookd.subscriptions") == 0
    evidence = await queries.erasure(flow.daemon, erasure["id"], TENANT)
    assert evidence["deliveries"] == 5
    with pytest.raises(Refused):
        await queries.erasure(flow.daemon, erasure["id"], OTHER)


async def test_subscription_with_a_request_in_flight_waits(flow: Flow) -> None:
    """The report must find its job; then the erasure ends."""
    await flow.saga_in(SagaStatus.IN_PROGRESS)
    [lease] = await flow.claim()
    subscription_id = await flow.superuser.fetchval("select id from webhookd.subscriptions")
    await queries.request_subscription_erasure(flow.daemon, subscription_id, "support", None)
    await let_pass(flow.superuser, 20 / 86_400)
    assert await erase(flow) == []
    assert (await flow.report(lease)).value == "accepted"
    assert await erase(flow) == [], "the result is not applied yet"
    await flow.apply()
    assert len(await erase(flow)) == 1
    assert await rows(flow.superuser) == {"events": 1}


async def test_deleted_subscription_can_be_erased_later(flow: Flow) -> None:
    """And a repeated request returns the running erasure."""
    await flow.saga_in(SagaStatus.COMPLETED)
    subscription_id = await flow.superuser.fetchval("select id from webhookd.subscriptions")
    await subscriptions.delete(flow.daemon, subscription_id)
    first = await queries.request_subscription_erasure(flow.daemon, subscription_id, "a", None)
    second = await queries.request_subscription_erasure(flow.daemon, subscription_id, "b", None)
    assert first["id"] == second["id"]
    await let_pass(flow.superuser, 1)
    assert await erase(flow) == [first["id"]]
    event = await reads.event(
        flow.daemon, await flow.superuser.fetchval("select id from webhookd.events"), Limits(5, 10)
    )
    assert event["deliveries"] == []


async def test_stuck_erasure_does_not_delay_others(flow: Flow) -> None:
    """One waits for a job, another for a request that ends meanwhile: each is tried again."""
    await flow.daemon.execute("select webhookd.fn_job_enable(true, 'me')")
    await flow.daemon.execute("select webhookd.fn_job_register_event('a', 'report', 'DOT', 'me')")
    await flow.daemon.execute("select webhookd.publish('a', '{}'::text, tenant => 'stuck')")
    await flow.daemon.execute("select webhookd.fn_job_spawn_from_events()")
    created = await subscriptions.create(flow.daemon, "b", "https://b.example/", tenant="busy")
    await flow.verify(created.subscription_id)
    await flow.daemon.execute("select webhookd.publish('b', '{}'::text, tenant => 'busy')")
    await flow.route()
    await flow.start()
    [lease] = await flow.claim()
    for tenant in ("stuck", "busy"):
        await queries.request_tenant_erasure(flow.daemon, tenant, "support")
    assert await erase(flow) == []
    await flow.report(lease)
    await flow.apply()
    assert len(await erase(flow)) == 1
    assert (
        await flow.superuser.fetchval("select tenant from webhookd.erasures where finished_at is null")
        == "stuck"
    )


async def test_tenant_that_goes_on_publishing_is_erased(flow: Flow) -> None:
    """A walk ends at the events of its start; later ones are new data."""
    for _ in range(3):
        await flow.daemon.execute("select webhookd.publish('a', '{}'::text, tenant => 'acme')")
    await queries.request_tenant_erasure(flow.daemon, "acme", "support")
    since = await queries.database_time(flow.daemon)
    finished, calls = None, 0
    while finished is None and calls < 10:
        _, _, finished = await queries.erase(flow.daemon, HOLDER, 1, since)
        await flow.daemon.execute("select webhookd.publish('a', '{}'::text, tenant => 'acme')")
        calls += 1
    assert finished is not None
    assert (await queries.erasure(flow.daemon, finished))["events"] == 3


async def test_jobs_of_jobs_are_erased(flow: Flow) -> None:
    """A job that a job of the tenant's event enqueued goes too, with all lifecycle events."""
    await flow.daemon.execute("select webhookd.fn_job_enable(true, 'me')")
    await flow.daemon.execute("select webhookd.fn_job_register_event('a', 'report', 'DOT', 'me')")
    await flow.daemon.execute("select webhookd.publish('a', '{}'::text, tenant => $1)", TENANT)
    await flow.daemon.execute("select webhookd.fn_job_spawn_from_events()")
    parent = await flow.superuser.fetchval("select job_id from webhookd.job_queue")
    await flow.daemon.execute(
        """select webhookd.fn_job_enqueue('child', 'one', 'DOT', p_actor => 'me', p_parent_job_id => $1,
           p_target_ref => $2)""",
        parent,
        MARKS["value"],
    )
    for job_id in [row[0] for row in await flow.superuser.fetch("select job_id from webhookd.job_queue")]:
        await flow.daemon.execute("select webhookd.fn_job_cancel($1, 'gone', 'me')", job_id)
    await flow.route()
    await queries.request_tenant_erasure(flow.daemon, TENANT, "support")
    assert len(await erase(flow)) == 1
    assert await containing(flow.superuser, [TENANT, MARKS["value"], str(parent)]) == []
