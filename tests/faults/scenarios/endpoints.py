"""Endpoints that fail in every way at once, names that lead elsewhere, and more than can be sent."""

import asyncio
import json
import time
from datetime import UTC, datetime
from ipaddress import ip_address
from random import Random

from tests.faults.bed import BAD_ATTEMPTS, MOMENT_SECONDS, PACE_SECONDS, Bed
from tests.faults.plan import Action, Needs, Scenario, act, fault
from tests.faults.verbs import heal, verb
from tests.support.flow import Flow
from tests.support.traffic import verifies
from webhookd.deliveries import subscriptions

BAD_TYPE = "news.bad"
# Answers in order and reads no more: who of the same host is sent down that connection next waits in vain.
UNREAD = "unread"
CODES = """
    select u.callback_url, d.final_error_code from webhookd.dead_letters d
    join webhookd.subscriptions u on u.id = d.subscription_id and u.event_type = $1 group by 1, 2
"""
BAD_ENDED = """
    select count(*) = 0 from webhookd.webhook_delivery_sagas s
    join webhookd.subscriptions u on u.id = s.subscription_id and u.event_type = $1
    where s.status not in ('Completed', 'DeadLettered')
"""
FAILED_WITH = "select count(*) from webhookd.webhook_delivery_jobs where error_code = $1"
NAME = "hooks.example"
OVERLOAD = 10


@verb
async def subscribe_bad_endpoints(bed: Bed) -> None:
    """One subscription at each, all of the same events."""
    assert bed.bad_endpoints is not None
    flow = Flow(await bed.database.connect("daemon"), await bed.database.connect("superuser"))
    created: dict[str, subscriptions.Created] = {}
    urls = {name: url for name, url in bed.bad_endpoints.urls.items() if name != UNREAD}
    for name, url in urls.items():
        created[name] = await subscriptions.create(flow.daemon, BAD_TYPE, url, max_attempts=BAD_ATTEMPTS)
        await flow.verify(created[name].subscription_id)
    await bed.database.close()
    bed.kept["bad"] = created


@verb
async def publish_to_bad_endpoints(bed: Bed, *, events: int) -> None:
    """So many events to all of them."""
    daemon = bed.living[0].daemon
    for _ in range(events):
        key = f"bad-{len(bed.publisher.accepted_events)}"
        payload = json.dumps({"key": key})
        body = f'{{"event_type": "{BAD_TYPE}", "idempotency_key": "{key}", "payload": {payload}}}'
        status, told = await asyncio.to_thread(daemon.post, "/v1/events", body.encode())
        assert status == 202, told
        bed.publisher.accepted_events[key] = (told["id"], payload)


@verb
async def bad_endpoints_ended(bed: Bed) -> None:
    """Every delivery to them has ended, each in the way that it should; the good one's went on meanwhile."""
    assert bed.bad_endpoints is not None
    receipts = len(bed.receiver.receipts)
    await bed.until(BAD_ENDED, BAD_TYPE)
    if len(bed.receiver.receipts) == receipts:
        bed.problems.append("nothing came to the good endpoint beside the bad ones")
    names = {url: name for name, url in bed.bad_endpoints.urls.items()}
    async with bed.superuser() as superuser:
        for row in await superuser.fetch(CODES, BAD_TYPE):
            bed.effects["bad_endings"] += 1
            name = names[row["callback_url"]]
            expected = bed.bad_endpoints.expected[name].error_code
            if row["final_error_code"] != expected:
                bed.problems.append(f"{name} gave {row['final_error_code']}, and not {expected}")
    created: dict[str, subscriptions.Created] = bed.kept["bad"]
    bed.kept["bad_receipts"] = [
        (
            int(request.headers["webhook-id"].removeprefix("evt_")),
            created[name].subscription_id,
            bed.bad_endpoints.expected[name].response_status,
            datetime.fromtimestamp(request.received_at, UTC),
            request.body,
            verifies(request, created[name].signing_secret),
        )
        for request in list(bed.bad_endpoints.answering.requests)
        if (name := request.path[1:]) in created
    ]


@verb
async def overload(bed: Bed, *, seconds: float) -> None:
    """Take in at least ten times as much as is delivered, for so long; then let it be delivered."""
    bed.receiver.moment_seconds = 0.9
    bed.publisher.pace_seconds = 0
    told, receipts, began = len(bed.publisher.accepted_events), len(bed.receiver.receipts), time.monotonic()
    await asyncio.sleep(seconds)
    elapsed = time.monotonic() - began
    taken = (len(bed.publisher.accepted_events) - told) / elapsed
    sent = (len(bed.receiver.receipts) - receipts) / elapsed
    bed.receiver.moment_seconds = MOMENT_SECONDS
    bed.publisher.pace_seconds = PACE_SECONDS
    bed.effects["events_beyond_capacity"] += int((taken - sent) * elapsed)
    if taken < OVERLOAD * sent:
        bed.problems.append(
            f"{taken:.0f} events a second were taken and {sent:.0f} sent: no tenfold overload"
        )


@verb
async def names_fail(bed: Bed) -> None:
    """There is no such name."""
    _names_answer(bed)
    await _until_failed(bed, "DNS_FAILED")


@verb
async def names_are_silent(bed: Bed) -> None:
    """Nobody answers a lookup."""
    assert bed.names is not None
    bed.names.stay_silent(NAME)
    await _until_failed(bed, "TIMEOUT")


@verb
async def names_lead_astray(bed: Bed, *, address: str) -> None:
    """The name leads to an address inside, as in DNS rebinding."""
    _names_answer(bed, address)
    await _until_failed(bed, "ADDRESS_BLOCKED")


@heal
async def names_are_right(bed: Bed) -> None:
    """And nobody was ever dialled but who may be."""
    assert bed.names is not None
    _names_answer(bed, "127.0.0.1")
    beyond = {host for host, _ in bed.names.dials if not ip_address(host).is_loopback}
    bed.problems += [f"{host} was dialled" for host in sorted(beyond)]


def _names_answer(bed: Bed, *addresses: str) -> None:
    assert bed.names is not None
    bed.names.answer(NAME, *addresses)


async def _until_failed(bed: Bed, code: str) -> None:
    """Until some more attempts failed with this code."""
    before = await bed.ask(FAILED_WITH, code)
    await bed.until(f"select ({FAILED_WITH}) >= $2", code, before + 5)
    bed.effects[f"attempts_{code}"] += await bed.ask(FAILED_WITH, code) - before


def failing(random: Random, rounds: int) -> list[Action]:
    """Round after round of events to all of them, beside the good one."""
    actions = [act("subscribe_bad_endpoints")]
    for _ in range(rounds):
        actions += [
            fault("publish_to_bad_endpoints", events=random.randint(2, 4)),
            act("accepted", more=random.randint(200, 400)),
        ]
    return [*actions, act("bad_endpoints_ended")]


def overloading(random: Random, rounds: int) -> list[Action]:
    """With room to breathe between."""
    actions: list[Action] = []
    for _ in range(rounds):
        actions += [
            fault("overload", seconds=round(random.uniform(4, 6), 2)),
            act("delivered", more=random.randint(1000, 2000)),
        ]
    return actions


def misleading(random: Random, rounds: int) -> list[Action]:
    """Every way, in an order of the seed's."""
    actions: list[Action] = []
    for _ in range(rounds):
        ways = [
            fault("names_fail"),
            fault("names_are_silent"),
            fault("names_lead_astray", address="169.254.169.254"),
            fault("names_lead_astray", address="10.0.0.1"),
        ]
        for way in random.sample(ways, len(ways)):
            actions += [way, act("names_are_right"), act("delivered", more=random.randint(100, 200))]
    return actions


SCENARIOS = (
    Scenario(
        "endpoints",
        "endpoints that fail in every way known, all at once, beside a good one",
        "the good one's deliveries go on; each bad one's end with the error code that says why",
        failing,
        effects=("attempts_failed", "bad_endings"),
        rounds=2,
        # Long enough for endpoints that share one process to say what they say, beside those that say much.
        needs=Needs(
            bad_endpoints=True, settings={"delivery.timeout_seconds": 5.0, "delivery.lease_seconds": 10.0}
        ),
    ),
    Scenario(
        "overload",
        "ten times as many events taken in as can be delivered",
        "they wait in the database, not in memory, and are delivered when there is room",
        overloading,
        effects=("events_beyond_capacity",),
        rounds=1,
        needs=Needs(settings={"delivery.concurrency": 6}),
    ),
    Scenario(
        "names",
        "the receiver's name unknown, unanswered, and leading to addresses inside",
        "attempts fail with their codes, nothing inside is dialled, and the right address is used again",
        misleading,
        effects=("attempts_DNS_FAILED", "attempts_TIMEOUT", "attempts_ADDRESS_BLOCKED"),
        rounds=1,
        # Every request has a handshake of its own, which the receiver makes one after the other.
        needs=Needs(names=True, settings={"delivery.concurrency": 20}),
    ),
)
