"""/v1/dead-letters: shows, lists and requeues dead letters."""

import asyncio

from tests.support.api import Client
from tests.support.endpoint import Endpoint
from tests.support.flow import Flow
from tests.support.waiting import until


async def dead_letter(api: Client, flow: Flow, endpoint: Endpoint) -> int:
    """Create a dead letter and return its id."""
    endpoint.answer(500)
    event_id = (await api.event()).body["id"]
    await until(
        flow.daemon, "select exists (select from webhookd.dead_letters where event_id = $1)", event_id
    )
    letter_id: int = await flow.daemon.fetchval(
        "select id from webhookd.dead_letters where event_id = $1", event_id
    )
    return letter_id


async def test_dead_letter_is_requeued_once(api: Client, endpoint: Endpoint, flow: Flow) -> None:
    """201 with the new delivery, which is sent; a second request gets 409 with the same delivery."""
    made = await api.subscribe(endpoint, max_attempts=1)
    letter_id = await dead_letter(api, flow, endpoint)
    letter = (await api.get(f"/v1/dead-letters/{letter_id}")).body
    assert (letter["final_error_code"], letter["payload_snapshot"]) == ("HTTP_500", {})
    assert (letter["subscription_id"], letter["requeued_saga_id"]) == (made["id"], None)
    endpoint.answer(200)
    path = f"/v1/dead-letters/{letter_id}/requeue"
    answers = await asyncio.gather(*(api.post(path) for _ in range(5)))
    [requeued] = [answer for answer in answers if answer.status == 201]
    again = [answer for answer in answers if answer is not requeued]
    assert {answer.problem for answer in again} == {(409, "already_requeued")}
    assert {answer.body["saga_id"] for answer in again} == {requeued.body["saga_id"]}
    await until(
        flow.daemon,
        "select status = 'Completed' from webhookd.webhook_delivery_sagas where id = $1",
        requeued.body["saga_id"],
    )
    shown = (await api.get(f"/v1/dead-letters/{letter_id}")).body
    assert shown["requeued_saga_id"] == requeued.body["saga_id"]
    assert (await api.post("/v1/dead-letters/999/requeue")).problem == (404, "not_found")


async def test_requeue_for_a_held_subscription_is_rejected(
    api: Client, endpoint: Endpoint, flow: Flow
) -> None:
    """409 while the subscription is not active; a bulk requeue skips and counts it."""
    made = await api.subscribe(endpoint, max_attempts=1)
    letter_id = await dead_letter(api, flow, endpoint)
    await api.patch(f"/v1/subscriptions/{made['id']}", {"active": False})
    answer = await api.post(f"/v1/dead-letters/{letter_id}/requeue")
    assert answer.problem == (409, "subscription_held")
    many = await api.post("/v1/dead-letters/requeue", {"filter": {}, "dry_run": False})
    assert many.body == {"matched": 1, "requeued": 0, "skipped": 1, "payload_removed": 0}


async def test_dead_letters_are_listed_and_requeued_by_filter(
    api: Client, endpoint: Endpoint, flow: Flow
) -> None:
    """Filters by subscription, error code and time; a dry run by default; a bad filter is rejected."""
    made = await api.subscribe(endpoint, max_attempts=1)
    letters = [await dead_letter(api, flow, endpoint) for _ in range(3)]
    failed_at = [(await api.get(f"/v1/dead-letters/{letter}")).body["failed_at"] for letter in letters]
    path = "/v1/dead-letters"
    assert await api.pages(path, limit=2) == [[letters[2], letters[1]], [letters[0]]]
    assert await api.pages(f"{path}?subscription_id={made['id']}", limit=9) == [letters[::-1]]
    assert await api.pages(f"{path}?error_code=HTTP_404", limit=9) == [[]]
    assert await api.pages(f"{path}?failed_after={failed_at[1]}", limit=9) == [[letters[2], letters[1]]]
    assert await api.pages(f"{path}?failed_before={failed_at[1]}", limit=9) == [[letters[0]]]

    requeue = f"{path}/requeue"
    counts = {"matched": 3, "requeued": 3, "skipped": 0, "payload_removed": 0}
    assert (await api.post(requeue, {"filter": {"error_code": "HTTP_500"}})).body == counts
    assert (await api.post(requeue, {"filter": {}, "dry_run": True})).body == counts
    assert await flow.daemon.fetchval("select count(*) from webhookd.webhook_delivery_sagas") == 3
    some = {"filter": {"failed_before": failed_at[1]}, "dry_run": False}
    assert (await api.post(requeue, some)).body == {
        "matched": 1,
        "requeued": 1,
        "skipped": 0,
        "payload_removed": 0,
    }
    await until(flow.daemon, "select count(*) = 4 from webhookd.dead_letters")
    first = (await api.post(requeue, {"limit": 3})).body
    assert {name: first[name] for name in counts} == {
        "matched": 3,
        "requeued": 2,
        "skipped": 1,
        "payload_removed": 0,
    }
    rest = {"limit": 3, "after_id": first["last_id"], "filter": {"failed_before": first["failed_before"]}}
    assert (await api.post(requeue, rest)).body == {
        "matched": 1,
        "requeued": 1,
        "skipped": 0,
        "payload_removed": 0,
        "last_id": None,
        "failed_before": first["failed_before"],
    }
    many = await api.post(requeue, {"filter": {"subscription_id": made["id"]}, "dry_run": False})
    assert many.body == {"matched": 4, "requeued": 3, "skipped": 1, "payload_removed": 0}
    await until(flow.daemon, "select count(*) = 7 from webhookd.dead_letters")
    for body, code in (
        ({"filter": {"status": "x"}}, "unknown_field"),
        ({"dry_run": "no"}, "invalid_request"),
        ({"limit": 0}, "invalid_request"),
        ({"limit": 1, "after_id": -1}, "invalid_request"),
        ({"filter": {"failed_after": "2026-02-30T00:00:00Z"}}, "invalid_request"),
        ({"filter": {"failed_after": "2026-01-01T00:00:00"}}, "invalid_request"),
        ({"filter": {"failed_before": "infinity"}}, "invalid_request"),
    ):
        assert (await api.post(requeue, body)).problem == (422, code), body
