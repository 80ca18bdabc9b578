"""The pages of endpoints: list, create, show, change, and every action, against a real daemon."""

import re
from collections.abc import Mapping
from typing import Any

import aiohttp
import pytest

from tests.support.api import Client
from tests.support.endpoint import Endpoint
from tests.support.flow import EVENT_TYPE, Flow
from tests.support.visitor import Shown, Visitor
from tests.support.waiting import until

SECRET = re.compile(r"whsec_[A-Za-z0-9+/=]+")
HOSTILE = "<script>alert(1)</script>\u202e\x1b[31m"
ROUTED = "select not exists (select from webhookd.event_routing_queue)"
FINISHED = """
    select count(*) = $1 from webhookd.webhook_delivery_sagas s
    where s.status in ('Completed', 'DeadLettered')"""


@pytest.fixture
async def api(make_api: Any) -> Client:
    """Return a client of an instance without tokens, which allows verification by ping."""
    client: Client = await make_api(subscriptions={"verification_methods": ["challenge", "ping"]})
    return client


@pytest.fixture
def visitor(api: Client, session: aiohttp.ClientSession) -> Visitor:
    """Return a visitor without a login."""
    return Visitor(session, api.daemon)


async def create(visitor: Visitor, **fields: str) -> Shown:
    """Open and send the form of a new endpoint."""
    form = (await visitor.get("/endpoints/new")).hidden("/endpoints/new")
    return await visitor.request("POST", "/endpoints/new", data=form | fields)


async def subscriptions(api: Client) -> list[dict[str, Any]]:
    """Return all subscriptions."""
    found: list[dict[str, Any]] = (await api.get("/v1/subscriptions")).body["items"]
    return found


async def test_empty_list_says_what_to_do(visitor: Visitor) -> None:
    """It offers to create an endpoint; a filter without a match offers to remove it."""
    shown = await visitor.get("/endpoints")
    assert shown.status == 200
    assert "No endpoints yet" in shown.text
    assert "/endpoints/new" in shown.links
    assert "No endpoint matches" in (await visitor.get("/endpoints?state=paused")).text


async def test_list_filters_and_escapes(api: Client, visitor: Visitor, endpoint: Endpoint) -> None:
    """Each filter finds its endpoint only; hostile text is shown as text."""
    await api.subscribe(endpoint, description="verified one")
    differences: list[dict[str, Any]] = [
        {"description": HOSTILE},
        {"paused": True, "tenant": "acme"},
        {"event_types": ["a.b", "c.*"]},
    ]
    for number, fields in enumerate(differences):
        body = {"callback_url": endpoint.url(f"/{number}"), "event_types": ["x.y"]} | fields
        assert (await api.post("/v1/subscriptions", body)).status == 201
    everything = await visitor.get("/endpoints")
    assert "<script>alert" not in everything.html
    assert "<script>alert(1)</script> U+202E" in everything.text
    for query, expected in (
        ("search=verified", {"1"}),
        ("state=active", {"1"}),
        ("state=paused", {"3"}),
        ("state=unverified", {"2", "3", "4"}),
        ("state=disabled", set()),
        ("tenant=acme", {"3"}),
        ("event_type=a.b", {"4"}),
    ):
        shown = await visitor.get(f"/endpoints?{query}")
        assert shown.status == 200, query
        assert set(re.findall(r'href="/endpoints/(\d+)"', shown.html)) == expected, query
    wrong = await visitor.get("/endpoints?tenant=a%20b")
    assert (wrong.status, "Tenant must be" in wrong.text) == (422, True)
    wrong = await visitor.get("/endpoints?state=nonsense")
    assert (wrong.status, "State: choose one of active, paused" in wrong.text) == (422, True)


async def test_create_shows_the_secret_once(api: Client, visitor: Visitor, endpoint: Endpoint) -> None:
    """Every field arrives; the secret works; sending the form again creates nothing."""
    endpoint.echo_challenge()
    fields = {
        "callback_url": endpoint.url("/hook"),
        "event_types": "order.paid, invoice.*\nx",
        "tenant": "acme",
        "filter": "region=eu\nlevel = a=b",
        "description": HOSTILE,
        "format": "standard",
        "max_per_second": "2.5",
        "max_attempts": "7",
        "base_delay_seconds": "0",
        "headers": "X-Key: of: yours\n",
    }
    form = (await visitor.get("/endpoints/new")).hidden("/endpoints/new")
    shown = await visitor.request("POST", "/endpoints/new", data=form | fields)
    assert shown.status == 200, shown.text
    assert SECRET.search(shown.text)
    [stored] = await subscriptions(api)
    assert stored["event_types"] == ["order.paid", "invoice.*", "x"]
    assert stored["filter"] == {"region": "eu", "level": "a=b"}
    assert stored["description"] == HOSTILE
    assert (stored["tenant"], stored["format"], stored["max_per_second"]) == ("acme", "standard", 2.5)
    assert (stored["max_attempts"], stored["base_delay_seconds"]) == (7, 0)
    again = await visitor.request("POST", "/endpoints/new", data=form | fields)
    assert again.headers["Location"] == f"/endpoints/{stored['id']}"
    page = await visitor.follow(again)
    assert "already created" in page.text
    assert not SECRET.search(page.text)
    assert len(await subscriptions(api)) == 1
    # A form that is opened later may create the same endpoint again.
    assert (await create(visitor, **fields)).status == 200
    assert len(await subscriptions(api)) == 2
    verified = await visitor.submit(f"/endpoints/{stored['id']}/verify", f"/endpoints/{stored['id']}")
    assert "Verified." in (await visitor.follow(verified)).text
    assert endpoint.requests_for("/hook")[-1].headers["x-key"] == "of: yours"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("callback_url", "http://receiver.example/", "callback_url"),
        ("callback_url", "", "callback_url"),
        ("event_types", "order paid!", "must be an event type"),
        ("event_types", "", "event_types is required"),
        ("filter", "region", "Label filter: line 1"),
        ("filter", "a=1\na=2", "line 2 repeats a name"),
        ("headers", "password", "Headers: line 1"),
        ("headers", "Host: a", "headers"),
        ("max_per_second", "many", "many is not a number"),
        ("max_per_second", "nan", "nan is not a number"),
        ("max_attempts", "1.5", "not a whole number"),
        ("max_attempts", "0", "max_attempts"),
        ("tenant", "a b", "tenant must be"),
        ("secret", "whsec_x", "secret"),
    ],
)
async def test_wrong_values_keep_the_form(
    api: Client, visitor: Visitor, field: str, value: str, message: str
) -> None:
    """422 with the API's message, and with the other values as they were typed."""
    fields = {
        "callback_url": "https://receiver.example/hook",
        "event_types": "order.paid",
        "description": '"><b>typed',
    }
    shown = await create(visitor, **(fields | {field: value}))
    assert shown.status == 422
    assert message in shown.text
    assert "&#34;&gt;&lt;b&gt;typed" in shown.html
    assert await subscriptions(api) == []


async def test_show_has_state_numbers_and_deliveries(
    api: Client, visitor: Visitor, endpoint: Endpoint, flow: Flow
) -> None:
    """One page per time span, with links to the deliveries; an unknown endpoint is a 404."""
    subscription = await api.subscribe(endpoint, description=HOSTILE)
    await api.event()
    await until(flow.daemon, FINISHED, 1)
    path = f"/endpoints/{subscription['id']}"
    for span in ("", "?span=1h", "?span=7d", "?span=nonsense"):
        shown = await visitor.get(f"{path}{span}")
        assert shown.status == 200
        assert "100 %" in shown.text
        assert "Active" in shown.text
        assert re.search(r'href="/deliveries/\d+"', shown.html)
        assert "<script>alert" not in shown.html
    endpoint.answer(500)
    await api.event()
    failed = "select count(*) = $1 from webhookd.endpoint_health where consecutive_failures > 0"
    await until(flow.daemon, failed, 1)
    assert "Last attempt failed" in (await visitor.get(path)).text
    assert "Last attempt failed" in (await visitor.get("/endpoints")).text
    assert (await visitor.get("/endpoints/999")).status == 404
    assert (await visitor.get("/endpoints/99999999999999999999")).status == 404


async def test_actions_change_the_state(api: Client, visitor: Visitor, endpoint: Endpoint) -> None:
    """Pause, resume, disable, enable; verification by challenge and ping, and its failure in words."""
    created = await api.post(
        "/v1/subscriptions", {"callback_url": endpoint.url("/hook"), "event_types": ["a"]}
    )
    path = f"/endpoints/{created.body['id']}"

    async def act(name: str, **fields: str) -> tuple[str, Mapping[str, Any]]:
        page = await visitor.follow(await visitor.submit(f"{path}/{name}", path, **fields))
        return page.text, (await subscriptions(api))[0]

    text, state = await act("verify")
    assert "Not verified: the endpoint did not echo the challenge" in text
    assert not state["verified"]
    text, state = await act("verify", method="ping")
    assert (state["verified"], state["verified_by"]) == (True, "ping")
    for name, expected in (
        ("pause", "paused"),
        ("resume", None),
        ("disable", "disabled"),
        ("enable", None),
    ):
        text, state = await act(name)
        assert state["held_because"] == expected, name


async def test_edit_changes_only_what_was_changed(api: Client, visitor: Visitor, endpoint: Endpoint) -> None:
    """A change by another person stays; headers stay unless they are replaced or removed."""
    subscription = await api.subscribe(
        endpoint,
        headers={"X-Key": "not-shown"},
        max_attempts=3,
        filter={"region": "eu"},
        description="before",
    )
    item, path = f"/v1/subscriptions/{subscription['id']}", f"/endpoints/{subscription['id']}"
    opened = await visitor.get(f"{path}/edit")
    assert "not-shown" not in opened.html
    form = opened.hidden(f"{path}/edit")
    same = {
        "callback_url": subscription["callback_url"],
        "event_types": EVENT_TYPE,
        "filter": "region=eu",
        "format": "raw",
        "max_attempts": "3",
        "description": "before",
    }
    assert (await api.patch(item, {"max_attempts": 9})).status == 200
    nothing = await visitor.request("POST", f"{path}/edit", data=form | same)
    assert "Nothing was changed." in (await visitor.follow(nothing)).text
    changed = await visitor.request(
        "POST", f"{path}/edit", data=form | same | {"description": "", "filter": "", "max_per_second": "3"}
    )
    assert "Saved." in (await visitor.follow(changed)).text
    stored = (await api.get(item)).body
    assert (stored["max_attempts"], stored["max_per_second"]) == (9, 3)
    assert (stored["description"], stored["filter"]) == (None, {})

    async def header() -> str | None:
        await visitor.submit(f"{path}/test", f"{path}/test", payload="1")
        return endpoint.requests_for("/hook")[-1].headers.get("x-key")

    assert await header() == "not-shown"
    both = await visitor.submit(
        f"{path}/edit", f"{path}/edit", **form, headers="X-Key: a", remove_headers="y"
    )
    assert both.status == 422
    for fields, expected in (({"headers": "X-Key: new"}, "new"), ({"remove_headers": "yes"}, None)):
        done = await visitor.request("POST", f"{path}/edit", data=form | same | fields)
        assert done.status == 303, done.text
        assert await header() == expected
    wrong = await visitor.request("POST", f"{path}/edit", data=form | same | {"event_types": "a b!"})
    assert (wrong.status, "must be an event type" in wrong.text) == (422, True)
    damaged = await visitor.request("POST", f"{path}/edit", data=form | same | {"original": "{"})
    assert damaged.status == 400


async def test_moved_endpoint_offers_to_verify_the_new_address(
    api: Client, visitor: Visitor, endpoint: Endpoint
) -> None:
    """The page shows the pending address until it is verified."""
    subscription = await api.subscribe(endpoint)
    path = f"/endpoints/{subscription['id']}"
    form = (await visitor.get(f"{path}/edit")).hidden(f"{path}/edit")
    fields = {"callback_url": endpoint.url("/new"), "event_types": EVENT_TYPE, "format": "raw"}
    shown = await visitor.follow(await visitor.request("POST", f"{path}/edit", data=form | fields))
    assert "Verify the new address" in shown.text
    assert endpoint.url("/new") in shown.text
    shown = await visitor.follow(await visitor.submit(f"{path}/verify", path))
    assert "Verified." in shown.text
    assert "Verify the new address" not in shown.text
    assert (await subscriptions(api))[0]["callback_url"] == endpoint.url("/new")


async def test_test_request_shows_the_response_as_text(
    api: Client, visitor: Visitor, endpoint: Endpoint
) -> None:
    """Status, duration and response; a large payload arrives byte for byte; wrong input keeps the form."""
    subscription = await api.subscribe(endpoint)
    path = f"/endpoints/{subscription['id']}/test"
    endpoint.answer(500, body=HOSTILE.encode())
    payload = '{ "a": 1.10, "b": "' + "x" * 200_000 + '"}'
    shown = await visitor.submit(path, path, event_type="order.paid", payload=payload)
    assert shown.status == 200
    assert endpoint.requests_for("/hook")[-1].body == payload.encode()
    assert "Not delivered" in shown.text
    assert "HTTP_500" in shown.text
    assert "<script>alert" not in shown.html
    assert "<script>alert(1)</script> U+202E U+001B" in shown.text
    sent = len(endpoint.requests_for("/hook"))
    for fields, message in (
        ({"payload": '1,"event_type":"dot.job.x"'}, "The payload is not JSON"),
        ({"payload": "{"}, "The payload is not JSON"),
        ({"event_type": "a b"}, "event_type must be"),
        ({"event_type": "dot.job.x"}, "must not start with dot.job."),
    ):
        wrong = await visitor.submit(path, path, **fields)
        assert wrong.status == 422, fields
        assert message in wrong.text
    assert len(endpoint.requests_for("/hook")) == sent


async def test_rotate_asks_first_and_shows_the_secret_once(
    api: Client, visitor: Visitor, endpoint: Endpoint
) -> None:
    """The confirmation page changes nothing."""
    subscription = await api.subscribe(endpoint)
    path = f"/endpoints/{subscription['id']}/rotate"
    asked = await visitor.get(path)
    assert not SECRET.search(asked.html)
    shown = await visitor.submit(path, path)
    found = SECRET.search(shown.text)
    assert found
    assert found[0] != subscription["secret"]
    assert not SECRET.search((await visitor.get(path)).html)


async def test_delete_needs_the_typed_host(api: Client, visitor: Visitor, endpoint: Endpoint) -> None:
    """A wrong confirmation deletes nothing; `erase` starts an erasure."""
    for erase in (False, True):
        subscription = await api.subscribe(endpoint)
        path = f"/endpoints/{subscription['id']}/delete"
        for wrong in ({}, {"confirmation": "other.example"}):
            assert (await visitor.submit(path, path, **wrong)).status == 422
        fields = {"confirmation": "127.0.0.1"} | ({"erase": "yes"} if erase else {})
        shown = await visitor.follow(await visitor.submit(path, path, **fields))
        assert "is deleted" in shown.text
        assert ("being erased" in shown.text) == erase
        assert await subscriptions(api) == []
        assert (await visitor.get(path)).status == 404


async def test_replay_counts_then_delivers_in_steps(
    api: Client, visitor: Visitor, endpoint: Endpoint, flow: Flow
) -> None:
    """Dry run, confirmation, delivery; a second replay finds nothing; `all` sends the same again once."""
    for _ in range(3):
        await api.event()
    await until(flow.daemon, ROUTED)
    subscription = await api.subscribe(endpoint)
    path = f"/endpoints/{subscription['id']}/replay"
    since = "2020-01-01T00:00"
    counted = await visitor.submit(path, path, since=since, step="count")
    assert counted.status == 200
    assert "Replay these events?" in counted.text
    assert "Create 3 deliveries" in counted.text
    form = counted.hidden(path)
    finished = await visitor.request("POST", path, data=form)
    assert "Replay finished" in finished.text
    assert "Deliveries created 3" in finished.text
    await until(flow.daemon, FINISHED, 3)
    nothing = await visitor.submit(path, path, since=since, step="count")
    assert "There is nothing to deliver." in nothing.text
    again = await visitor.submit(path, path, since=since, step="count", include="all")
    form = again.hidden(path)
    for expected in (3, 0):
        shown = await visitor.request("POST", path, data=form)
        assert f"Deliveries created {expected}" in shown.text
    await until(flow.daemon, FINISHED, 6)
    for fields, message in (({}, "From: a time is required"), ({"since": "yesterday"}, "since")):
        wrong = await visitor.submit(path, path, **fields)
        assert (wrong.status, message in wrong.text) == (422, True), wrong.text
    assert (await api.post(f"/v1/subscriptions/{subscription['id']}/replay", {})).status == 422


async def test_long_replay_continues_after_an_interruption(
    api: Client, visitor: Visitor, endpoint: Endpoint, flow: Flow
) -> None:
    """A step does a bounded part; the page continues by itself, and its Stop link continues later."""
    await flow.superuser.execute(
        "select webhookd.publish($1, '{}'::text) from generate_series(1, 1500)", EVENT_TYPE
    )
    await until(flow.daemon, ROUTED)
    subscription = await api.subscribe(endpoint)
    path = f"/endpoints/{subscription['id']}/replay"
    form = (await visitor.submit(path, path, since="2020-01-01T00:00")).hidden(path)
    assert form["expected"] == "1500"
    first = await visitor.request("POST", path, data=form)
    assert "Replaying" in first.text
    assert "data-submit-at-once" in first.html
    assert "1,000 of 1,500" in first.text
    [stop] = [link for link in first.links if link.startswith(f"{path}?")]
    resumed = await visitor.get(stop)
    assert "continues after event" in resumed.text
    assert resumed.hidden(path)["after_event_id"] == first.hidden(path)["after_event_id"]
    last = await visitor.request("POST", path, data=first.hidden(path))
    assert "Replay finished" in last.text
    assert "Deliveries created 1,500" in last.text
    assert await flow.superuser.fetchval("select count(*) from webhookd.webhook_delivery_sagas") == 1500


async def test_damaged_hidden_fields_are_no_error(api: Client, visitor: Visitor, endpoint: Endpoint) -> None:
    """Numbers that no page has written count as nothing."""
    await api.subscribe(endpoint)
    path = "/endpoints/1/replay"
    for number in ("9" * 5000, "-1", "x", "\u0662"):
        shown = await create(visitor, callback_url="http://wrong.example", event_types="a", newest_id=number)
        assert shown.status == 422, number
        shown = await visitor.submit(
            path, path, since="2020-01-01T00:00", after_event_id=number, examined=number, expected=number
        )
        assert shown.status == 200, number
