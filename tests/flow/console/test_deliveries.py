"""The pages of deliveries: the list with its filters, one delivery, and sending it again."""

import re
from typing import Any

from tests.flow.conftest import MakeApi
from tests.flow.console.conftest import MakeVisitor
from tests.support.api import Client, tokens
from tests.support.endpoint import Endpoint
from tests.support.flow import EVENT_TYPE, Flow
from tests.support.visitor import Shown
from tests.support.waiting import until

HOSTILE = "<script>alert(1)</script>\u202e"
DONE = "select count(*) = $1 from webhookd.webhook_delivery_sagas where status = any($2)"
SCOPES = ("ingest", "subscriptions", "operate", "read", "jobs")


async def deliver(
    api: Client, flow: Flow, endpoint: Endpoint, status: int = 200, **event: Any
) -> dict[str, Any]:
    """Publish an event, and return its delivery once it is finished or waits for a retry."""
    endpoint.answer(status, HOSTILE.encode())
    event_id = (await api.event(**event)).body["id"]
    await until(
        flow.daemon,
        "select exists (select from webhookd.webhook_delivery_sagas where event_id = $1 "
        "and status in ('Completed', 'DeadLettered', 'PendingRetry'))",
        event_id,
    )
    [found] = (await api.get(f"/v1/deliveries?event_id={event_id}")).body["items"]
    return dict(found)


def listed(response: Shown) -> list[int]:
    """Return the deliveries of a list, in its order."""
    assert response.status == 200, response
    return [int(found) for found in re.findall(r'data-head="Delivery"><a href="[^"]*/(\d+)"', response.html)]


async def test_list_shows_and_filters_deliveries(
    make_api: MakeApi, make_visitor: MakeVisitor, endpoint: Endpoint, flow: Flow
) -> None:
    """Each filter, the quick filters, the names of endpoints, and no count of anything."""
    api = await make_api()
    made = await api.subscribe(endpoint, tenant="acme", max_attempts=1, description=HOSTILE)
    good = await deliver(api, flow, endpoint, tenant="acme")
    bad = await deliver(api, flow, endpoint, 503, tenant="acme")
    visitor = make_visitor(api)
    everything = await visitor.get("/deliveries")
    assert listed(everything) == [bad["id"], good["id"]]
    assert "<script>alert" not in everything.html
    assert HOSTILE[:-1] in everything.text
    assert endpoint.url("/hook") in everything.text
    assert EVENT_TYPE in everything.text
    both = [bad["id"], good["id"]]
    for query, expected in {
        "status=DeadLettered": [bad["id"]],
        "status=Completed": [good["id"]],
        "status=PendingRetry": [],
        f"subscription_id={made['id']}": both,
        f"event_id={good['event_id']}": [good["id"]],
        "tenant=acme": both,
        "tenant=other": [],
        f"event_type={EVENT_TYPE}": both,
        "error_code=HTTP_503": [bad["id"]],
        "created_after=2020-01-01T00:00": both,
        "created_before=2020-01-01T00:00": [],
        "status=&tenant=+": both,
    }.items():
        assert listed(await visitor.get(f"/deliveries?{query}")) == expected, query
    assert "No delivery matches" in (await visitor.get("/deliveries?tenant=other")).text
    await api.request("DELETE", f"/v1/subscriptions/{made['id']}")
    assert f"deleted endpoint {made['id']}" in (await visitor.get("/deliveries")).text
    assert (await visitor.get(f"/deliveries/{good['id']}")).status == 200


async def test_wrong_filter_is_explained_and_stays_in_the_form(
    make_api: MakeApi, make_visitor: MakeVisitor
) -> None:
    """422 with the reason, and the value to correct."""
    visitor = make_visitor(await make_api())
    assert "No deliveries yet" in (await visitor.get("/deliveries")).text
    for query in ("tenant=%3Cb%3E", "event_id=x", "status=Nothing", "created_after=soon", "cursor=-7"):
        response = await visitor.get(f"/deliveries?{query}")
        assert response.status == 422, query
        assert 'role="alert"' in response.html
    assert 'value="&lt;b&gt;"' in (await visitor.get("/deliveries?tenant=%3Cb%3E")).html
    for path in ("/events", "/live", "/endpoints", "/dead-letters"):
        response = await visitor.get(f"{path}?tenant=%3Cb%3E")
        assert (response.status, 'role="alert"' in response.html) == (422, True), path
        assert 'value="&lt;b&gt;"' in response.html, path


async def test_list_is_paged_and_says_if_a_short_page_may_have_more(
    make_api: MakeApi, make_visitor: MakeVisitor, flow: Flow
) -> None:
    """A page by event type stops after a number of events; the link to older ones leads to the rest."""
    await flow.subscribe("order.paid")
    await flow.publish("order.paid")
    await flow.route()
    await flow.daemon.execute(
        "select webhookd.publish('order.paid', '{}', tenant => 'none') from generate_series(1, 10100)"
    )
    visitor = make_visitor(await make_api(services={"enabled": ["api"]}))
    first = await visitor.get("/deliveries?event_type=order.paid")
    assert listed(first) == []
    assert "Older deliveries may match" in first.text
    [older] = re.findall(r'href="([^"]*cursor=[^"]*)" rel="next"', first.html)
    second = await visitor.get(older.replace("&amp;", "&"))
    assert listed(second) == [1]
    assert "may match" not in second.text


async def test_delivery_shows_its_attempts_payload_and_requests(
    make_api: MakeApi, make_visitor: MakeVisitor, endpoint: Endpoint, flow: Flow
) -> None:
    """Everything that was stored, hostile text as text, and the headers that the endpoint really got."""
    api = await make_api()
    await api.subscribe(endpoint, max_attempts=1, headers={"X-Own": "k-1234"})
    payload = {"note": f"it's {HOSTILE}"}
    delivery = await deliver(api, flow, endpoint, 503, payload=payload, correlation_id="trace-7")
    page = await make_visitor(api).get(f"/deliveries/{delivery['id']}")
    assert page.status == 200
    assert "<script>alert" not in page.html
    for text in ("Attempt 1", "503", "HTTP_503", "Became a dead letter", "trace-7", "worker", "U+202E"):
        assert text.lower() in page.text.lower(), text
    headers = dict(
        re.findall(r'<dt><code>([a-z-]+)</code></dt><dd><bdi class="mono">([^<]*)</bdi>', page.html)
    )
    [sent] = [request for request in endpoint.requests if "webhook-attempt" in request.headers]
    received = dict(sent.headers)
    assert abs(int(headers.pop("webhook-timestamp")) - int(received.pop("webhook-timestamp"))) <= 2
    assert received.pop("webhook-signature")
    assert received.pop("x-own") == "k-1234"
    assert headers == received
    assert "k-1234" not in page.html


async def test_finished_delivery_is_sent_again_once(
    make_api: MakeApi, make_visitor: MakeVisitor, endpoint: Endpoint, flow: Flow
) -> None:
    """It leads to the new delivery, also the second time; a refusal is explained on the page."""
    api = await make_api()
    made = await api.subscribe(endpoint, max_attempts=1)
    delivery = await deliver(api, flow, endpoint, 503)
    visitor = make_visitor(api)
    path = f"/deliveries/{delivery['id']}"
    page = await visitor.get(path)
    assert "Send again" in page.text
    form = {"form_token": re.findall(r'name="form_token" value="([^"]*)"', page.html)[0]}
    await api.patch(f"/v1/subscriptions/{made['id']}", {"active": False})
    assert (await visitor.post(f"{path}/resend", form)).location == path
    assert "is not active and verified" in (await visitor.get(path)).text
    await api.patch(f"/v1/subscriptions/{made['id']}", {"active": True})
    endpoint.answer(200)
    sent = await visitor.post(f"{path}/resend", form)
    assert sent.status == 303
    assert (await visitor.get(sent.location)).text.count(f"Delivery {delivery['id']} is sent again.") == 1
    again = await visitor.post(f"{path}/resend", form)
    assert again.location == sent.location
    old = await visitor.get(path)
    assert "Send again" not in old.text
    assert f'href="{sent.location}"' in old.html
    assert f'href="{path}"' in (await visitor.get(sent.location)).html
    assert (await visitor.post("/deliveries/999/resend", form)).status == 404


async def test_waiting_retry_is_made_due_now(
    make_api: MakeApi, make_visitor: MakeVisitor, endpoint: Endpoint, flow: Flow
) -> None:
    """The next attempt is sent; then there is nothing to retry, which the page says."""
    api = await make_api(retry={"base_delay_seconds": 3600.0, "max_delay_seconds": 3600.0})
    await api.subscribe(endpoint)
    delivery = await deliver(api, flow, endpoint, 503)
    visitor = make_visitor(api)
    path = f"/deliveries/{delivery['id']}"
    page = await visitor.get(path)
    assert "Retry now" in page.text
    assert "Send again" not in page.text
    token = re.findall(r'name="form_token" value="([^"]*)"', page.html)[0]
    endpoint.answer(200)
    assert (await visitor.post(f"{path}/retry", {"form_token": token})).location == path
    await until(flow.daemon, DONE, 1, ["Completed"])
    assert "The next attempt is due now." in (await visitor.get(path)).text
    await visitor.post(f"{path}/retry", {"form_token": token})
    assert 'class="message bad"' in (await visitor.get(path)).html


async def test_missing_scope_hides_the_actions_and_refuses_them(
    make_api: MakeApi, make_visitor: MakeVisitor, endpoint: Endpoint, flow: Flow
) -> None:
    """403 without `operate`, and without the form token of the session."""
    api = await make_api(api={"tokens": tokens({"all": SCOPES, "reader": ["read"]})})
    api = api.as_token("all")
    await api.subscribe(endpoint)
    delivery = await deliver(api, flow, endpoint)
    path = f"/deliveries/{delivery['id']}"
    reader, operator, stranger = (make_visitor(api) for _ in range(3))
    await reader.log_in("reader")
    await operator.log_in("all")
    assert "Send again" not in (await reader.get(path)).text
    assert (await reader.submit(f"{path}/resend", path)).status == 403
    assert (await reader.submit(f"{path}/retry", path)).status == 403
    assert "Send again" in (await operator.get(path)).text
    assert (await operator.post(f"{path}/resend", {})).status == 403
    assert (await operator.post(f"{path}/resend", {"form_token": "wrong"})).status == 403
    assert (await stranger.get(path)).location == f"/login?next=%2Fdeliveries%2F{delivery['id']}"
    assert (await stranger.post(f"{path}/resend", {})).status == 401
    assert (await api.get(f"/v1/deliveries?event_id={delivery['event_id']}")).body["items"] == [delivery]


async def test_portal_shows_only_deliveries_of_its_tenant(
    make_api: MakeApi, make_visitor: MakeVisitor, endpoint: Endpoint, flow: Flow
) -> None:
    """No other tenant's delivery, no worker, and no link out of the portal; `resend` allows to send again."""
    api = await make_api()
    for tenant in ("acme", "globex"):
        await api.subscribe(endpoint, tenant=tenant, max_attempts=1)
    own = await deliver(api, flow, endpoint, 503, tenant="acme")
    other = await deliver(api, flow, endpoint, 503, tenant="globex")
    viewer, customer = make_visitor(api), make_visitor(api)
    await viewer.enter_by_link(api, "acme", "view")
    await customer.enter_by_link(api, "acme", "view", "resend")
    assert listed(await viewer.get("/portal/deliveries")) == [own["id"]]
    assert listed(await viewer.get("/portal/deliveries?tenant=globex")) == [own["id"]]
    path = f"/portal/deliveries/{own['id']}"
    page = await viewer.get(path)
    assert page.status == 200
    assert "worker" not in page.text.lower()
    linked = set(re.findall(r'href="(/[^"]*)"', page.html))
    outside = {link for link in linked if not link.startswith(("/portal", "/assets"))}
    assert not outside, outside
    assert not [link for link in linked if "event" in link or "tenants" in link or "dead" in link]
    assert (await viewer.get(f"/portal/deliveries/{other['id']}")).status == 404
    assert "Send again" not in page.text
    assert (await viewer.submit(f"{path}/resend", path)).status == 403
    assert (await customer.submit(f"/portal/deliveries/{other['id']}/resend", path)).status == 404
    endpoint.answer(200)
    sent = await customer.submit(f"{path}/resend", path)
    assert sent.location.startswith("/portal/deliveries/")
    assert (await customer.get(sent.location)).status == 200
