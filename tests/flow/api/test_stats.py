"""GET /v1/stats and /v1/stats/subscriptions: rates and durations, of the tenant that may see them."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.flow.conftest import MakeApi
from tests.support.api import Client, tokens
from tests.support.endpoint import Endpoint
from tests.support.flow import Flow
from tests.support.waiting import until

FINISHED = """
    select count(*) = $1 from webhookd.webhook_delivery_sagas s
    where s.status in ('Completed', 'DeadLettered')"""


async def deliver(api: Client, endpoint: Endpoint, flow: Flow) -> int:
    """Deliver two events, and let a third fail twice; return the subscription."""
    subscription = await api.subscribe(endpoint)
    for _ in range(2):
        await api.event()
    await until(flow.daemon, FINISHED, 2)
    endpoint.answer(500)
    await api.event()
    await until(flow.daemon, FINISHED, 3)
    return int(subscription["id"])


async def test_totals_and_points(make_api: MakeApi, endpoint: Endpoint, flow: Flow) -> None:
    """The last hour by minute: zeros, and what happened; the same of the subscription and of all together."""
    api = await make_api(retry={"max_attempts": 2})
    subscription_id = await deliver(api, endpoint, flow)
    found = await api.get("/v1/stats")
    totals = found.body["totals"]
    assert {name: totals[name] for name in ("delivered", "failed", "completed", "dead_lettered")} == {
        "delivered": 2,
        "failed": 2,
        "completed": 2,
        "dead_lettered": 1,
    }
    assert totals["success_rate"] == 0.5
    assert 0 < totals["p50_ms"] <= totals["p95_ms"] < 30_000
    assert found.body["step_seconds"] == 60
    points = found.body["points"]
    assert len(points) in (60, 61)
    times = [datetime.fromisoformat(point["at"]) for point in points]
    assert times[0] == datetime.fromisoformat(found.body["since"])
    assert times[-1] + timedelta(minutes=1) == datetime.fromisoformat(found.body["until"])
    assert sum(point["delivered"] for point in points[-3:]) == 2
    assert points[0]["delivered"] == points[0]["failed"] == points[0]["dead_lettered"] == 0
    own = await api.get(f"/v1/stats?subscription_id={subscription_id}")
    assert own.body["totals"] == totals


async def test_steps_follow_the_period(make_api: MakeApi) -> None:
    """Longer periods have longer steps, and as many points as the period has steps."""
    api = await make_api()
    now = datetime.now(UTC)
    for period, step_seconds, points in (
        (timedelta(hours=2), 60, 121),
        (timedelta(minutes=175), 300, 36),
        (timedelta(days=1), 3600, 25),
        (timedelta(days=7), 3600, 169),
        (timedelta(days=30), 86_400, 31),
    ):
        since = (now - period).isoformat().replace("+", "%2B")
        found = (await api.get(f"/v1/stats?since={since}")).body
        assert found["step_seconds"] == step_seconds
        assert points - 1 <= len(found["points"]) <= points + 1
        by_day = (await api.get(f"/v1/stats?since={since}&step_seconds=86400")).body
        assert by_day["since"].endswith("T00:00:00Z")


@pytest.mark.parametrize(
    "path",
    [
        "stats?step_seconds=61",
        "stats?step_seconds=60&since=2026-01-01T00:00:00Z&until=2026-01-01T01:00:00Z",
        "stats?since=2026-01-01T00:00:00Z&until=2026-03-01T00:00:00Z",
        "stats?since=2026-01-01T00:00:00Z&until=2026-01-01T00:00:00Z",
        "stats?since=9999-12-31T23:59:59Z",
        "stats?since=0001-01-01T00:00:00%2B14:00&until=0001-01-02T00:00:00Z",
        "stats?until=0001-01-01T00:00:00Z",
        "stats?since=yesterday",
        "stats?since=7",
        "stats?limit=7",
        "stats?subscription_id=0",
        "stats?tenant=a%20b",
        "stats/subscriptions?ids=",
        "stats/subscriptions?ids=7,,8",
        "stats/subscriptions?ids=7,-8",
        "stats/subscriptions?ids=" + ",".join(map(str, range(1, 102))),
        "stats/subscriptions?ids=" + "1" * 5000,
        "stats/subscriptions?hours=25",
    ],
)
async def test_bad_parameters(api: Client, path: str) -> None:
    """Each is refused with 422, and nothing else happens."""
    assert (await api.get(f"/v1/{path}")).problem == (422, "invalid_parameter")


async def test_unknown_subscription(api: Client) -> None:
    """404 alone; in a list it is left out, as is a number that cannot be an id."""
    assert (await api.get("/v1/stats?subscription_id=7")).problem == (404, "not_found")
    for hours in (2, 24, 168, 720):
        found = await api.get(f"/v1/stats/subscriptions?ids=7,9999999999999999999&hours={hours}")
        assert found.body["items"] == []
        assert found.body["step_seconds"] == hours * 150


async def test_tenant_with_too_many_subscriptions(api: Client, flow: Flow) -> None:
    """422 with the limit; one of them can be asked for."""
    insert = """
        insert into webhookd.subscriptions (event_type, event_types, callback_url, tenant)
        select 'a', '{a}', 'https://receiver.example/', 'acme' from generate_series(1, $1::integer)"""
    await flow.superuser.execute(insert, 1000)
    assert (await api.get("/v1/stats?tenant=acme")).status == 200
    await flow.superuser.execute(insert, 1)
    refused = await api.get("/v1/stats?tenant=acme")
    assert refused.problem == (422, "invalid_parameter")
    assert "more than 1000 subscriptions" in refused.body["detail"]
    newest = await flow.superuser.fetchval("select max(id) from webhookd.subscriptions")
    assert (await api.get(f"/v1/stats?subscription_id={newest}")).status == 200


async def test_sparklines_of_many(make_api: MakeApi, endpoint: Endpoint, flow: Flow) -> None:
    """In the given order, each with 24 points; without ids, those that are failing."""
    api = await make_api(retry={"max_attempts": 2}, orchestration={"failing_after": 1})
    busy = await deliver(api, endpoint, flow)
    idle = (await api.subscribe(endpoint, event_type="never.sent"))["id"]
    found = (await api.get(f"/v1/stats/subscriptions?ids={idle},{busy},{idle}")).body
    assert [item["subscription_id"] for item in found["items"]] == [idle, busy]
    nothing, something = found["items"]
    assert nothing["success_rate"] is nothing["p95_ms"] is None
    assert nothing["sparkline"] == {"delivered": [0] * 24, "failed": [0] * 24}
    assert (something["delivered"], something["failed"], something["dead_lettered"]) == (2, 2, 1)
    assert sum(something["sparkline"]["delivered"][-2:]) == 2
    assert len(something["sparkline"]["failed"]) == 24
    failing = (await api.get("/v1/stats/subscriptions?hours=2")).body
    assert [item["subscription_id"] for item in failing["items"]] == [busy]
    assert failing["items"][0]["failed"] == 2


async def test_bound_token_sees_only_its_tenant(make_api: MakeApi, endpoint: Endpoint, flow: Flow) -> None:
    """Another tenant's subscription is 404 or left out, its name is 404, and no total contains it."""
    entries = tokens({"acme": ("ingest", "subscriptions", "read"), "globex": ("read",), "all": ("read",)})
    for entry in entries[:2]:
        entry["tenant"] = entry["name"]
    api = await make_api(
        api={"tokens": entries}, retry={"max_attempts": 2}, orchestration={"failing_after": 1}
    )
    subscription_id = await deliver(api.as_token("acme"), endpoint, flow)
    stranger, owner = api.as_token("globex"), api.as_token("acme")
    assert (await stranger.get(f"/v1/stats?subscription_id={subscription_id}")).problem == (404, "not_found")
    for path in ("stats", "stats/subscriptions"):
        assert (await stranger.get(f"/v1/{path}?tenant=acme")).problem == (404, "not_found")
        assert (await owner.get(f"/v1/{path}?tenant=acme")).status == 200
    assert await delivered(stranger, "stats?tenant=globex") == await delivered(stranger, "stats") == 0
    assert await delivered(owner, "stats") == await delivered(api.as_token("all"), "stats?tenant=acme") == 2
    for query in (f"ids={subscription_id}", "tenant=globex", ""):
        assert (await stranger.get(f"/v1/stats/subscriptions?{query}")).body["items"] == []
    for query in (f"ids={subscription_id}", "tenant=acme", ""):
        [item] = (await owner.get(f"/v1/stats/subscriptions?{query}")).body["items"]
        assert item["delivered"] == 2


async def delivered(api: Client, path: str) -> Any:
    """Return the number of successful attempts."""
    return (await api.get(f"/v1/{path}")).body["totals"]["delivered"]
