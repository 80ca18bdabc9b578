"""The pages of dead letters: the list, requeueing some, and requeueing all that match in steps."""

import re
from html import unescape

from tests.flow.conftest import MakeApi
from tests.flow.console.conftest import MakeVisitor
from tests.support.api import Client, tokens
from tests.support.endpoint import Endpoint
from tests.support.flow import Flow
from tests.support.visitor import Shown, Visitor
from tests.support.waiting import until

SCOPES = ("ingest", "subscriptions", "operate", "read")
BURIED = "select count(*) = $1 from webhookd.dead_letters"
REQUEUED = "select count(*) from webhookd.webhook_delivery_sagas where dead_letter_id is not null"


async def bury(api: Client, flow: Flow, endpoint: Endpoint, number: int, **event: str) -> None:
    """Publish events whose deliveries fail."""
    before = await flow.daemon.fetchval("select count(*) from webhookd.dead_letters")
    endpoint.answer(503)
    for _ in range(number):
        await api.event(**event)
    await until(flow.daemon, BURIED, before + number)


def selectable(response: Shown) -> list[str]:
    """Return the ids of the dead letters that can be selected."""
    assert response.status == 200, response
    return re.findall(r'type="checkbox" name="id" value="(\d+)"', response.html)


def fields(response: Shown) -> dict[str, str]:
    """Return the hidden fields of the form that goes on."""
    form = response.html.partition('action="/dead-letters/requeue"')[2].partition("</form>")[0]
    return {
        name: unescape(value)
        for name, value in re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', form)
    }


async def requeue_all(visitor: Visitor, response: Shown) -> tuple[Shown, int]:
    """Press Continue until the end; return the list with the result, and the number of steps."""
    steps = 0
    while response.status == 200:
        response = await visitor.post("/dead-letters/requeue", fields(response))
        steps += 1
    assert response.status == 303, response
    return await visitor.get(response.location), steps


async def test_list_shows_and_filters_dead_letters(
    make_api: MakeApi, make_visitor: MakeVisitor, endpoint: Endpoint, flow: Flow
) -> None:
    """Each filter; a wrong one is explained."""
    api = await make_api()
    visitor = make_visitor(api)
    assert "No dead letters" in (await visitor.get("/dead-letters")).text
    made = await api.subscribe(endpoint, tenant="acme", max_attempts=1, description="<b>Billing</b>")
    await bury(api, flow, endpoint, 2, tenant="acme")
    everything = await visitor.get("/dead-letters")
    ids = selectable(everything)
    assert len(ids) == 2
    assert "<b>Billing" not in everything.html
    assert "<b>Billing</b>" in everything.text
    for query, count in {
        "tenant=acme": 2,
        "tenant=other": 0,
        "error_code=HTTP_503": 2,
        "error_code=TIMEOUT": 0,
        f"subscription_id={made['id']}": 2,
        "failed_after=2020-01-01T00:00": 2,
        "failed_before=2020-01-01T00:00": 0,
    }.items():
        assert len(selectable(await visitor.get(f"/dead-letters?{query}"))) == count, query
    for query in ("tenant=%3Cb%3E", "subscription_id=x", "failed_after=soon"):
        assert (await visitor.get(f"/dead-letters?{query}")).status == 422, query
        confirm = await visitor.get(f"/dead-letters/requeue?{query}")
        assert confirm.location == f"/dead-letters?{query}"


async def test_selected_dead_letters_are_requeued_and_refusals_counted(
    make_api: MakeApi, make_visitor: MakeVisitor, endpoint: Endpoint, flow: Flow
) -> None:
    """The result names the reasons; the filters stay."""
    api = await make_api()
    made = await api.subscribe(endpoint, max_attempts=1)
    await bury(api, flow, endpoint, 3)
    visitor = make_visitor(api)
    path, action = "/dead-letters?error_code=HTTP_503", "/dead-letters/requeue-selected"
    first, second, third = selectable(await visitor.get(path))
    endpoint.answer(200)
    await api.post(f"/v1/dead-letters/{third}/requeue")
    form = {"id": [first, third, "999"], "error_code": "HTTP_503"}
    answer = await visitor.submit(action, path, **form)
    assert answer.location == path
    shown = (await visitor.get(path)).text
    assert "1 dead letter was requeued. 1 not: requeued before. 1 not: not found." in shown
    assert selectable(await visitor.get(path)) == [second]
    await api.patch(f"/v1/subscriptions/{made['id']}", {"active": False})
    await visitor.submit(action, path, id=[second])
    page = await visitor.get(path)
    assert "0 dead letters were requeued. 1 not: the endpoint is disabled" in page.text
    for wrong in ([], ["x"], ["1"] * 101):
        await visitor.submit(action, path, id=wrong)
        assert "Select 1 to 100 dead letters first." in (await visitor.get(path)).text


async def write_dead_letters(flow: Flow, number: int) -> None:
    """Write dead letters of as many events, faster than by failing."""
    await flow.subscribe()
    await flow.superuser.execute("set session_replication_role = replica")
    await flow.superuser.execute(
        """
        with written as (
            insert into webhookd.events (event_type, payload)
            select 'order.created', '{}' from generate_series(1, $1) returning id
        ), sagas as (
            insert into webhookd.webhook_delivery_sagas
                (event_id, subscription_id, status, attempt_count, final_error_code)
            select id, (select id from webhookd.subscriptions), 'DeadLettered', 1, 'TIMEOUT' from written
            returning id, event_id, subscription_id
        )
        insert into webhookd.dead_letters
            (saga_id, event_id, subscription_id, final_error_code, payload_snapshot)
        select id, event_id, subscription_id, 'TIMEOUT', '{}' from sagas
        """,
        number,
    )
    await flow.superuser.execute("analyze")


async def test_all_that_match_are_requeued_in_steps_after_a_dry_run(
    make_api: MakeApi, make_visitor: MakeVisitor, flow: Flow
) -> None:
    """The count changes nothing; a step does a part; an interrupted action can be started again."""
    await write_dead_letters(flow, 1200)
    visitor = make_visitor(await make_api(services={"enabled": ["api"]}))
    confirm = await visitor.get("/dead-letters/requeue?error_code=TIMEOUT")
    assert "1,200" in confirm.text
    assert await flow.daemon.fetchval(REQUEUED) == 0
    assert fields(confirm)["total"] == "1200"
    step = await visitor.post("/dead-letters/requeue", fields(confirm))
    assert step.status == 200
    assert "500 requeued, of 1,200." in step.text
    assert 'max="1200" value="500"' in step.html
    assert "data-submit-at-once" in step.html
    assert await flow.daemon.fetchval(REQUEUED) == 500
    # Somebody stops here, and starts again.
    confirm = await visitor.get("/dead-letters/requeue?error_code=TIMEOUT")
    assert "Requeue 700" in confirm.text
    shown, steps = await requeue_all(visitor, confirm)
    assert steps == 3
    assert "700 dead letters were requeued. 500 skipped: requeued before" in shown.text
    assert 'value="TIMEOUT"' in shown.html
    assert await flow.daemon.fetchval(REQUEUED) == 1200
    nothing = await visitor.get("/dead-letters/requeue?error_code=TIMEOUT")
    assert "There is nothing to requeue." in nothing.text


async def test_count_before_requeueing_is_bounded(
    make_api: MakeApi, make_visitor: MakeVisitor, flow: Flow
) -> None:
    """It stops after 10,000 dead letters, and says so; the progress has no end then."""
    await write_dead_letters(flow, 10_001)
    visitor = make_visitor(await make_api(services={"enabled": ["api"]}))
    page = await visitor.get("/dead-letters/requeue")
    assert page.status == 200
    assert "10,000+" in page.text
    assert "Counting stopped after 10,000." in page.text
    step = await visitor.post("/dead-letters/requeue", fields(page))
    assert "500 requeued." in step.text
    assert '<progress aria-label="Dead letters looked at"></progress>' in step.html


async def test_requeueing_needs_the_scope_and_the_form_token(
    make_api: MakeApi, make_visitor: MakeVisitor, endpoint: Endpoint, flow: Flow
) -> None:
    """403, and nothing is requeued; without the scope no button is shown. The portal has no such page."""
    api = await make_api(api={"tokens": tokens({"all": SCOPES, "reader": ["read"]})})
    api = api.as_token("all")
    await api.subscribe(endpoint, max_attempts=1)
    await bury(api, flow, endpoint, 1)
    reader, operator, customer = (make_visitor(api) for _ in range(3))
    await reader.log_in("reader")
    await operator.log_in("all")
    page = await reader.get("/dead-letters")
    assert "requeue" not in page.html.partition("<main")[2].lower().replace("requeued", "")
    assert (await reader.get("/dead-letters/requeue")).status == 403
    for action in ("/dead-letters/requeue", "/dead-letters/requeue-selected"):
        assert (await reader.submit(action, "/dead-letters", id=1)).status == 403
        assert (await operator.post(action, {"id": "1"})).status == 403
        assert (await operator.post(action, {"id": "1", "form_token": "x"})).status == 403
        assert (await customer.post(f"/portal{action}", {"id": "1"})).status == 404
    assert "Requeue selected" in (await operator.get("/dead-letters")).text
    for wrong in ({"after_id": "x"}, {"skipped": "-1"}, {"subscription_id": "x"}, {"until": "soon"}):
        answer = await operator.submit("/dead-letters/requeue", "/dead-letters", **wrong)
        assert answer.status == 422, wrong
    assert await flow.daemon.fetchval(REQUEUED) == 0
