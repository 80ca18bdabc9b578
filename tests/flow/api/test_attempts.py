"""GET /v1/attempts, tenants by prefix and erasures of a tenant: what they list, and for whom."""

from typing import Any

import pytest

from tests.flow.conftest import MakeApi
from tests.support.api import Client, is_time, tokens
from tests.support.endpoint import Endpoint
from tests.support.flow import EVENT_TYPE, Flow
from tests.support.waiting import until
from webhookd.core.settings import Scope

SCOPES: tuple[Scope, ...] = ("ingest", "subscriptions", "operate", "read", "jobs")
FINISHED = """
    select not exists (select from webhookd.event_routing_queue)
        and not exists (select from webhookd.webhook_delivery_sagas g
                        where g.status not in ('Completed', 'DeadLettered'))"""


async def test_newest_attempts_have_what_was_sent_and_where(
    make_api: MakeApi, endpoint: Endpoint, flow: Flow
) -> None:
    """Newest first, with each filter; a delivery that failed once has two attempts."""
    api = await make_api(retry={"max_attempts": 2})
    subscription = await api.subscribe(endpoint, tenant="acme")
    other = await api.subscribe(endpoint)
    assert (await api.event(tenant="acme")).status == 202
    await until(flow.daemon, FINISHED)
    endpoint.answer(503)
    assert (await api.event()).status == 202
    await until(flow.daemon, FINISHED)

    items = (await api.get("/v1/attempts")).body["items"]
    assert [item["attempt"] for item in items] == [2, 1, 1]
    assert [item["is_latest"] for item in items] == [True, False, True]
    assert [item["status"] for item in items] == ["Failed", "Failed", "Completed"]
    assert [item["delivery_status"] for item in items] == ["DeadLettered", "DeadLettered", "Completed"]
    delivered = items[-1]
    assert (delivered["event_type"], delivered["tenant"]) == (EVENT_TYPE, "acme")
    assert (delivered["subscription_id"], delivered["callback_url"]) == (
        subscription["id"],
        endpoint.url("/hook"),
    )
    assert is_time(delivered["finished_at"])
    newest = [items[0]["id"], items[1]["id"]]
    for query, expected in {
        "tenant=acme": [delivered["id"]],
        "tenant=globex": [],
        "status=Failed": newest,
        "status=Leased": [],
        f"event_type={EVENT_TYPE}": [*newest, delivered["id"]],
        "event_type=other": [],
        f"subscription_id={other['id']}": newest,
        f"subscription_id={other['id']}&status=Completed": [],
    }.items():
        assert await api.pages(f"/v1/attempts?{query}", 10) == [expected], query
    assert await api.pages("/v1/attempts", 1) == [[item["id"]] for item in items]
    pages = await api.pages("/v1/attempts?status=Failed", 1)
    assert [row_id for page in pages for row_id in page] == newest


@pytest.mark.parametrize(
    "query", ["status=Done", "subscription_id=x", "event_type=a%20b", "limit=0", "cursor=0", "worker=1"]
)
async def test_bad_filter_of_attempts_is_rejected(api: Client, query: str) -> None:
    """422 with the code of a bad parameter."""
    assert (await api.get(f"/v1/attempts?{query}")).problem == (422, "invalid_parameter")


async def bound(make_api: MakeApi) -> Client:
    """Start a daemon with a token of each of two tenants, and one that is bound to none."""
    entries: list[dict[str, Any]] = tokens({"acme": SCOPES, "globex": SCOPES, "all": SCOPES})
    for entry in entries[:2]:
        entry["tenant"] = entry["name"]
    return await make_api(api={"tokens": entries})


async def test_bound_token_sees_only_its_attempts(make_api: MakeApi, endpoint: Endpoint, flow: Flow) -> None:
    """With any filter and any cursor; a filter for the other tenant is 404."""
    api = await bound(make_api)
    await api.as_token("acme").subscribe(endpoint)
    assert (await api.as_token("acme").event()).status == 202
    await until(flow.daemon, FINISHED)
    for query in ("", f"cursor={10**9}", "status=Completed", f"event_type={EVENT_TYPE}", "subscription_id=1"):
        path = f"/v1/attempts?{query}"
        assert len((await api.as_token("acme").get(path)).body["items"]) == 1, query
        assert len((await api.as_token("all").get(path)).body["items"]) == 1, query
        hidden = await api.as_token("globex").get(path)
        assert (hidden.status, hidden.body) == (200, {"items": [], "next_cursor": None}), query
    assert (await api.as_token("globex").get("/v1/attempts?tenant=acme")).problem == (404, "not_found")


async def test_tenants_by_prefix(make_api: MakeApi) -> None:
    """In the order of their names, page by page; upper case and _ are compared as they are."""
    api = await bound(make_api)
    client = api.as_token("all")
    names = ["acme", "acme-2", "acme_2", "acmeZ", "Acme", "acm", "bcme", "acme.x:y"]
    for name in names:
        assert (await client.request("PUT", f"/v1/tenants/{name}", json={})).status == 201
    ids = {row["tenant"]: row["id"] for row in (await client.get("/v1/tenants")).body["items"]}
    for prefix in ("acme", "acme_", "A", "acme.x:y", "zzz"):
        expected = [ids[name] for name in sorted(names) if name.startswith(prefix)]
        for limit in (2, 100):
            pages = await client.pages(f"/v1/tenants?prefix={prefix}", limit)
            assert [row_id for page in pages for row_id in page] == expected, prefix
    for prefix in ("", "a b", "%25", "x" * 101):
        answer = await client.get(f"/v1/tenants?prefix={prefix}")
        assert answer.problem == (422, "invalid_parameter"), prefix
    gone = await client.get("/v1/tenants?prefix=a&cursor=999")
    assert gone.problem == (422, "invalid_parameter")
    assert await api.as_token("globex").pages("/v1/tenants?prefix=a", 10) == [[]]
    assert await api.as_token("acme").pages("/v1/tenants?prefix=a", 10) == [[ids["acme"]]]


async def test_erasures_of_a_tenant(make_api: MakeApi, flow: Flow) -> None:
    """Only those of the tenant; a bound token cannot ask for another."""
    api = await bound(make_api)
    for tenant in ("acme", "globex"):
        # Tried in the future: the service leaves it alone.
        await flow.superuser.execute(
            "insert into webhookd.erasures (tenant, requested_by, tried_at) values ($1, 'test', 'infinity')",
            tenant,
        )
    client = api.as_token("all")
    assert await client.pages("/v1/erasures?tenant=acme", 10) == [[1]]
    assert await client.pages("/v1/erasures", 10) == [[2, 1]]
    assert await api.as_token("globex").pages("/v1/erasures", 10) == [[2]]
    assert (await api.as_token("globex").get("/v1/erasures?tenant=acme")).problem == (404, "not_found")
