"""Bad endpoints with a real daemon: each attempt has the right outcome; other deliveries are unaffected."""

from collections.abc import Iterator

import pytest

from tests.flow.conftest import HELD, PATIENT, SHORT, MakeDaemon
from tests.flow.test_lifecycle import publish_many, receipts
from tests.support.bad_endpoints import EXCERPT_BYTES, BadEndpoints
from tests.support.certificates import Certificates
from tests.support.endpoint import Endpoint
from tests.support.flow import EVENT_TYPE, Flow
from tests.support.waiting import until

MEBIBYTE = 1024 * 1024
# One decompressed bomb. Measured: 16 to 23 MiB after these 80 responses, and ±9 MiB after 80 more.
MAX_GROWTH_BYTES = 64 * MEBIBYTE
# Measured: 0.4 to 4.7 MiB, of which the daemon reads 64 KiB; the rest is in buffers when it closes.
MAX_SENT_BYTES = 16 * MEBIBYTE
PAUSE_SECONDS = 1000

ALL_SETTLED = """
    select count(*) = $1 from webhookd.webhook_delivery_sagas where status in ('Completed', 'DeadLettered')
"""
COMPLETED_OF = """
    select count(*) from webhookd.webhook_delivery_sagas
    where subscription_id = any($1) and status = 'Completed'
"""
ATTEMPTED_AS = """
    select exists (
        select from webhookd.webhook_delivery_jobs
        where subscription_id = $1 and finished_at is not null
            and error_code is not distinct from $2 and response_status is not distinct from $3)
"""
ALL_LEASED = """
    select count(*) = $2 from webhookd.webhook_delivery_jobs
    where subscription_id = any($1) and status = 'Leased'
"""
EACH_FAILED = """
    select count(distinct subscription_id) = cardinality($1::bigint[]) from webhookd.webhook_delivery_jobs
    where subscription_id = any($1) and status = 'Failed'
"""


@pytest.fixture
def bad(certificates: Certificates) -> Iterator[BadEndpoints]:
    """All kinds of bad endpoints."""
    with BadEndpoints.listening(certificates) as bad:
        yield bad


async def subscribe_all(flow: Flow, bad: BadEndpoints, event_type: str) -> dict[str, int]:
    """Subscribe each bad endpoint to one event type."""
    return {name: await flow.subscribe(event_type, url) for name, url in bad.urls.items()}


async def test_each_bad_endpoint_has_its_error_code(
    flow: Flow, bad: BadEndpoints, make_daemon: MakeDaemon
) -> None:
    """Code, status and excerpt are stored, binary bodies too; no redirect is followed."""
    held = {name for name, expected in bad.expected.items() if expected.held}
    soon = bad.expected.keys() - held
    subscriptions = {name: await flow.subscribe("soon", bad.urls[name]) for name in soon}
    subscriptions |= {
        name: await flow.subscribe("held", bad.urls[name], max_attempts=PATIENT["max_attempts"])
        for name in held
    }
    daemon = await make_daemon(delivery=HELD, retry={"max_attempts": 1}).start()
    await flow.publish("soon", '{"n": 1}')
    await until(flow.daemon, ALL_SETTLED, len(soon))
    assert {name: len(await flow.attempts(subscriptions[name])) for name in soon} == dict.fromkeys(soon, 1)

    # Endpoints that last until the deadline, with a short one: a slow handshake may exceed it once.
    daemon.configure(delivery=SHORT)
    assert await daemon.reload()
    await flow.publish("held")
    for name in held:
        expected = bad.expected[name]
        answer = (expected.error_code, expected.response_status)
        await until(flow.daemon, ATTEMPTED_AS, subscriptions[name], *answer)

    for name, expected in bad.expected.items():
        attempts = await flow.attempts(subscriptions[name])
        answers = [(attempt["error_code"], attempt["response_status"]) for attempt in attempts]
        answer = (expected.error_code, expected.response_status)
        assert answer in answers, (name, answers)
        excerpt = attempts[answers.index(answer)]["response_excerpt"]
        assert excerpt.startswith(expected.excerpt), name
        assert len(excerpt) <= EXCERPT_BYTES, name
    assert bad.answering.requests_for("/never") == []
    assert not any(endpoint.requests for endpoint in bad.handshaking.values())
    assert daemon.metric("webhookd_service_restarts_total") == 0


async def test_bad_endpoints_do_not_delay_other_deliveries(
    flow: Flow, bad: BadEndpoints, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """300 events arrive once and at the first attempt while every bad endpoint misbehaves."""
    subscriptions = await subscribe_all(flow, bad, "bad")
    good = await flow.subscribe("good", endpoint.url("/good"))
    held = [subscriptions[name] for name, expected in bad.expected.items() if expected.held]
    failing = [subscriptions[name] for name, expected in bad.expected.items() if expected.fails_soon]
    await make_daemon(delivery=HELD, retry=PATIENT).start()
    await publish_many(flow, 10, ["bad"])
    await until(flow.daemon, ALL_LEASED, held, 10 * len(held))
    await until(flow.daemon, EACH_FAILED, failing)

    await publish_many(flow, 300, ["good"])
    await until(flow.daemon, f"select ({COMPLETED_OF}) = 300", [good])

    assert set(receipts(endpoint).values()) == {1}
    assert {request.headers["webhook-attempt"] for request in endpoint.requests} == {"1"}
    assert await flow.daemon.fetchval(ALL_LEASED, held, 10 * len(held)), "the held requests have ended"
    assert await flow.daemon.fetchval(COMPLETED_OF, [*held, *failing]) == 0


async def test_retry_after_a_failed_attempt_succeeds(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """500, then 200: two requests with one id, two jobs, one completed delivery."""
    subscription_id = await flow.subscribe(callback_url=endpoint.url())
    endpoint.fail_times(1, 500)
    await make_daemon().start()
    event_id = await flow.publish()
    await until(flow.daemon, f"select ({COMPLETED_OF}) = 1", [subscription_id])
    attempts = await flow.attempts(subscription_id)
    assert [
        (attempt["status"], attempt["error_code"], attempt["response_status"]) for attempt in attempts
    ] == [
        ("Failed", "HTTP_500", 500),
        ("Completed", None, 200),
    ]
    assert [request.headers["webhook-attempt"] for request in endpoint.requests] == ["1", "2"]
    assert {request.headers["webhook-id"] for request in endpoint.requests} == {f"evt_{event_id}"}


@pytest.mark.parametrize("status", [429, 503])
async def test_retry_after_delays_the_next_attempt(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon, status: int
) -> None:
    """Retry-After extends the backoff, up to the maximum delay."""
    retry_after = {"/plain": None, "/pause": str(PAUSE_SECONDS), "/forever": "31536000", "/nonsense": "soon"}
    for path, value in retry_after.items():
        endpoint.answer(status, headers={} if value is None else {"Retry-After": value}, path=path)
    subscriptions = {path: await flow.subscribe(callback_url=endpoint.url(path)) for path in retry_after}
    await make_daemon(retry={"base_delay_seconds": 100, "max_delay_seconds": 2000}).start()
    await flow.publish()
    await until(
        flow.daemon,
        "select count(*) = 4 from webhookd.webhook_delivery_sagas where status = 'PendingRetry'",
    )
    waits = {
        path: await flow.daemon.fetchval(
            "select extract(epoch from next_attempt_at - updated_at)::integer"
            " from webhookd.webhook_delivery_sagas where subscription_id = $1",
            subscription_id,
        )
        for path, subscription_id in subscriptions.items()
    }
    assert waits == {"/plain": 100, "/pause": PAUSE_SECONDS, "/forever": 2000, "/nonsense": 100}
    [attempt] = await flow.attempts(subscriptions["/pause"])
    assert (attempt["error_code"], attempt["retry_after_seconds"]) == (f"HTTP_{status}", PAUSE_SECONDS)


async def test_endless_responses_do_not_cost_memory(
    flow: Flow, endpoint: Endpoint, certificates: Certificates, make_daemon: MakeDaemon
) -> None:
    """After 40 bombs and 40 endless bodies the daemon has grown by less than one of them."""
    with Endpoint(certificates.good) as endless:
        endless.endless_body()
        endpoint.gzip_bomb("/bomb")
        good = await flow.subscribe("good", endpoint.url("/good"))
        worst = [await flow.subscribe(EVENT_TYPE, url) for url in (endpoint.url("/bomb"), endless.url())]
        daemon = await make_daemon(log={"level": "info"}).start()
        await publish_many(flow, 200, ["good"])
        await until(flow.daemon, f"select ({COMPLETED_OF}) = 200", [good])
        before_bytes = daemon.resident_bytes()
        await publish_many(flow, 40, [EVENT_TYPE])
        await until(flow.daemon, f"select ({COMPLETED_OF}) = 80", worst)
        grown_bytes = daemon.resident_bytes() - before_bytes
    assert grown_bytes < MAX_GROWTH_BYTES
    assert len(endless.connections) == 40
    assert max(connection.bytes_sent for connection in endless.connections) < MAX_SENT_BYTES


async def test_headers_that_would_break_a_request_are_not_sent(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """D4 to D8, stored without the API's checks: the attempt fails with INTERNAL; nothing is sent."""
    for name in ("Content-Length", "Transfer-Encoding", "Host", "Expect", "Webhook-Id"):
        await flow.subscribe(callback_url=endpoint.url(), headers={name: "1"})
    await make_daemon(delivery=SHORT, retry={"max_attempts": 1}).start()
    await flow.publish()
    await until(flow.daemon, ALL_SETTLED, 5)
    codes = await flow.daemon.fetch("select error_code from webhookd.webhook_delivery_jobs")
    assert [code for (code,) in codes] == ["INTERNAL"] * 5
    assert endpoint.requests == []
