"""The pages of deliveries, dead letters and jobs in a browser: every page and every action, in every view."""

import asyncio
from typing import Any

import pytest

from tests.browser.conftest import Visit
from tests.browser.visitor import VIEWS, View, Visitor
from tests.flow.conftest import MakeApi
from tests.support.api import Client, tokens
from tests.support.endpoint import Endpoint
from tests.support.flow import Flow
from tests.support.waiting import CONDITION_TIMEOUT_SECONDS, until

EVERY_VIEW = pytest.mark.parametrize("view", VIEWS, ids=str)
# With script and without.
BOTH = pytest.mark.parametrize("view", [View(), View(390, javascript=False)], ids=str)
SCOPES = ("ingest", "subscriptions", "operate", "read", "jobs")
HOSTILE = "<script>document.title='broken'</script><img src=x onerror=alert(1)>\x1b[31m\u202e\u05d0\u05d1"
RESPONSE = f"{HOSTILE}\0{'long' * 900}"
PAYLOAD = {"note": HOSTILE, "long": "x" * 300_000, "arabic": "\u0645\u0631\u062d\u0628\u0627 " * 50}


async def fill(api: Client, endpoint: Endpoint, flow: Flow) -> None:
    """Make hostile deliveries: 1 is delivered, 2 and 3 are dead letters, 4 waits for a retry."""
    made = await api.subscribe(endpoint, max_attempts=2, base_delay_seconds=0.01, description=HOSTILE[:400])
    endpoint.answer(200, b"OK")
    await api.event(correlation_id="trace <b>'\"", labels={HOSTILE[:20]: HOSTILE[-30:]})
    await until(flow.daemon, "select status = 'Completed' from webhookd.webhook_delivery_sagas where id = 1")
    endpoint.answer(503, RESPONSE.encode())
    for number in (2, 3):
        await api.event(payload=PAYLOAD)
        await until(flow.daemon, "select count(*) = $1 from webhookd.dead_letters", number - 1)
    await api.patch(f"/v1/subscriptions/{made['id']}", {"base_delay_seconds": 3600, "max_attempts": 9})
    await api.event()
    await until(
        flow.daemon, "select status = 'PendingRetry' from webhookd.webhook_delivery_sagas where id = 4"
    )


@pytest.fixture
async def api(make_api: MakeApi, endpoint: Endpoint, flow: Flow) -> Client:
    """Start an instance with deliveries."""
    api = await make_api(retry={"base_delay_seconds": 3600.0, "max_delay_seconds": 3600.0})
    await fill(api, endpoint, flow)
    return api


async def texts(visitor: Visitor, selector: str) -> list[str]:
    """Return the texts of the elements."""
    return await visitor.page.locator(selector).all_inner_texts()


async def press(visitor: Visitor, name: str) -> None:
    """Press a button, and wait for the next page."""
    async with visitor.page.expect_navigation():
        await visitor.page.get_by_role("button", name=name, exact=True).click()


@EVERY_VIEW
async def test_pages_are_accessible_and_fit(visit: Visit, view: View, api: Client) -> None:
    """With hostile and long content, shown as text, with every part open; also the empty and wrong lists."""
    visitor = await visit(api.daemon, view)
    for path in ("/deliveries", "/deliveries/1", "/deliveries/2", "/deliveries/4", "/dead-letters"):
        await visitor.open(path)
        closed = visitor.page.locator("details:not([open]) > summary")
        while await closed.count():
            await closed.first.click()
        await visitor.check()
        assert "broken" not in await visitor.page.title()
        assert await visitor.page.locator("img[src=x]").count() == 0
    for path in (
        "/deliveries?tenant=none",
        "/dead-letters?error_code=none",
        "/dead-letters/requeue?error_code=HTTP_503&subscription_id=1",
    ):
        await visitor.open(path)
        await visitor.check()
    await visitor.open("/deliveries?tenant=%3Cscript%3E", 422)
    await visitor.check()


@BOTH
async def test_delivery_is_filtered_opened_and_sent_again(
    visit: Visit, view: View, api: Client, endpoint: Endpoint
) -> None:
    """By the quick filter, then by the form, which keeps the quick filter; then the action."""
    visitor = await visit(api.daemon, view)
    page = visitor.page
    await visitor.open("/deliveries")
    await page.get_by_role("navigation", name="Status").get_by_role("link", name="Dead letters").click()
    assert await texts(visitor, "tbody td[data-head=Delivery] a") == ["3", "2"]
    await page.get_by_label("Error").fill("TIMEOUT")
    await press(visitor, "Filter")
    assert "No delivery matches" in await page.inner_text("main")
    assert await page.locator(".views [aria-current]").inner_text() == "Dead letters"
    await page.go_back()
    await page.locator("tbody td[data-head=Delivery] a").first.click()
    assert await texts(visitor, ".timeline .title") == [
        "Created",
        "Attempt 1",
        "Attempt 2",
        "Became a dead letter",
    ]
    endpoint.answer(200, b"OK")
    await press(visitor, "Send again")
    await page.wait_for_url("**/deliveries/5")
    assert "Delivery 3 is sent again." in await page.inner_text("main [role=status]")
    await page.get_by_role("link", name="delivery 3").click()
    assert await page.get_by_role("button", name="Send again").count() == 0
    await page.get_by_role("link", name="Sent again as delivery 5").click()
    await page.wait_for_url("**/deliveries/5")


@BOTH
async def test_retry_is_sent_now(visit: Visit, view: View, api: Client, endpoint: Endpoint) -> None:
    """With script, the page shows by itself that it was delivered."""
    visitor = await visit(api.daemon, view)
    await visitor.open("/deliveries/4")
    endpoint.answer(200, b"OK")
    await press(visitor, "Retry now")
    delivered = visitor.page.locator("h1 + span", has_text="Delivered")
    if view.javascript:
        await delivered.wait_for()
        return
    async with asyncio.timeout(CONDITION_TIMEOUT_SECONDS):
        while not await delivered.count():
            await visitor.page.reload()


async def test_commands_are_copied(visit: Visit, api: Client) -> None:
    """The text of the button is that of the commands."""
    visitor = await visit(api.daemon)
    await visitor.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    await visitor.open("/deliveries/1")
    await visitor.page.get_by_role("button", name="Copy as curl").click()
    await visitor.page.get_by_text("Show the commands").click()
    shown = await visitor.page.locator("details[open] pre", has_text="curl").inner_text()
    assert await visitor.page.evaluate("navigator.clipboard.readText()") == shown
    assert "webhook-id: evt_1" in shown


@BOTH
async def test_dead_letters_are_selected_and_requeued(
    visit: Visit, view: View, api: Client, endpoint: Endpoint
) -> None:
    """One of them, and then all that are left, after the confirmation."""
    visitor = await visit(api.daemon, view)
    page = visitor.page
    endpoint.answer(200, b"OK")
    await visitor.open("/dead-letters")
    await press(visitor, "Requeue selected")
    assert "Select 1 to 100 dead letters first." in await page.inner_text("main [role=alert]")
    if view.javascript:
        await page.get_by_label("Select all on this page").check()
        assert await page.locator("input[name=id]:checked").count() == 2
        await page.get_by_label("Select all on this page").uncheck()
    await page.get_by_label("Select the dead letter of delivery 2").check()
    await press(visitor, "Requeue selected")
    assert await page.inner_text("main [role=status]") == "1 dead letter was requeued."
    assert await page.locator("input[name=id]").count() == 1
    await page.get_by_role("link", name="Requeue all…").click()
    assert await texts(visitor, ".figure dd") == ["2", "1", "1"]
    await press(visitor, "Requeue it")
    await page.wait_for_url("**/dead-letters")
    result = await page.inner_text("main [role=status]")
    assert result.startswith("1 dead letter was requeued. 1 skipped: requeued before")
    assert await page.locator("input[name=id]").count() == 0


@BOTH
async def test_long_requeue_goes_on_by_itself_or_by_pressing_continue(
    visit: Visit, view: View, make_api: MakeApi, flow: Flow
) -> None:
    """1,200 dead letters in three steps; with script it needs no more than the confirmation."""
    await flow.subscribe()
    await flow.superuser.execute("set session_replication_role = replica")
    await flow.superuser.execute(
        """
        with written as (
            insert into webhookd.events (event_type, payload)
            select 'order.created', '{}' from generate_series(1, 1200) returning id
        ), sagas as (
            insert into webhookd.webhook_delivery_sagas
                (event_id, subscription_id, status, attempt_count, final_error_code)
            select id, (select id from webhookd.subscriptions), 'DeadLettered', 1, 'TIMEOUT' from written
            returning id, event_id, subscription_id
        )
        insert into webhookd.dead_letters
            (saga_id, event_id, subscription_id, final_error_code, payload_snapshot)
        select id, event_id, subscription_id, 'TIMEOUT', '{}' from sagas
        """
    )
    api = await make_api(services={"enabled": ["api"]})
    visitor = await visit(api.daemon, view)
    await visitor.open("/dead-letters/requeue")
    await press(visitor, "Requeue 1,200")
    if not view.javascript:
        assert "500 requeued, of 1,200." in await visitor.page.inner_text("main")
        await visitor.check()
        for _ in range(2):
            await press(visitor, "Continue")
    await visitor.page.wait_for_url("**/dead-letters")
    assert await visitor.page.inner_text("main [role=status]") == "1,200 dead letters were requeued."
    assert await visitor.page.get_by_role("link", name="Older").count() == 1


@EVERY_VIEW
async def test_jobs_are_shown_requeued_and_cancelled(visit: Visit, view: View, make_api: MakeApi) -> None:
    """From the empty queue to a dead letter and its new job, which is cancelled."""
    api = await make_api()
    visitor = await visit(api.daemon, view)
    page = visitor.page
    await visitor.open("/jobs")
    assert "webhookd jobs enable" in await page.inner_text("main")
    await visitor.check()
    await api.patch("/v1/job-substrate", {"enabled": True})
    await visitor.open("/jobs")
    assert "No jobs yet" in await page.inner_text("main")
    await dead_job(api)
    await visitor.open("/jobs?status=dead_letter")
    await visitor.check()
    await page.locator("tbody a").first.click()
    await visitor.check()
    assert HOSTILE[:30] in await page.inner_text("main")
    await press(visitor, "Requeue")
    assert await page.inner_text("main [role=status]") == "This is the new job."
    await page.get_by_label("Reason").fill(HOSTILE[:60].replace("\x1b", ""))
    await press(visitor, "Cancel the job")
    assert await page.inner_text("main [role=status]") == "It is cancelled."
    await visitor.check()


async def dead_job(api: Client) -> None:
    """Enqueue a job with hostile content, and let it fail for good."""
    text = HOSTILE.replace("\x1b", "")
    body: dict[str, Any] = {"kind": text, "executor": "external_worker", "idempotency_key": text * 2}
    more = {"payload_ref": text + "long" * 200, "safe_payload": {text: text * 20}}
    assert (await api.post("/v1/jobs", body | more)).status == 201
    claim = {"kind": text, "executor": "external_worker", "lease_holder": text}
    job = (await api.post("/v1/jobs/claim", claim)).body
    held = {"lease_token": job["lease_token"]}
    await api.post(f"/v1/jobs/{job['job_id']}/progress", held | {"status_signal": text})
    failure = held | {"permanent": True, "error_code": text[:90], "error_message": HOSTILE * 15}
    assert (await api.post(f"/v1/jobs/{job['job_id']}/fail", failure)).status == 200


async def test_missing_scope_hides_the_buttons(
    visit: Visit, make_api: MakeApi, endpoint: Endpoint, flow: Flow
) -> None:
    """And the same form is refused, also with a wrong form token. HTTP tests have the other actions."""
    api = await make_api(
        api={"tokens": tokens({"all": SCOPES, "reader": ["read"]})},
        retry={"base_delay_seconds": 3600.0, "max_delay_seconds": 3600.0},
    )
    await fill(api.as_token("all"), endpoint, flow)
    reader, operator = await visit(api.daemon), await visit(api.daemon)
    for visitor, token in ((reader, "reader"), (operator, "all")):
        await visitor.open("/login?next=/deliveries/2")
        await visitor.page.get_by_label("Token").fill(token)
        await press(visitor, "Log in")
    assert await operator.page.get_by_role("button", name="Send again").count() == 1
    assert await reader.page.get_by_role("button", name="Send again").count() == 0
    await reader.open("/dead-letters")
    assert await reader.page.get_by_role("checkbox").count() == 0
    assert await reader.page.get_by_text("Requeue all").count() == 0
    token_field = operator.page.locator(".actions input[name=form_token]")
    await token_field.evaluate("field => field.value = 'wrong'")
    operator.expect("the server responded with a status of 403")
    await press(operator, "Send again")
    assert "this form belongs to another session" in (await operator.page.inner_text("main")).lower()


@EVERY_VIEW
async def test_customers_see_their_deliveries_in_the_portal(
    visit: Visit, view: View, make_api: MakeApi, endpoint: Endpoint, flow: Flow
) -> None:
    """Without workers, events and dead letters; with the capability, they send again."""
    api = await make_api()
    await api.subscribe(endpoint, tenant="acme", max_attempts=1, description=HOSTILE[:400])
    endpoint.answer(503, RESPONSE.encode())
    await api.event(tenant="acme", payload=PAYLOAD)
    await until(flow.daemon, "select count(*) = 1 from webhookd.dead_letters")
    capabilities = {"capabilities": ["view", "resend"]}
    made = await api.post("/v1/tenants/acme/portal-link", capabilities)
    visitor = await visit(api.daemon, view)
    page = visitor.page
    code = made.body["url"].partition("code=")[2]
    entered = await page.context.request.post("/portal/enter", form={"code": code}, max_redirects=0)
    assert entered.status == 303
    await visitor.open("/portal/deliveries")
    await visitor.check()
    await page.locator("tbody td[data-head=Delivery] a").first.click()
    await visitor.check()
    shown = await page.inner_text("main")
    assert "Worker" not in shown
    assert "Given up" in shown
    links = await page.locator("a[href]").evaluate_all("links => links.map(link => link.pathname)")
    assert all(link.startswith("/portal/") for link in links), links
    endpoint.answer(200, b"OK")
    await press(visitor, "Send again")
    await page.wait_for_url("**/portal/deliveries/2")
    assert (await page.request.get("/portal/dead-letters")).status == 404
