"""The overview, the events, the login and the keyboard in a browser; and every page with hostile data."""

import pytest
from playwright.async_api import expect

from tests.browser.conftest import Visit
from tests.browser.pages import PAGES
from tests.browser.sites import Site
from tests.browser.visitor import NARROW, VIEWS, View, Visitor
from tests.flow.conftest import MakeApi
from tests.support.api import tokens

EACH_VIEW = pytest.mark.parametrize("view", VIEWS, ids=str)
# With script and without.
BOTH = pytest.mark.parametrize("view", [View(), View(NARROW, javascript=False)], ids=str)
SCOPES = ("ingest", "subscriptions", "operate", "read", "jobs")


@EACH_VIEW
async def test_overview_and_events_with_demo_data(visit: Visit, view: View, demo: Site) -> None:
    """They are accessible and fit, and the overview leads to what fails."""
    visitor = await visit(demo.daemon, view)
    for path in ("/", "/?span=24h", "/events", "/events?event_type=order.paid", "/events/1"):
        await visitor.open(path)
        await visitor.check()
    await visitor.open("/")
    page = visitor.page
    await expect(page.locator(".chart svg rect").first).to_be_visible()
    failing = page.locator("section", has=page.get_by_role("heading", name="Failing endpoints"))
    await failing.get_by_role("link").first.click()
    await expect(page.locator("h1")).to_contain_text("hooks.example")


@EACH_VIEW
async def test_pages_without_data_say_what_to_do(visitor: Visitor) -> None:
    """Each page of a new installation is accessible, fits, and is not blank."""
    for path in PAGES:
        if not path.removeprefix("/").partition("/")[2]:
            await visitor.open(path)
            await visitor.check()
    await visitor.open("/events")
    await expect(visitor.page.locator("main")).to_contain_text("webhookd publish")
    await visitor.open("/events?event_type=none")
    await expect(visitor.page.locator("main")).to_contain_text("No event matches")
    await visitor.open("/events/99", 404)
    await visitor.check()
    await expect(visitor.page.locator("main")).to_contain_text("event 99 does not exist")


@BOTH
async def test_events_are_filtered(visit: Visit, view: View, demo: Site) -> None:
    """By the form: a filter stays in the address and in the form, and can be cleared."""
    visitor = await visit(demo.daemon, view)
    await visitor.open("/events")
    page = visitor.page
    await page.fill("input[name=label]", "region=eu")
    await page.get_by_role("button", name="Filter").click()
    assert "label=region" in page.url
    await expect(page.locator("input[name=label]")).to_have_value("region=eu")
    rows = page.locator("tbody tr")
    assert await rows.count() == await page.locator("tbody tr", has_text="region=eu").count() > 0
    await page.get_by_role("link", name="Clear").click()
    assert "label" not in page.url
    await page.get_by_role("link", name="Older").click()
    await page.get_by_role("link", name="Newest").click()
    await page.locator("tbody a").first.click()
    await expect(page.locator("h1")).to_contain_text("Event 240")
    await expect(page.locator("main")).to_contain_text("What happened to it")


@pytest.mark.parametrize("view", [View(), View(NARROW, javascript=False, scheme="dark")], ids=str)
async def test_every_page_shows_hostile_data_as_text(visit: Visit, view: View, hostile: Site) -> None:
    """Markup, templates, escapes and reordering characters of an attacker are text, and break no layout."""
    visitor = await visit(hostile.daemon, view)
    ids = hostile.filled.events
    paths = [path for path in PAGES if not path.removeprefix("/").partition("/")[2]]
    for path in (*paths, *(f"/events/{event_id}" for event_id in ids.values())):
        await visitor.open(path)
        await visitor.assert_no_overflow()
        page = visitor.page
        assert "owned" not in await page.title(), path
        assert await page.locator("main img[src=x], main script").count() == 0, path
        text = await page.inner_text("body")
        assert not {"\x1b", "\u202e", "\u2066"} & set(text), path
    await visitor.check()


@BOTH
async def test_login_and_logout(visit: Visit, view: View, make_api: MakeApi) -> None:
    """A wrong token says so; the right one leads to the page that was asked for; logging out ends it."""
    api = await make_api(api={"tokens": tokens({"ops": SCOPES})})
    visitor = await visit(api.daemon, view)
    page = visitor.page
    await visitor.open("/events?event_type=order.paid")
    assert "/login" in page.url
    await visitor.check()
    await page.get_by_label("Token").fill("wrong")
    visitor.expect("status of 401")
    await page.get_by_role("button", name="Log in").click()
    await expect(page.get_by_role("alert")).to_contain_text("not valid")
    await visitor.check()
    await page.get_by_label("Token").fill("ops")
    await page.get_by_role("button", name="Log in").click()
    await expect(page.locator("h1")).to_have_text("Events")
    assert page.url.endswith("/events?event_type=order.paid")
    await page.get_by_role("button", name="Log out").click()
    assert page.url.endswith("/login")
    await expect(page.get_by_role("status")).to_contain_text("logged out")
    await visitor.open("/")
    assert "/login" in page.url


@BOTH
async def test_one_time_link_logs_in_once(visit: Visit, view: View, make_api: MakeApi) -> None:
    """With JavaScript at once, without by the button; a second use says that the link was used."""
    api = await make_api(api={"tokens": tokens({"ops": SCOPES})})
    link = (await api.as_token("ops").post("/v1/console/login-link")).body["url"]
    visitor = await visit(api.daemon, view)
    page = visitor.page
    await page.goto(link)
    if not view.javascript:
        await page.get_by_role("button", name="Continue").click()
    await expect(page.locator("h1")).to_have_text("Overview")
    again = await visit(api.daemon, view)
    again.expect("status of 401")
    await again.page.goto(link)
    if not view.javascript:
        await again.page.get_by_role("button", name="Continue").click()
    await expect(again.page.get_by_role("alert")).to_contain_text("already used")


async def test_keyboard(visit: Visit, demo: Site) -> None:
    """The search, rows, pages and the help have keys, which do nothing while a field has the focus."""
    visitor = await visit(demo.daemon)
    page = visitor.page
    await visitor.open("/events")
    await page.keyboard.press("/")
    await expect(page.locator("#search")).to_be_focused()
    await page.keyboard.type("jk?g")
    await expect(page.locator("#search")).to_have_value("jk?g")
    await page.keyboard.press("Escape")
    await page.keyboard.press("j")
    await page.keyboard.press("j")
    await page.keyboard.press("k")
    await expect(page.locator("tbody tr.here")).to_have_count(1)
    await expect(page.locator("tbody tr.here a").first).to_be_focused()
    await page.keyboard.press("?")
    await expect(page.get_by_role("dialog")).to_be_visible()
    await visitor.check()
    await page.keyboard.press("Escape")
    await page.keyboard.press("Enter")
    await expect(page.locator("h1")).to_contain_text("Event")
    await page.keyboard.press("g")
    await page.keyboard.press("p")
    await expect(page.locator("h1")).to_have_text("Endpoints")


async def test_theme_and_copy_buttons(visit: Visit, demo: Site) -> None:
    """The theme stays on the next page. A copy button copies exact text."""
    visitor = await visit(demo.daemon)
    page = visitor.page
    await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    await visitor.open("/events/1")
    ground = "getComputedStyle(document.body).backgroundColor"
    light = await page.evaluate(ground)
    await page.get_by_role("button", name="Switch between light and dark").click()
    dark = await page.evaluate(ground)
    assert light != dark
    await visitor.check()
    await visitor.open("/events/2")
    assert await page.evaluate(ground) == dark
    await page.get_by_role("button", name="Copy the payload").click()
    copied = await page.evaluate("navigator.clipboard.readText()")
    connection = await demo.database.connect("superuser")
    payload = await connection.fetchval("select payload::text from webhookd.events where id = 2")
    assert copied == payload
