"""The data that the pages are tested with has every case that a page must show."""

from tests.browser.demo import DEMO_ENDPOINTS, DEMO_EVENTS, DEMO_HOURS, HOSTILE_TEXTS, MEBIBYTE, SCRIPT
from tests.browser.sites import Site

STATUSES = """
    select n.id, s.status::text, count(*) from webhookd.webhook_delivery_sagas s
    join webhookd.subscriptions n on n.id = s.subscription_id group by 1, 2
"""


async def counts(site: Site) -> dict[tuple[str, str], int]:
    """Return the number of deliveries by endpoint and status."""
    names = {number: name for name, number in site.filled.endpoints.items()}
    connection = await site.database.connect("superuser")
    rows = await connection.fetch(STATUSES)
    return {(names[number], status): count for number, status, count in rows}


async def test_demo_has_every_case(demo: Site) -> None:
    """There are deliveries of every status, dead letters, tenants, and events over several hours."""
    assert len(demo.filled.events) == DEMO_EVENTS
    assert len(demo.filled.endpoints) == len(DEMO_ENDPOINTS)
    found = await counts(demo)
    for case in (
        ("orders", "Completed"),
        ("staging", "Pending"),
        ("crm", "PendingRetry"),
        ("billing", "DeadLettered"),
        ("warehouse", "Completed"),
        ("risk", "Completed"),
    ):
        assert found.get(case, 0) > 0, (case, found)
    assert ("mobile", "Pending") not in found
    connection = await demo.database.connect("superuser")
    # Not relative to now: the data may have been made some minutes ago.
    hours = await connection.fetchval(
        "select extract(epoch from max(created_at) - min(created_at))::float8 / 3600 from webhookd.events"
    )
    assert DEMO_HOURS - 1 < hours <= DEMO_HOURS
    assert await connection.fetchval("select max(created_at) < now() from webhookd.events")
    assert (await demo.api.get("/v1/dead-letters")).body["items"]
    assert len((await demo.api.get("/v1/tenants")).body["items"]) == len(demo.filled.tenants)


async def test_hostile_data_is_stored(hostile: Site) -> None:
    """Each text is in an event, and each event has a delivered, a failed and a waiting delivery."""
    events = len(HOSTILE_TEXTS) + 1
    assert await counts(hostile) == {
        ("good", "Completed"): events,
        ("bad", "DeadLettered"): events,
        ("late", "PendingRetry"): events,
    }
    event = await hostile.api.get(f"/v1/events/{hostile.filled.events[SCRIPT]}")
    assert event.body["labels"] == {SCRIPT: SCRIPT, "long": "l" * 100}
    connection = await hostile.database.connect("superuser")
    size = await connection.fetchval(
        "select octet_length(payload::text) from webhookd.events where id = $1",
        hostile.filled.events["mebibyte"],
    )
    assert size == MEBIBYTE
    excerpt = await connection.fetchval(
        "select response_excerpt from webhookd.webhook_delivery_jobs where response_status = 500 limit 1"
    )
    assert SCRIPT.encode() in excerpt
    assert b"\x00" in excerpt
