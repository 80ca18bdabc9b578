"""/v1/deliveries: lists deliveries, and shows one with its attempts."""

from tests.flow.conftest import MakeApi
from tests.support.api import Client, is_time
from tests.support.endpoint import Endpoint
from tests.support.flow import EVENT_TYPE, Flow
from tests.support.waiting import until


async def test_deliveries_are_listed_and_shown_with_their_attempts(
    api: Client, endpoint: Endpoint, flow: Flow
) -> None:
    """Filters by status, subscription and event; a delivery shows the response to each attempt."""
    made = await api.subscribe(endpoint, max_attempts=2)
    endpoint.fail_times(1, 503)
    ids = [(await api.event()).body["id"] for _ in range(2)]
    await until(
        flow.daemon, "select count(*) = 2 from webhookd.webhook_delivery_sagas where status = 'Completed'"
    )
    listed = (await api.get("/v1/deliveries")).body["items"]
    assert [found["event_id"] for found in listed] == ids[::-1]
    assert {found["subscription_id"] for found in listed} == {made["id"]}
    assert {found["event_type"] for found in listed} == {EVENT_TYPE}
    assert await api.pages("/v1/deliveries?status=Completed", limit=1) == [[found["id"]] for found in listed]
    assert await api.pages("/v1/deliveries?status=DeadLettered", limit=1) == [[]]
    assert await api.pages(f"/v1/deliveries?event_id={ids[0]}", limit=9) == [[listed[1]["id"]]]
    assert await api.pages(f"/v1/deliveries?subscription_id={made['id'] + 1}", limit=9) == [[]]
    retried = max(listed, key=lambda found: found["attempt_count"])
    found = (await api.get(f"/v1/deliveries/{retried['id']}")).body
    assert {name: found[name] for name in retried} == retried
    assert [(a["attempt"], a["status"], a["response_status"]) for a in found["attempts"]] == [
        (1, "Failed", 503),
        (2, "Completed", 200),
    ]
    assert found["attempts"][0]["error_code"] == "HTTP_503"
    assert is_time(found["attempts"][0]["finished_at"])
    assert "lease_token" not in found["attempts"][0]


async def test_held_delivery_says_why(make_api: MakeApi, endpoint: Endpoint, flow: Flow) -> None:
    """In the list and alone; a finished delivery is not held."""
    api = await make_api()
    made = await api.subscribe(endpoint, tenant="acme", base_delay_seconds=3600)
    await api.event(tenant="acme")
    await until(flow.daemon, "select status = 'Completed' from webhookd.webhook_delivery_sagas")
    endpoint.answer(500)
    await api.event(tenant="acme")
    await until(
        flow.daemon, "select status = 'PendingRetry' from webhookd.webhook_delivery_sagas where id = 2"
    )

    async def holds() -> list[tuple[str | None, bool]]:
        listed = (await api.get("/v1/deliveries")).body["items"]
        alone = (await api.get("/v1/deliveries/2")).body
        assert alone["held_because"] == listed[0]["held_because"]
        return [(row["held_because"], row["held"]) for row in listed]

    assert await holds() == [(None, False), (None, False)]
    await api.request("PUT", "/v1/tenants/acme", json={"active": False})
    assert await holds() == [("tenant_inactive", True), (None, False)]
    await api.patch(f"/v1/subscriptions/{made['id']}", {"paused": True})
    assert await holds() == [("paused", True), (None, False)]
    await api.request("DELETE", f"/v1/subscriptions/{made['id']}")
    assert await holds() == [("deleted", True), (None, False)]


async def test_list_by_event_type_is_complete_although_pages_end_early(make_api: MakeApi, flow: Flow) -> None:
    """A type with more events than a page may look at, of which only the oldest has a delivery."""
    await flow.subscribe("order.paid")
    await flow.publish("order.paid")
    await flow.route()
    await flow.daemon.execute(
        "select webhookd.publish('order.paid', '{}', tenant => 'none') from generate_series(1, 20100)"
    )
    api = await make_api(services={"enabled": ["api"]})
    assert await api.pages("/v1/deliveries?event_type=order.paid", limit=10) == [[], [], [1]]
    assert await api.pages("/v1/deliveries?event_type=order.paid&tenant=none", limit=10) == [[], [], []]
    for cursor in (0, -1):
        refused = await api.get(f"/v1/deliveries?status=Pending&cursor={cursor}")
        assert refused.status == 422
