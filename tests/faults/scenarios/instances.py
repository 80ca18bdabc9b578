"""Instances that are killed, frozen, or killed between two steps."""

import asyncio
import time
from random import Random

from tests.faults.bed import ANSWER_DELAY_SECONDS, Bed
from tests.faults.instance import LEASE_SECONDS, REAPER_INTERVAL_SECONDS, Instance
from tests.faults.plan import Action, Needs, Scenario, act, fault
from tests.faults.verbs import heal, verb
from tests.support.endpoint import Request
from tests.support.waiting import CONDITION_TIMEOUT_SECONDS, until_true

# The failpoints of tests/faults/site.
FAILPOINTS = (
    "after_route",
    "after_start",
    "after_claim",
    "after_short_path",
    "before_complete",
    "after_complete",
    "before_report",
    "after_report",
    "after_apply",
)
LEASED = """
    select count(*) >= $2 from webhookd.webhook_delivery_jobs
    where status = 'Leased' and split_part(worker_id, ':', 2) = $1
"""
# By event and path, because an event may have several subscriptions.
REQUESTS_OF_PROCESS = """
    select array(
        select 'evt_' || s.event_id || substring(u.callback_url from '//[^/]*(/.*)')
        from webhookd.webhook_delivery_jobs j
        join webhookd.webhook_delivery_sagas s on s.id = j.saga_id
        join webhookd.subscriptions u on u.id = s.subscription_id
        where j.status = 'Leased' and split_part(j.worker_id, ':', 2) = $1)
"""
# P10: leases of a dead instance expire and are reset by the next pass of the reaper.
LEASES_RESET_SECONDS = LEASE_SECONDS + REAPER_INTERVAL_SECONDS
# Additional time to claim and send again, on a busy machine.
RESEND_SECONDS = 1.0
SLOW_ANSWER_SECONDS = 0.8


@verb
async def kill(bed: Bed, *, instance: int) -> None:
    """Send SIGKILL at any moment."""
    bed.instances[instance].kill()


@verb
async def kill_during_deliveries(bed: Bed, *, instance: int, leases: int) -> None:
    """Send SIGKILL while the instance has open requests; measure how long until each is sent again."""
    victim = bed.instances[instance]
    await _until_leased(bed, victim, leases)
    victim.kill()
    started, receipts = time.monotonic(), len(bed.receiver.receipts)
    bed.receiver.moment_seconds = ANSWER_DELAY_SECONDS
    lost = set(await bed.fetch_value(REQUESTS_OF_PROCESS, victim.process_id))
    bed.effects["deliveries_interrupted"] += len(lost)
    await bed.until(f"select not ({LEASED})", victim.process_id, 1)
    bed.record_recovery("instance killed: its leases reset", started, LEASES_RESET_SECONDS)

    def sent_again() -> set[str]:
        return {_name(receipt.request) for receipt in bed.receiver.receipts[receipts:]}

    await until_true(lambda: lost <= sent_again())
    bed.record_recovery(
        "instance killed: its last delivery sent again", started, LEASES_RESET_SECONDS + RESEND_SECONDS
    )


async def _until_leased(bed: Bed, instance: Instance, leases: int) -> None:
    """Wait for this many leases and an open request. The receiver is slow, but no request times out."""
    bed.receiver.moment_seconds = SLOW_ANSWER_SECONDS
    await bed.until(LEASED, instance.process_id, leases)
    deadline = time.monotonic() + CONDITION_TIMEOUT_SECONDS
    while not await _open_requests(bed, instance):
        assert time.monotonic() < deadline, "the instance has no open request"


async def _open_requests(bed: Bed, instance: Instance) -> set[str]:
    """Return the requests of an instance that arrived and are not answered yet."""
    unanswered = [receipt.request for receipt in bed.receiver.receipts if receipt.response_status is None]
    leased = await bed.fetch_value(REQUESTS_OF_PROCESS, instance.process_id)
    return {_name(request) for request in unanswered} & set(leased)


def _name(request: Request) -> str:
    """Return the name that REQUESTS_OF_PROCESS uses."""
    return request.headers["webhook-id"] + request.path


@verb
async def die_at(bed: Bed, *, instance: int, point: str) -> None:
    """Kill the instance at a failpoint."""
    await bed.instances[instance].die_at(point)


@heal
async def start(bed: Bed, *, instance: int) -> None:
    """Start an instance that was stopped."""
    await bed.instances[instance].start()


@heal
async def start_stopped(bed: Bed) -> None:
    """Start all stopped instances at the same time."""
    await asyncio.gather(*(instance.start() for instance in bed.instances if not instance.should_answer))


@heal
async def freeze_past_leases(bed: Bed, *, instance: int) -> None:
    """Send SIGSTOP while the instance holds leases; send SIGCONT after these were reset."""
    frozen = bed.instances[instance]
    await _until_leased(bed, frozen, 5)
    await frozen.freeze()
    started = time.monotonic()
    bed.receiver.moment_seconds = ANSWER_DELAY_SECONDS
    await bed.until(f"select not ({LEASED})", frozen.process_id, 1)
    bed.record_recovery("instance frozen: its leases reset", started, LEASES_RESET_SECONDS)
    await asyncio.sleep(1)  # so that other instances deliver them
    frozen.resume()
    await frozen.until_ready()


def kill_instances(random: Random, rounds: int) -> list[Action]:
    """Kill during deliveries, and at any moment; only one instance is down at a time."""
    actions: list[Action] = []
    for _ in range(rounds):
        victim, other = random.sample(range(3), 2)
        actions += [
            fault("kill_during_deliveries", instance=victim, leases=random.randint(5, 15)),
            act("start", instance=victim),
            act("accepted", more=random.randint(50, 150)),
            fault("kill", instance=other),
            act("accepted", more=random.randint(100, 300)),
            act("start", instance=other),
        ]
    return actions


def kill_at_failpoints(random: Random, rounds: int) -> list[Action]:
    """Kill at every failpoint, in random order."""
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


def freeze_instances(random: Random, rounds: int) -> list[Action]:
    """Freeze one random instance at a time."""
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
        "SIGKILL of an instance, during its deliveries and at any moment",
        "the other instances take over its leases",
        kill_instances,
        effects=("leases_expired", "deliveries_interrupted", "duplicate_requests"),
        rounds=3,
    ),
    Scenario(
        "failpoints",
        "SIGKILL of an instance right after it routed, started, claimed, got a 2xx, reported or applied",
        "each step is done or repeated, and none is half done",
        kill_at_failpoints,
        effects=("leases_expired", "duplicate_requests"),
        rounds=2,
        needs=Needs(failpoints=True),
    ),
    Scenario(
        "freeze",
        "SIGSTOP of an instance past its leases, then SIGCONT",
        "its late reports are rejected as stale",
        freeze_instances,
        effects=("leases_expired", "stale_reports"),
        rounds=2,
    ),
)
