"""The pages of tenants and erasures, and the search: every action, in every view, and what is refused."""

import hashlib
import re
from typing import Any
from urllib.parse import quote_plus

import aiohttp
import pytest

from tests.browser.conftest import Visit
from tests.browser.sites import Site
from tests.browser.visitor import VIEWS, View, Visitor
from tests.flow.conftest import MakeDaemon
from tests.support.api import Client, tokens
from tests.support.daemon import DaemonProcess
from webhookd.core.settings import Scope

SCOPES: tuple[Scope, ...] = ("ingest", "subscriptions", "operate", "read", "jobs")
HOSTILE = "<script>alert(1)</script>\u202egnp.exe \"'&amp;{{7*7}}"
EACH_VIEW = pytest.mark.parametrize("view", VIEWS, ids=str)


async def put(session: aiohttp.ClientSession, daemon: DaemonProcess, tenant: str, **fields: Any) -> None:
    """Create a tenant through the API."""
    answer = await Client(session, daemon).request("PUT", f"/v1/tenants/{tenant}", json=fields)
    assert answer.status == 201, answer


async def log_in(visitor: Visitor, token: str) -> None:
    """Open a session for a token."""
    await visitor.open("/login")
    await visitor.page.fill("input[name=token]", token)
    await visitor.page.click("button:has-text('Log in')")
    await visitor.page.wait_for_url(f"{visitor.base_url}/")


async def content(visitor: Visitor) -> str:
    """Return the text of the current page."""
    return await visitor.page.inner_text("#content")


@EACH_VIEW
async def test_tenant_is_created_changed_and_found(visitor: Visitor) -> None:
    """From the empty list to the page of the tenant, and back by the start of its id."""
    page = visitor.page
    await visitor.open("/tenants")
    await visitor.check()
    assert "No tenants yet" in await content(visitor)
    await page.click("summary:has-text('Create a tenant')")
    await page.fill("input[name=tenant]", "acme:eu_1")
    await page.fill("input[name=name]", HOSTILE)
    await page.click("button:has-text('Create')")
    assert page.url.endswith("/tenants/acme:eu_1")
    assert "Tenant acme:eu_1 is created." in await content(visitor)
    assert "<script>alert(1)</script>U+202Egnp.exe" in await content(visitor)
    await visitor.check()
    await page.fill("input[name=name]", "Acme Ltd")
    await page.fill("input[name=max_subscriptions]", "5")
    await page.uncheck("input[name=active]")
    await page.click("button:has-text('Save')")
    text = await content(visitor)
    assert "Saved." in text
    assert "0 of at most 5" in text
    assert "Held" in text
    await page.fill("input[name=max_subscriptions]", "many")
    visitor.expect("status of 422")
    await page.click("button:has-text('Save')")
    assert "must be a number" in await content(visitor)
    assert await page.input_value("input[name=max_subscriptions]") == "many"
    await visitor.check()
    await visitor.open("/tenants?prefix=acme")
    assert "Acme Ltd" in await content(visitor)
    await visitor.check()
    await visitor.open("/tenants?prefix=b")
    assert "No tenant matches" in await content(visitor)
    await visitor.open("/tenants?prefix=%3Cb%3E", 422)
    assert "A tenant's id has" in await content(visitor)


@EACH_VIEW
async def test_missing_tenant_says_what_to_do(visitor: Visitor) -> None:
    """A tenant that only has events has no page yet; a button creates it."""
    await visitor.open("/tenants/globex", 404)
    assert "There is no tenant globex" in await content(visitor)
    await visitor.check()
    await visitor.page.click("button:has-text('Create it')")
    assert "Tenant globex is created." in await content(visitor)


@EACH_VIEW
async def test_portal_link_is_shown_once(
    visitor: Visitor, console: DaemonProcess, session: aiohttp.ClientSession
) -> None:
    """It opens the portal of the tenant. The page of the tenant does not show it again."""
    await put(session, console, "acme")
    page = visitor.page
    await visitor.open("/tenants/acme")
    await page.check("input[value=manage]")
    await page.select_option("select[name=expires_in_seconds]", "900")
    await page.click("button:has-text('Make a link')")
    await visitor.check()
    text = await content(visitor)
    [link] = re.findall(r"http://\S+/portal/enter\?code=\S+", text)
    assert "can: see endpoints, deliveries and attempts; create, change, verify" in text
    assert re.search(r"end in 1[45] min", text)
    await visitor.open("/tenants/acme")
    assert "code=" not in await content(visitor)
    code = link.partition("code=")[2]
    for status in (303, 401):
        entered = await page.request.post(
            f"{visitor.base_url}/portal/enter", form={"code": code}, max_redirects=0
        )
        assert entered.status == status


@EACH_VIEW
async def test_erasure_needs_the_id_and_shows_its_progress(
    visitor: Visitor, console: DaemonProcess, session: aiohttp.ClientSession
) -> None:
    """A wrong text erases nothing. Afterwards, the SHA-256 of the id is the evidence."""
    await put(session, console, "acme", name="Acme Ltd")
    page = visitor.page
    await visitor.open("/tenants/acme")
    await page.click("a:has-text('Erase this tenant')")
    await visitor.check()
    await page.fill("input[name=confirmation]", "Acme")
    visitor.expect("status of 422")
    await page.click("button:has-text('Erase everything')")
    assert "Nothing was erased" in await content(visitor)
    await page.fill("input[name=confirmation]", "acme")
    await page.click("button:has-text('Erase everything')")
    assert re.search(r"/erasures/\d+$", page.url)
    await visitor.check()
    if not visitor.view.javascript and await page.locator("a:has-text('Reload every')").count():
        await page.click("a:has-text('Reload every')")
    await page.wait_for_selector(".head .badge:has-text('Finished')")
    text = await content(visitor)
    assert hashlib.sha256(b"acme").hexdigest() in text
    assert "Evidence" in text
    await visitor.check()
    await visitor.open("/erasures")
    await visitor.check()
    assert "Finished" in await content(visitor)
    await visitor.open("/tenants/acme", 404)


async def with_tokens(make_daemon: MakeDaemon, session: aiohttp.ClientSession) -> DaemonProcess:
    """Start an instance with tokens and a tenant."""
    daemon = make_daemon(api={"tokens": tokens({"all": SCOPES, "reader": ("read",)})})
    daemon.token = "all"
    await daemon.start()
    api = Client(session, daemon, "all")
    assert (await api.request("PUT", "/v1/tenants/acme", json={})).status == 201
    return daemon


async def test_link_without_public_url_says_what_to_set(
    visit: Visit, make_daemon: MakeDaemon, session: aiohttp.ClientSession
) -> None:
    """With tokens there is no address for a link; the page names the setting that is missing."""
    visitor = await visit(await with_tokens(make_daemon, session))
    await log_in(visitor, "all")
    await visitor.open("/tenants/acme")
    visitor.expect("status of 409")
    await visitor.page.click("button:has-text('Make a link')")
    text = await content(visitor)
    assert "public_url =" in text
    assert "systemctl reload webhookd" in text
    await visitor.check()


async def test_missing_scope_hides_the_actions_and_refuses_them(
    visit: Visit, make_daemon: MakeDaemon, session: aiohttp.ClientSession
) -> None:
    """A session that may only read sees no form. Its requests, and those with a wrong form token, get 403."""
    daemon = await with_tokens(make_daemon, session)
    reader, owner = await visit(daemon), await visit(daemon)
    await log_in(reader, "reader")
    await log_in(owner, "all")
    await reader.open("/tenants")
    assert "Create a tenant" not in await content(reader)
    await reader.open("/tenants/acme")
    text = await content(reader)
    for word in ("Save", "Make a link", "Erase"):
        assert word not in text
    await reader.check()
    await reader.open("/tenants/globex", 404)
    assert "Create it" not in await content(reader)
    await reader.open("/tenants/acme/erase", 403)
    await owner.open("/tenants/acme")
    stolen = await owner.page.input_value("main form input[name=form_token] >> nth=0")
    for path in ("/tenants", "/tenants/acme", "/tenants/acme/portal-link", "/tenants/acme/erase"):
        for visitor, form in ((reader, {"form_token": stolen}), (owner, {"form_token": "x"}), (owner, {})):
            fields: dict[str, str | float | bool] = {
                "tenant": "new",
                "confirmation": "acme",
                "active": "true",
                **form,
            }
            answer = await visitor.page.request.post(
                f"{visitor.base_url}{path}", form=fields, max_redirects=0
            )
            assert answer.status == 403, path
    found = await Client(session, daemon, "all").get("/v1/tenants")
    assert [row["tenant"] for row in found.body["items"]] == ["acme"]
    assert found.body["items"][0]["created_at"] == found.body["items"][0]["updated_at"]
    assert (await Client(session, daemon, "all").get("/v1/erasures")).body["items"] == []


@EACH_VIEW
async def test_search_goes_to_what_was_found(visit: Visit, demo: Site, view: View) -> None:
    """To the only match, or to a list of all of them."""
    visitor = await visit(demo.daemon, view)
    page = visitor.page
    await visitor.open("/events")
    for text, words in {
        "1": ("Event 1", "Delivery 1", "Endpoint 1"),
        # Its name is in the addresses of its endpoints too.
        "globex": ("Tenant globex", "Endpoints"),
        "no such thing": ("Nothing found", "no such thing", "What you can search for"),
    }.items():
        await page.fill("#search", text)
        await page.press("#search", "Enter")
        await page.wait_for_url(f"**/search?q={quote_plus(text)}")
        shown = await content(visitor)
        assert all(word in shown for word in words), (text, shown)
        assert await page.input_value("#search") == text
        await visitor.check()
    await visitor.open("/search?q=order.created")
    assert "event_type=order.created" in page.url
    await visitor.open(f"/search?q={'9' * 19}")
    assert "Nothing found" in await content(visitor)
    await visitor.open(f"/search?q={'x' * 2000}")
    await visitor.check()


@pytest.mark.parametrize(
    "path", ["/tenants", "/erasures", "/search?q=1", "/search?q=%3Cscript%3E", "/search"]
)
@EACH_VIEW
async def test_pages_with_hostile_data(visit: Visit, hostile: Site, view: View, path: str) -> None:
    """Everything is text, and fits."""
    visitor = await visit(hostile.daemon, view)
    await visitor.open(path)
    await visitor.check()
    assert await visitor.page.title() != "owned"


@EACH_VIEW
async def test_tenant_with_hostile_data(visit: Visit, hostile: Site, view: View) -> None:
    """Its name and its endpoints are text. The page fits with the longest id."""
    visitor = await visit(hostile.daemon, view)
    for path in ("", "/erase"):
        await visitor.open(f"/tenants/{hostile.filled.tenants[0]}{path}")
        await visitor.check()
        assert await visitor.page.title() != "owned"
