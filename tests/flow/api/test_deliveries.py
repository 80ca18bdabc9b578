"""/v1/deliveries: lists deliveries, and shows one with its attempts."""

from tests.support.api import Client, is_time
from tests.support.endpoint import Endpoint
from tests.support.flow import Flow
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
