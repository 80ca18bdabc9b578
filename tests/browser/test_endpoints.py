"""The pages of endpoints in a browser: every page and action, also without JavaScript, and in the portal."""

import re
from typing import Any

import aiohttp
import pytest
from playwright.async_api import expect

from tests.browser.conftest import Visit
from tests.browser.visitor import VIEWS, View, Visitor
from tests.flow.conftest import MakeApi
from tests.support.api import Client, tokens
from tests.support.daemon import DaemonProcess
from tests.support.endpoint import Endpoint
from tests.support.flow import Flow
from tests.support.waiting import until

HOSTILE = "<script>alert(1)</script>\u202e\x1b[31m\u0000".replace("\0", "") + "שלום" + "long" * 90
FINISHED = """
    select count(*) = $1 from webhookd.webhook_delivery_sagas s
    where s.status in ('Completed', 'DeadLettered')"""
SECRET = re.compile(r"whsec_[A-Za-z0-9+/=]{20,}")
ALL = ["read", "subscriptions", "operate", "ingest"]


@pytest.fixture
def api(console: DaemonProcess, session: aiohttp.ClientSession) -> Client:
    """Return a client of the daemon that is visited."""
    return Client(session, console)


async def press(visitor: Visitor, name: str) -> None:
    """Press a button."""
    await visitor.page.get_by_role("button", name=name, exact=True).click()


async def says(visitor: Visitor, text: str) -> None:
    """Wait until the page contains a text."""
    await expect(visitor.page.locator("main")).to_contain_text(text)


@pytest.mark.parametrize("view", VIEWS, ids=str)
async def test_new_endpoint(visitor: Visitor, api: Client, endpoint: Endpoint, view: View) -> None:
    """Create, with an error first; the secret is shown; verify, test, pause and disable."""
    page = visitor.page
    page.on("dialog", lambda dialog: dialog.accept())  # the question of the script before Disable
    endpoint.echo_challenge()
    await visitor.open("/endpoints")
    await says(visitor, "No endpoints yet")
    await visitor.check()
    await page.get_by_role("link", name="Create an endpoint").first.click()
    await visitor.check()

    await page.get_by_label("URL").fill("http://receiver.example")
    await page.get_by_label("Event types").fill("order.paid, x.*")
    await page.get_by_label("Description").fill(HOSTILE)
    visitor.expect("status of 422")
    await press(visitor, "Create")
    await says(visitor, "callback_url")
    await expect(page.get_by_label("Description")).to_have_value(HOSTILE)
    await visitor.check()
    await page.get_by_label("URL").fill(endpoint.url("/hook"))
    await page.get_by_label("Labels").fill("region=<b>eu")
    await press(visitor, "Create")
    await says(visitor, "It is shown only here and only now.")
    assert SECRET.search(await page.locator(".secret").inner_text())
    await expect(page.get_by_role("button", name="Copy the secret")).to_be_visible(visible=view.javascript)
    await visitor.check()
    await press(visitor, "Verify now")
    await says(visitor, "Verified.")
    path = "/endpoints/1"
    await visitor.check()

    await page.get_by_role("link", name="Send a test").click()
    await visitor.check()
    endpoint.answer(200, body=HOSTILE.encode())
    await press(visitor, "Send")
    await says(visitor, "<script>alert(1)</script>")
    await visitor.check()

    await visitor.open(path)
    for name, message in (
        ("Pause", "Paused"),
        ("Resume", "Resumed"),
        ("Disable", "Disabled"),
        ("Enable", "Enabled"),
    ):
        await press(visitor, name)
        await says(visitor, message)
        if name in ("Pause", "Disable"):
            await visitor.check()
    assert (await api.get("/v1/subscriptions/1")).body["held_because"] is None


@pytest.mark.parametrize("view", VIEWS, ids=str)
async def test_existing_endpoint(visitor: Visitor, api: Client, endpoint: Endpoint, flow: Flow) -> None:
    """Change and move, rotate, replay, filter, and delete after a wrong confirmation."""
    page = visitor.page
    await api.subscribe(endpoint, event_type="order.paid", filter={"region": "<b>"}, description=HOSTILE)
    path = "/endpoints/1"
    await visitor.open(path)
    await page.get_by_role("link", name="Change").click()
    await visitor.check()
    await page.get_by_label("Labels").fill("")
    await page.get_by_label("URL").fill(endpoint.url("/new" + "/long" * 90))
    await press(visitor, "Save")
    await says(visitor, "Verify the new address")
    await visitor.check()
    endpoint.echo_challenge()
    await press(visitor, "Verify the new address")
    await says(visitor, "Verified.")

    await page.get_by_role("link", name="Rotate the secret").click()
    await visitor.check()
    await press(visitor, "Rotate the secret")
    assert SECRET.search(await page.locator(".secret").inner_text())
    await visitor.check()

    await api.event(event_type="order.paid")
    await until(flow.daemon, FINISHED, 1)
    await visitor.open(path)
    await expect(page.get_by_text("Delivered", exact=True)).to_be_visible()
    await visitor.check()
    await page.get_by_role("link", name="Replay").click()
    await visitor.check()
    await page.get_by_label("Which events").select_option("all")
    await press(visitor, "Count")
    await says(visitor, "Replay these events?")
    await visitor.check()
    await press(visitor, "Create 1 delivery")
    await says(visitor, "Replay finished")
    await visitor.check()

    await visitor.open("/endpoints?state=active")
    await expect(page.locator("tbody tr")).to_have_count(1)
    await visitor.check()
    await visitor.open(f"{path}/delete")
    visitor.expect("status of 422")
    await press(visitor, "Delete")
    await says(visitor, "nothing was deleted")
    await visitor.check()
    await page.get_by_label("Type the host").fill("127.0.0.1")
    await press(visitor, "Delete")
    await says(visitor, "Endpoint 1 is deleted.")
    await visitor.check()


@pytest.mark.parametrize("view", [View(), View(javascript=False)], ids=str)
async def test_long_replay_goes_on_by_itself(
    visitor: Visitor, api: Client, endpoint: Endpoint, flow: Flow, view: View
) -> None:
    """The script sends step after step; without it, the button does."""
    await flow.superuser.execute(
        "select webhookd.publish('test.event', '{}'::text) from generate_series(1, 2200)"
    )
    await until(flow.daemon, "select not exists (select from webhookd.event_routing_queue)")
    await api.subscribe(endpoint, event_type="test.event")
    await visitor.open("/endpoints/1/replay")
    await visitor.page.get_by_label("From (UTC)").fill("2020-01-01T00:00")
    await press(visitor, "Count")
    await press(visitor, "Create 2,200 deliveries")
    if not view.javascript:
        for done in ("1,000 of 2,200", "2,000 of 2,200"):
            await says(visitor, done)
            await visitor.check()
            await press(visitor, "Continue")
    await says(visitor, "Replay finished")
    await says(visitor, "2,200")


@pytest.mark.parametrize("view", VIEWS, ids=str)
async def test_portal_of_a_customer(make_api: MakeApi, visit: Visit, endpoint: Endpoint, view: View) -> None:
    """A link opens the portal with the operator's name; what the link does not allow is not shown."""
    made: list[dict[str, Any]] = tokens({"all": ALL})
    public = "http://portal.invalid"
    api = (
        await make_api(api={"tokens": made, "public_url": public}, console={"name": "Shop <b> & Co"})
    ).as_token("all")
    await api.subscribe(endpoint, tenant="acme", description=HOSTILE)
    await api.subscribe(endpoint, tenant="globex", description="globex only")

    async def enter(*capabilities: str) -> Visitor:
        link = await api.post("/v1/tenants/acme/portal-link", {"capabilities": list(capabilities)})
        visitor = await visit(api.daemon, view)
        await visitor.open(link.body["url"].removeprefix(public))
        if not view.javascript:
            await visitor.check()
            await press(visitor, "Continue")
        await expect(visitor.page.get_by_role("heading", name="Endpoints")).to_be_visible()
        return visitor

    visitor = await enter("view")
    page = visitor.page
    await says(visitor, "<script>alert(1)</script>")
    await expect(page.locator("main")).not_to_contain_text("globex")
    await expect(page.locator(".brand")).to_contain_text("Shop <b> & Co")
    await visitor.check()
    await page.locator("tbody a").first.click()
    await expect(page.get_by_role("heading", name="Settings")).to_be_visible()
    assert await page.locator("main form").count() == 0
    for name in ("Change", "Replay", "Rotate the secret", "Delete", "Send a test"):
        await expect(page.get_by_role("link", name=name)).to_have_count(0)
    await visitor.check()
    for path in ("/portal/endpoints/1/edit", "/portal/endpoints/1/rotate", "/portal/endpoints/1/replay"):
        await visitor.open(path, 403)
        await visitor.check()
    await visitor.open("/portal/endpoints/2", 404)
    await visitor.open("/portal/endpoints")
    await press(visitor, "Log out")
    await says(visitor, "You are logged out.")
    await visitor.check()
    visitor.expect("status of 401")
    await page.goto("/portal/endpoints")
    await says(visitor, "Your session has ended.")

    visitor = await enter("manage", "resend", "secrets")
    for path in ("new", "1", "1/edit", "1/test", "1/rotate", "1/delete", "1/replay"):
        await visitor.open(f"/portal/endpoints/{path}")
        await visitor.check()
        links = await visitor.page.eval_on_selector_all(
            "a, form", "all => all.map(e => e.getAttribute('href') || e.getAttribute('action') || '#')"
        )
        assert all(re.match(r"/portal/|#", link) for link in links), links


async def test_form_of_another_session_is_refused(
    make_api: MakeApi, visit: Visit, endpoint: Endpoint
) -> None:
    """After another login in the same browser, an old form changes nothing."""
    api = (await make_api(api={"tokens": tokens({"all": ALL})})).as_token("all")
    await api.subscribe(endpoint)
    visitor = await visit(api.daemon)
    await visitor.open("/endpoints/1")
    await visitor.page.get_by_label("Token").fill("all")
    await press(visitor, "Log in")
    await expect(visitor.page.get_by_role("button", name="Pause")).to_be_visible()
    await visitor.page.locator("input[name=form_token]").evaluate_all(
        "all => all.forEach(field => { field.value = 'x'; })"
    )
    visitor.expect("status of 403")
    await press(visitor, "Pause")
    await says(visitor, "belongs to another session")
    await visitor.check()
    assert not (await api.get("/v1/subscriptions/1")).body["paused"]
