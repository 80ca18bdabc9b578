"""Tenants through the API: a token that is bound to one sees and changes nothing of another."""

from typing import Any

from tests.flow.conftest import MakeApi
from tests.support.api import Client, tokens
from tests.support.endpoint import Endpoint
from tests.support.flow import EVENT_TYPE, Flow
from tests.support.waiting import until
from webhookd.core.settings import Scope

SCOPES: tuple[Scope, ...] = ("ingest", "subscriptions", "operate", "read", "jobs")
# Every table that has rows of a tenant.
TABLES = (
    "events",
    "event_labels",
    "tenants",
    "subscriptions",
    "subscription_types",
    "subscription_changes",
    "endpoint_health",
    "webhook_delivery_sagas",
    "webhook_delivery_jobs",
    "dead_letters",
    "console_links",
)
SECRETS = "select * from webhookd.subscription_secrets order by subscription_id"


async def two_tenants(make_api: MakeApi) -> Client:
    """Start a daemon with a token of each of two tenants, and one that is bound to none."""
    entries = tokens({"acme": SCOPES, "globex": SCOPES, "all": SCOPES})
    for entry in entries[:2]:
        entry["tenant"] = entry["name"]
    return await make_api(api={"tokens": entries}, retry={"max_attempts": 1})


async def fill(api: Client, endpoint: Endpoint, flow: Flow) -> dict[str, int]:
    """Give the token's tenant one row of each kind, and return their ids."""
    subscription = await api.subscribe(endpoint, description="secret plans")
    endpoint.answer(500)
    event = await api.event(
        idempotency_key="key", correlation_id="trace", labels={"region": "eu"}, payload="secret payload"
    )
    assert event.status == 202
    await until(
        flow.daemon,
        "select exists (select from webhookd.dead_letters d where d.event_id = $1)",
        event.body["id"],
    )
    row = await flow.daemon.fetchrow(
        "select id, saga_id from webhookd.dead_letters where event_id = $1", event.body["id"]
    )
    assert row is not None
    return {
        "subscriptions": subscription["id"],
        "events": event.body["id"],
        "deliveries": row["saga_id"],
        "dead-letters": row["id"],
    }


async def contents(flow: Flow) -> dict[str, list[Any]]:
    """Return every row."""
    queries = {table: f"select t::text from webhookd.{table} t order by 1" for table in TABLES}
    return {
        name: [tuple(row) for row in await flow.superuser.fetch(query)]
        for name, query in (queries | {"secrets": SECRETS}).items()
    }


async def test_bound_token_cannot_reach_another_tenant(
    make_api: MakeApi, endpoint: Endpoint, flow: Flow
) -> None:
    """Every route of the OpenAPI document, with the ids of the other tenant: 404, or 403 for the instance."""
    api = await two_tenants(make_api)
    acme, stranger = api.as_token("acme"), api.as_token("globex")
    ids = await fill(acme, endpoint, flow)
    before = await contents(flow)
    bodies = {
        "PATCH /v1/subscriptions/{id}": {"active": False},
        "POST /v1/subscriptions/{id}/replay": {"since": "2026-01-01T00:00:00Z", "dry_run": False},
        "PUT /v1/tenants/{id}": {"active": False},
    }
    document = (await api.get("/openapi.json")).body
    seen = 0
    for path, operations in document["paths"].items():
        for method in (name.upper() for name in operations if "{id}" in path):
            group = path.split("/")[2]
            row_id = ids.get(group, "acme" if group == "tenants" else "0b9c2240-6f0e-4d3c-9b1a-5cbe0d3b6262")
            options = (
                {"json": bodies.get(f"{method} {path}", {})} if method in ("POST", "PATCH", "PUT") else {}
            )
            answer = await stranger.request(method, path.replace("{id}", str(row_id)), **options)
            is_instance = group.startswith("job") or (group == "tenants" and method in ("PUT", "DELETE"))
            assert answer.problem == ((403, "forbidden") if is_instance else (404, "not_found")), path
            seen += group in ids
    assert seen == 13
    assert await contents(flow) == before


async def test_bound_token_lists_only_its_tenant(make_api: MakeApi, endpoint: Endpoint, flow: Flow) -> None:
    """With any filter and any cursor; a filter for the other tenant is 404."""
    api = await two_tenants(make_api)
    ids = await fill(api.as_token("acme"), endpoint, flow)
    stranger = api.as_token("globex")
    lists = {
        "events": [
            f"event_type={EVENT_TYPE}",
            "idempotency_key=key",
            "correlation_id=trace",
            "label.region=eu",
            "created_after=2020-01-01T00:00:00Z",
        ],
        "subscriptions": [
            f"event_type={EVENT_TYPE}",
            "active=true",
            "verified=true",
            "search=secret",
            f"ids={ids['subscriptions']}",
        ],
        "deliveries": [
            "status=DeadLettered",
            f"subscription_id={ids['subscriptions']}",
            f"event_id={ids['events']}",
            f"event_type={EVENT_TYPE}",
            "error_code=HTTP_500",
            "created_after=2020-01-01T00:00:00Z",
        ],
        "dead-letters": [
            f"subscription_id={ids['subscriptions']}",
            "error_code=HTTP_500",
            "failed_after=2020-01-01T00:00:00Z",
        ],
        "tenants": [],
    }
    for name, filters in lists.items():
        for query in ("", f"cursor={10**9}", *filters):
            shown = await api.as_token("acme").get(f"/v1/{name}?{query}")
            hidden = await stranger.get(f"/v1/{name}?{query}")
            if query.startswith("cursor") and name in ("events", "dead-letters"):
                assert hidden.status in (200, 422), (name, query)
                assert hidden.body.get("items", []) == []
                continue
            assert len(shown.body["items"]) == 1, (name, query, shown.body)
            assert hidden.body["items"] == [], (name, query)
        if name != "tenants":
            refused = await stranger.get(f"/v1/{name}?tenant=acme")
            assert refused.problem == (404, "not_found"), name
            assert len((await api.as_token("all").get(f"/v1/{name}?tenant=acme")).body["items"]) == 1


async def test_bound_token_writes_only_to_its_tenant(
    make_api: MakeApi, endpoint: Endpoint, flow: Flow
) -> None:
    """What it creates belongs to its tenant; the other's keys and dead letters do not exist."""
    api = await two_tenants(make_api)
    await fill(api.as_token("acme"), endpoint, flow)
    before = await contents(flow)
    stranger = api.as_token("globex")
    assert (await stranger.event(tenant="acme")).problem == (403, "forbidden")
    batch = {
        "events": [{"event_type": "a", "payload": 1}, {"event_type": "a", "payload": 1, "tenant": "acme"}]
    }
    assert (await stranger.post("/v1/events/batch", batch)).problem == (403, "forbidden")
    new = {"event_type": "a", "callback_url": endpoint.url("/x"), "tenant": "acme"}
    assert (await stranger.post("/v1/subscriptions", new)).problem == (403, "forbidden")
    everything = {"dry_run": False, "filter": {"error_code": "HTTP_500"}}
    requeued = await stranger.post("/v1/dead-letters/requeue", everything)
    assert (requeued.body["matched"], requeued.body["requeued"]) == (0, 0)
    for after_id in (1, 999):
        answer = await stranger.post("/v1/dead-letters/requeue", {"after_id": after_id})
        assert answer.body["matched"] == 0, "another tenant's id looks like one that is unknown"
    others = {"dry_run": False, "filter": {"tenant": "acme"}}
    assert (await stranger.post("/v1/dead-letters/requeue", others)).problem == (404, "not_found")
    assert await contents(flow) == before
    published = await stranger.event(idempotency_key="key", payload="other")
    assert (published.status, published.body["duplicate"]) == (202, False)
    owner = "select tenant from webhookd.events where id = $1"
    assert await flow.daemon.fetchval(owner, published.body["id"]) == "globex"
    for path in ("/status", "/metrics", "/v1/jobs", "/"):
        assert (await stranger.get(path)).status == 403, path


async def test_bound_token_learns_nothing_of_others_from_an_event(
    make_api: MakeApi, endpoint: Endpoint
) -> None:
    """An event without a subscription says so; only a token without a tenant learns that others have one."""
    api = await two_tenants(make_api)
    await api.as_token("globex").subscribe(endpoint)
    event_id = (await api.as_token("acme").event()).body["id"]
    own = f"Tenant acme has no subscription to {EVENT_TYPE}."
    for token, words in (
        ("acme", own),
        ("all", f"{own} 1 subscription of another tenant or of none matches this type."),
    ):
        assert (await api.as_token(token).get(f"/v1/events/{event_id}")).body["no_subscription"] == words


async def test_tenant_is_created_changed_and_listed(make_api: MakeApi) -> None:
    """PUT answers 201 the first time; only the given fields change."""
    api = await make_api()
    created = await api.request("PUT", "/v1/tenants/acme", json={"name": "Acme", "max_subscriptions": 1})
    assert (created.status, created.body["active"], created.body["subscriptions"]) == (201, True, 0)
    changed = await api.request("PUT", "/v1/tenants/acme", json={"active": False})
    assert (changed.status, changed.body["name"], changed.body["active"]) == (200, "Acme", False)
    assert (await api.get("/v1/tenants/acme")).body == changed.body
    assert [row["tenant"] for row in (await api.get("/v1/tenants")).body["items"]] == ["acme"]
    new = {"event_types": ["a"], "callback_url": "https://receiver.example/", "tenant": "acme"}
    assert (await api.post("/v1/subscriptions", new)).status == 201
    assert (await api.post("/v1/subscriptions", new)).problem == (409, "limit_reached")
    too_many = await api.request("PUT", "/v1/tenants/acme", json={"max_subscriptions": 3_000_000_000})
    assert too_many.problem == (422, "invalid_request")
    assert (await api.get("/v1/tenants/globex")).problem == (404, "not_found")
    assert (await api.request("PUT", "/v1/tenants/a%20b", json={})).problem == (404, "not_found")
