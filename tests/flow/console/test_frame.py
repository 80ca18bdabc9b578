"""What all pages have: the header and footer, addresses that do not exist, the search, and wrong filters."""

import pytest

from tests.flow.conftest import MakeApi
from tests.flow.console.conftest import MakeVisitor
from tests.support.api import tokens

SCOPES = ("ingest", "subscriptions", "operate", "read", "jobs")
PAGES = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
PUBLIC = "https://hooks.example.com"


async def test_browser_gets_a_page_for_an_unknown_address(
    make_api: MakeApi, make_visitor: MakeVisitor
) -> None:
    """With navigation. Another client gets JSON, as does every client below /v1."""
    api = await make_api()
    visitor = make_visitor(api)
    for path in ("/nope", "/endpoints/abc", "/events/", "/tenants/%3Cscript%3E"):
        shown = await visitor.request("GET", path, headers=PAGES)
        assert (shown.status, "Not found" in shown.text, "/endpoints" in shown.links) == (404, True, True), (
            path
        )
        assert "default-src 'none'" in shown.headers["Content-Security-Policy"]
        assert (await api.get(path)).problem == (404, "not_found")
    assert (await visitor.request("GET", "/portal/nope", headers=PAGES)).status == 404
    shown = await visitor.request("GET", "/deliveries/1/resend", headers=PAGES)
    assert (shown.status, shown.headers["Allow"]) == (405, "POST")
    assert (await api.request("GET", "/v1/nope", headers=PAGES)).problem == (404, "not_found")


async def test_unknown_address_without_a_session(make_api: MakeApi, make_visitor: MakeVisitor) -> None:
    """The page has no navigation, and says nothing about what exists."""
    api = await make_api(api={"tokens": tokens({"ops": SCOPES})})
    shown = await make_visitor(api).request("GET", "/nope", headers=PAGES)
    assert (shown.status, "/endpoints" in shown.links) == (404, False)


async def test_header_names_the_token_and_portal_does_not(
    make_api: MakeApi, make_visitor: MakeVisitor
) -> None:
    """Operators see who they are. Customers do not see the name of the token that made their link."""
    names = {"ops": SCOPES, "reader": ("read",)}
    api = (await make_api(api={"tokens": tokens(names), "public_url": PUBLIC})).as_token("ops")
    for name, is_read_only in (("ops", False), ("reader", True)):
        visitor = make_visitor(api)
        await visitor.log_in(name)
        shown = await visitor.get("/endpoints")
        assert (name in shown.text, "read only" in shown.text) == (True, is_read_only)
        # They accept no cookie, so the links would fail.
        assert not {"/status", "/metrics"} & set(shown.links)
    await api.request("PUT", "/v1/tenants/acme", json={})
    customer = make_visitor(api)
    await customer.enter_by_link(api, "acme", "manage")
    assert "ops" not in (await customer.get("/portal/endpoints")).html


async def test_session_that_ended_leads_back_to_the_form(
    make_api: MakeApi, make_visitor: MakeVisitor
) -> None:
    """The link to the login has the page that sent the form, if that was one of ours."""
    api = await make_api(api={"tokens": tokens({"ops": SCOPES})})
    visitor = make_visitor(api)
    own = f"http://127.0.0.1:{api.daemon.port}/endpoints/7/edit?x=1"
    for sender, link in (
        (own, "/login?next=%2Fendpoints%2F7%2Fedit%3Fx%3D1"),
        ("https://evil.example/endpoints/7/edit", "/login"),
        ("http://[", "/login"),
    ):
        shown = await visitor.request("POST", "/endpoints/7/edit", data={}, headers={"Referer": sender})
        assert (shown.status, link in shown.links) == (401, True), sender


async def test_search_knows_webhook_ids_and_numbers_in_urls(
    make_api: MakeApi, make_visitor: MakeVisitor
) -> None:
    """evt_7 is what receivers see of event 7; a number can be a port."""
    api = await make_api()
    event_id = (await api.event()).body["id"]
    body = {"callback_url": "https://receiver.example:18473/", "event_types": ["a"]}
    endpoint_id = (await api.post("/v1/subscriptions", body)).body["id"]
    visitor = make_visitor(api)
    for text in (f"evt_{event_id}", f"EVT_{event_id}"):
        assert (await visitor.get(f"/search?q={text}")).location == f"/events/{event_id}"
    assert "Nothing found" in (await visitor.get("/search?q=evt_99")).text
    assert (await visitor.get("/search?q=18473")).location == f"/endpoints/{endpoint_id}"


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/events?label=region", "A label is a name and a value"),
        ("/events?created_after=yesterday", "Created after: not a time."),
        ("/deliveries?status=Nonsense", "Status: none of the choices."),
        ("/deliveries?subscription_id=99999999999999999999", "Subscription id: not a valid value."),
    ],
)
async def test_wrong_filter_is_named(
    make_api: MakeApi, make_visitor: MakeVisitor, path: str, text: str
) -> None:
    """In words, and not in those of the parser."""
    shown = await make_visitor(await make_api()).get(path)
    assert shown.status == 422
    assert text in shown.text, shown.text
