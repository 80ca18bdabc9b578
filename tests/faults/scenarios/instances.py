"""Instances that die, hang, and are cut down between two steps."""

import asyncio
import time
from random import Random

from tests.faults.bed import MOMENT_SECONDS, Bed
from tests.faults.instance import LEASE_SECONDS, REAPER_INTERVAL_SECONDS, Instance
from tests.faults.plan import Action, Needs, Scenario, act, fault
from tests.faults.verbs import heal, verb
from tests.support.endpoint import Request
from tests.support.waiting import CONDITION_TIMEOUT_SECONDS, until_true

# Where a process may be cut down, by the names of tests/faults/site.
FAILPOINTS = ("after_route", "after_start", "after_claim", "before_report", "after_report", "after_apply")
LEASED = """
    select count(*) >= $2 from webhookd.webhook_delivery_jobs
    where status = 'Leased' and split_part(worker_id, ':', 2) = $1
"""
# By event and path: an event may go to several.
REQUESTS_OF_PROCESS = """
    select array(
        select 'evt_' || s.event_id || substring(u.callback_url from '//[^/]*(/.*)')
        from webhookd.webhook_delivery_jobs j
        join webhookd.webhook_delivery_sagas s on s.id = j.saga_id
        join webhookd.subscriptions u on u.id = s.subscription_id
        where j.status = 'Leased' and split_part(j.worker_id, ':', 2) = $1)
"""
# P10: an instance's death is healed within its leases and the reaper's interval.
HEALED_SECONDS = LEASE_SECONDS + REAPER_INTERVAL_SECONDS
# And what it takes to claim and to send again, on a machine that has much to do.
SENT_SECONDS = 1.0
LONG_MOMENT_SECONDS = 0.8


@verb
async def kill(bed: Bed, *, instance: int) -> None:
    """Kill -9, at any moment."""
    bed.instances[instance].kill()


@verb
async def kill_amid_deliveries(bed: Bed, *, instance: int, leases: int) -> None:
    """Kill -9 while requests of its are open; how long until each of those came again."""
    doomed = bed.instances[instance]
    await _until_leased(bed, doomed, leases)
    doomed.kill()
    began, seen = time.monotonic(), len(bed.receiver.receipts)
    bed.receiver.moment_seconds = MOMENT_SECONDS
    lost = set(await bed.ask(REQUESTS_OF_PROCESS, doomed.worker_process))
    bed.effects["deliveries_interrupted"] += len(lost)
    await bed.until(f"select not ({LEASED})", doomed.worker_process, 1)
    bed.recovered("an instance's death: its leases taken back", began, HEALED_SECONDS)

    def come_again() -> set[str]:
        return {_name(receipt.request) for receipt in bed.receiver.receipts[seen:]}

    await until_true(lambda: lost <= come_again())
    bed.recovered("an instance's death: its last delivery made again", began, HEALED_SECONDS + SENT_SECONDS)


async def _until_leased(bed: Bed, instance: Instance, leases: int) -> None:
    """So many, and one of their requests open: the receiver is slow, and not so slow that any fails."""
    bed.receiver.moment_seconds = LONG_MOMENT_SECONDS
    await bed.until(LEASED, instance.worker_process, leases)
    deadline = time.monotonic() + CONDITION_TIMEOUT_SECONDS
    while not await _open_requests(bed, instance):
        assert time.monotonic() < deadline, "no request of its is open"


async def _open_requests(bed: Bed, instance: Instance) -> set[str]:
    """Those of an instance that came and are not answered."""
    unanswered = [receipt.request for receipt in bed.receiver.receipts if receipt.response_status is None]
    leased = await bed.ask(REQUESTS_OF_PROCESS, instance.worker_process)
    return {_name(request) for request in unanswered} & set(leased)


def _name(request: Request) -> str:
    """As the query names it."""
    return request.headers["webhook-id"] + request.path


@verb
async def die_at(bed: Bed, *, instance: int, point: str) -> None:
    """Cut down between two steps."""
    await bed.instances[instance].die_at(point)


@heal
async def start(bed: Bed, *, instance: int) -> None:
    """Start what was ended."""
    await bed.instances[instance].start()


@heal
async def freeze_past_leases(bed: Bed, *, instance: int) -> None:
    """SIGSTOP with leases out, until others have taken them back; then SIGCONT."""
    frozen = bed.instances[instance]
    await _until_leased(bed, frozen, 5)
    await frozen.freeze()
    began = time.monotonic()
    bed.receiver.moment_seconds = MOMENT_SECONDS
    await bed.until(f"select not ({LEASED})", frozen.worker_process, 1)
    bed.recovered("an instance stopped: its leases taken back", began, HEALED_SECONDS)
    await asyncio.sleep(1)  # and delivered by others
    frozen.thaw()
    await frozen.until_ready()


def killing(random: Random, rounds: int) -> list[Action]:
    """Amid deliveries, and at any moment; one at a time is down."""
    actions: list[Action] = []
    for _ in range(rounds):
        victim, other = random.sample(range(3), 2)
        actions += [
            fault("kill_amid_deliveries", instance=victim, leases=random.randint(5, 15)),
            act("start", instance=victim),
            act("accepted", more=random.randint(50, 150)),
            fault("kill", instance=other),
            act("accepted", more=random.randint(100, 300)),
            act("start", instance=other),
        ]
    return actions


def cutting_down(random: Random, rounds: int) -> list[Action]:
    """At every point, in an order of the seed's."""
    actions: list[Action] = []
    for _ in range(rounds):
        for point in random.sample(FAILPOINTS, len(FAILPOINTS)):
            victim = random.randrange(3)
            actions += [
                fault("die_at", instance=victim, point=point),
                act("accepted", more=random.randint(50, 150)),
                act("start", instance=victim),
                act("delivered", more=50),
            ]
    return actions


def freezing(random: Random, rounds: int) -> list[Action]:
    """One after the other."""
    actions: list[Action] = []
    for _ in range(rounds):
        actions += [
            fault("freeze_past_leases", instance=random.randrange(3)),
            act("accepted", more=random.randint(100, 300)),
        ]
    return actions


SCENARIOS = (
    Scenario(
        "kill",
        "kill -9 of an instance, amid its deliveries and at any moment",
        "the others take its leases over",
        killing,
        effects=("leases_expired", "deliveries_interrupted", "requests_doubled"),
        rounds=3,
    ),
    Scenario(
        "failpoints",
        "an instance cut down after it routed, started, claimed, was answered with 2xx, reported, applied",
        "each step is done once or again, and none is half done",
        cutting_down,
        effects=("leases_expired", "requests_doubled"),
        rounds=2,
        needs=Needs(failpoints=True),
    ),
    Scenario(
        "freeze",
        "SIGSTOP of an instance past its leases, then SIGCONT",
        "its late reports are refused as stale",
        freezing,
        effects=("leases_expired", "reports_stale"),
        rounds=2,
    ),
)
