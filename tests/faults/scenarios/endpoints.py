"""Endpoints that fail in every known way, DNS faults, and overload."""

import asyncio
import json
import time
from datetime import UTC, datetime
from ipaddress import ip_address
from random import Random

from tests.faults.bed import ANSWER_DELAY_SECONDS, BAD_ATTEMPTS, PUBLISH_INTERVAL_SECONDS, Bed
from tests.faults.plan import Action, Needs, Scenario, act, fault
from tests.faults.verbs import heal, verb
from tests.support.flow import Flow
from tests.support.traffic import verifies
from webhookd.deliveries import subscriptions

BAD_TYPE = "news.bad"
# It answers correctly but reads no further request: the next delivery on that kept connection gets no answer.
UNREAD = "unread"
CODES = """
    select u.callback_url, d.final_error_code from webhookd.dead_letters d
    join webhookd.subscriptions u on u.id = d.subscription_id and u.event_type = $1 group by 1, 2
"""
BAD_DELIVERIES_ENDED = """
    select count(*) = 0 from webhookd.webhook_delivery_sagas s
    join webhookd.subscriptions u on u.id = s.subscription_id and u.event_type = $1
    where s.status not in ('Completed', 'DeadLettered')
"""
FAILED_WITH = "select count(*) from webhookd.webhook_delivery_jobs where error_code = $1"
HOST = "hooks.example"
OVERLOAD_FACTOR = 10


@verb
async def subscribe_bad_endpoints(bed: Bed) -> None:
    """Subscribe every bad endpoint to the same event type."""
    assert bed.bad_endpoints is not None
    flow = Flow(await bed.database.connect("daemon"), await bed.database.connect("superuser"))
    created: dict[str, subscriptions.Created] = {}
    urls = {name: url for name, url in bed.bad_endpoints.urls.items() if name != UNREAD}
    for name, url in urls.items():
        created[name] = await subscriptions.create(flow.daemon, BAD_TYPE, url, max_attempts=BAD_ATTEMPTS)
        await flow.verify(created[name].subscription_id)
    await bed.database.close()
    bed.state["bad"] = created


@verb
async def publish_to_bad_endpoints(bed: Bed, *, events: int) -> None:
    """Publish events to all bad endpoints."""
    daemon = bed.running[0].daemon
    for _ in range(events):
        key = f"bad-{len(bed.publisher.accepted_events)}"
        payload = json.dumps({"key": key})
        body = f'{{"event_type": "{BAD_TYPE}", "idempotency_key": "{key}", "payload": {payload}}}'
        status, answer = await asyncio.to_thread(daemon.post, "/v1/events", body.encode())
        assert status == 202, answer
        bed.publisher.accepted_events[key] = (answer["id"], payload)


@verb
async def bad_endpoints_ended(bed: Bed) -> None:
    """Wait until deliveries to bad endpoints have ended; check their error codes and the good endpoint."""
    assert bed.bad_endpoints is not None
    receipts = len(bed.receiver.receipts)
    await bed.until(BAD_DELIVERIES_ENDED, BAD_TYPE)
    if len(bed.receiver.receipts) == receipts:
        bed.problems.append("the good endpoint got no request next to failing endpoints")
    names = {url: name for name, url in bed.bad_endpoints.urls.items()}
    async with bed.superuser() as superuser:
        for row in await superuser.fetch(CODES, BAD_TYPE):
            bed.effects["bad_endpoint_results"] += 1
            name = names[row["callback_url"]]
            expected = bed.bad_endpoints.expected[name].error_code
            if row["final_error_code"] != expected:
                bed.problems.append(f"{name}: {row['final_error_code']} instead of {expected}")
    created: dict[str, subscriptions.Created] = bed.state["bad"]
    bed.state["bad_receipts"] = [
        (
            int(request.headers["webhook-id"].removeprefix("evt_")),
            created[name].subscription_id,
            int(request.headers["webhook-attempt"]),
            bed.bad_endpoints.expected[name].response_status,
            datetime.fromtimestamp(request.received_at, UTC),
            request.body,
            verifies(request, created[name].signing_secret),
            bed.bad_endpoints.urls[name],
        )
        for request in list(bed.bad_endpoints.answering.requests)
        if (name := request.path[1:]) in created
    ]


@verb
async def overload(bed: Bed, *, seconds: float) -> None:
    """Accept at least ten times as many events as are delivered, for this time; then end the overload."""
    bed.receiver.moment_seconds = 0.9
    bed.publisher.pace_seconds = 0
    events, receipts, started = (
        len(bed.publisher.accepted_events),
        len(bed.receiver.receipts),
        time.monotonic(),
    )
    await asyncio.sleep(seconds)
    elapsed = time.monotonic() - started
    accepted = (len(bed.publisher.accepted_events) - events) / elapsed
    sent = (len(bed.receiver.receipts) - receipts) / elapsed
    bed.receiver.moment_seconds = ANSWER_DELAY_SECONDS
    bed.publisher.pace_seconds = PUBLISH_INTERVAL_SECONDS
    bed.effects["events_beyond_capacity"] += int((accepted - sent) * elapsed)
    if accepted < OVERLOAD_FACTOR * sent:
        bed.problems.append(
            f"{accepted:.0f} events per second accepted, {sent:.0f} sent: not a tenfold overload"
        )


@verb
async def dns_fails(bed: Bed) -> None:
    """Answer that the name does not exist."""
    _resolve_to(bed)
    await _until_failed(bed, "DNS_FAILED")


@verb
async def dns_times_out(bed: Bed) -> None:
    """Answer no lookup."""
    assert bed.names is not None
    bed.names.stay_silent(HOST)
    await _until_failed(bed, "TIMEOUT")


@verb
async def dns_returns_internal_address(bed: Bed, *, address: str) -> None:
    """Resolve the name to an internal address, as DNS rebinding does."""
    _resolve_to(bed, address)
    await _until_failed(bed, "ADDRESS_BLOCKED")


@heal
async def dns_recovers(bed: Bed) -> None:
    """Resolve the name correctly again, and check that no internal address was dialled."""
    assert bed.names is not None
    _resolve_to(bed, "127.0.0.1")
    forbidden = {host for host, _ in bed.names.dials if not ip_address(host).is_loopback}
    bed.problems += [f"{host} was dialled" for host in sorted(forbidden)]


def _resolve_to(bed: Bed, *addresses: str) -> None:
    assert bed.names is not None
    bed.names.answer(HOST, *addresses)


async def _until_failed(bed: Bed, code: str) -> None:
    """Wait until five more attempts have failed with this code."""
    before = await bed.fetch_value(FAILED_WITH, code)
    await bed.until(f"select ({FAILED_WITH}) >= $2", code, before + 5)
    bed.effects[f"attempts_{code}"] += await bed.fetch_value(FAILED_WITH, code) - before


def fail_endpoints(random: Random, rounds: int) -> list[Action]:
    """Publish to all bad endpoints while the good endpoint gets its normal load."""
    actions = [act("subscribe_bad_endpoints")]
    for _ in range(rounds):
        actions += [
            fault("publish_to_bad_endpoints", events=random.randint(2, 4)),
            act("accepted", more=random.randint(200, 400)),
        ]
    return [*actions, act("bad_endpoints_ended")]


def cause_overload(random: Random, rounds: int) -> list[Action]:
    """Overload, then wait for the deliveries to catch up."""
    actions: list[Action] = []
    for _ in range(rounds):
        actions += [
            fault("overload", seconds=round(random.uniform(4, 6), 2)),
            act("delivered", more=random.randint(1000, 2000)),
        ]
    return actions


def break_dns(random: Random, rounds: int) -> list[Action]:
    """Break DNS in every way, in random order."""
    actions: list[Action] = []
    for _ in range(rounds):
        ways = [
            fault("dns_fails"),
            fault("dns_times_out"),
            fault("dns_returns_internal_address", address="169.254.169.254"),
            fault("dns_returns_internal_address", address="10.0.0.1"),
        ]
        for way in random.sample(ways, len(ways)):
            actions += [way, act("dns_recovers"), act("delivered", more=random.randint(100, 200))]
    return actions


SCENARIOS = (
    Scenario(
        "endpoints",
        "endpoints that fail in every known way, all at once, next to a good endpoint",
        "deliveries to the good endpoint continue; each bad delivery ends with the right error code",
        fail_endpoints,
        effects=("attempts_failed", "bad_endpoint_results"),
        rounds=2,
        # The bad endpoints share one process, and some send much data, so the rest need more time to answer.
        needs=Needs(
            bad_endpoints=True, settings={"delivery.timeout_seconds": 5.0, "delivery.lease_seconds": 10.0}
        ),
    ),
    Scenario(
        "overload",
        "ten times as many events accepted as can be delivered",
        "events wait in the database, not in memory, and are delivered later",
        cause_overload,
        effects=("events_beyond_capacity",),
        rounds=1,
        needs=Needs(settings={"delivery.concurrency": 6}),
    ),
    Scenario(
        "names",
        "the receiver's name unknown, not answered, and resolved to internal addresses",
        "attempts fail with the right codes, no internal address is dialled, deliveries resume",
        break_dns,
        effects=("attempts_DNS_FAILED", "attempts_TIMEOUT", "attempts_ADDRESS_BLOCKED"),
        rounds=1,
        # Every request needs its own TLS handshake, and the receiver does one at a time.
        needs=Needs(names=True, settings={"delivery.concurrency": 20}),
    ),
)
