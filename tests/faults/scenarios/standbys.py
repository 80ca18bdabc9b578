"""A synchronous standby: failover, and cancelled waits for a stalled standby."""

import asyncio
import time
from random import Random

from tests.faults.bed import Bed
from tests.faults.plan import Action, Needs, Scenario, act, fault
from tests.faults.servers import StandbyServer
from tests.faults.verbs import verb

CANCEL = """
    select count(*) filter (where pg_cancel_backend(pid)) from pg_stat_activity
    where wait_event = 'SyncRep' and application_name = 'webhookd'
"""


def _standby(bed: Bed) -> StandbyServer:
    assert bed.setup.standby is not None
    return bed.setup.standby


@verb
async def standby_is_synchronous(bed: Bed) -> None:
    """Wait until commits wait for the standby."""
    standby = _standby(bed)
    while not await asyncio.to_thread(standby.is_synchronous):  # noqa: ASYNC110  it polls the server
        await asyncio.sleep(0.1)


@verb
async def lose_primary(bed: Bed) -> None:
    """Send SIGKILL to the primary, which does not come back."""
    await asyncio.to_thread(bed.server.crash)
    bed.watch.database_lost(bed.running)


@verb
async def crash_standby(bed: Bed) -> None:
    """Kill and restart the standby without a primary: it keeps only the data that was on its disk."""
    standby = _standby(bed)
    await asyncio.to_thread(standby.crash)
    await asyncio.to_thread(standby.restart)


@verb
async def promote_standby(bed: Bed) -> None:
    """Promote the standby; the instances find it without help."""
    standby = _standby(bed)
    bed.watch.database_restored(bed.running)
    await asyncio.to_thread(standby.promote)
    bed.server = bed.database.cluster.server = standby
    # It has no standby of its own to wait for.
    await bed.fetch_value("alter system reset synchronous_standby_names")
    await bed.fetch_value("select pg_reload_conf()")
    bed.effects["failovers"] += 1


@verb
async def stall_standby(bed: Bed) -> None:
    """Send SIGSTOP to every process of the standby; commits wait."""
    await asyncio.to_thread(_standby(bed).stall)
    bed.effects["standby_stalls"] += 1


@verb
async def resume_standby(bed: Bed) -> None:
    """Send SIGCONT to every process of the standby."""
    await asyncio.to_thread(_standby(bed).resume)


@verb
async def cancel_commit_waits(bed: Bed, *, seconds: float) -> None:
    """Cancel every wait for the standby repeatedly, as an operator in a hurry might.

    The server then reports success with a warning: the commit is not on the standby. After a failover, the
    invariants show whether a client got 202 for such a commit.
    """
    before = len(bed.publisher.accepted_events)
    deadline = time.monotonic() + seconds
    async with bed.superuser() as superuser:
        while time.monotonic() < deadline:
            bed.effects["commit_waits_cancelled"] += await superuser.fetchval(CANCEL)
            await asyncio.sleep(0.1)
    bed.effects["accepted_during_cancels"] += len(bed.publisher.accepted_events) - before


def fail_over(random: Random, rounds: int) -> list[Action]:
    """Stall the standby some times, then lose the primary and promote the standby."""
    actions: list[Action] = [act("standby_is_synchronous")]
    for _ in range(rounds):
        actions += [
            fault("stall_standby"),
            act("refused", more=10),
            act("wait", seconds=round(random.uniform(0, 3), 2)),
            act("resume_standby"),
            act("database_recovers"),
            act("accepted", more=random.randint(200, 400)),
        ]
    return [
        *actions,
        fault("lose_primary"),
        act("all_unready"),
        act("promote_standby"),
        act("database_recovers"),
        act("accepted", more=random.randint(300, 600)),
    ]


def cancel_waits(random: Random, rounds: int) -> list[Action]:
    """Cancel waits for the stalled standby, then lose the primary before the standby got the commits."""
    actions: list[Action] = [act("standby_is_synchronous"), act("accepted", more=200), fault("stall_standby")]
    actions += [act("refused", more=10)]
    for _ in range(rounds):
        actions += [
            fault("cancel_commit_waits", seconds=round(random.uniform(3, 5), 2)),
            act("wait", seconds=round(random.uniform(0, 1), 2)),
        ]
    return [
        *actions,
        fault("lose_primary"),
        act("all_unready"),
        fault("crash_standby"),
        act("promote_standby"),
        act("database_recovers"),
        act("accepted", more=random.randint(300, 600)),
    ]


SCENARIOS = (
    Scenario(
        "failover",
        "the synchronous standby stalled; then the primary lost and the standby promoted",
        "instances find the new primary by their DSN; it has every acknowledged event",
        fail_over,
        effects=("failovers", "standby_stalls", "failed_publishes", "unready_probes"),
        rounds=2,
        needs=Needs(standby=True),
    ),
    Scenario(
        "commit_wait_cancelled",
        "the standby stalled and the waits for it cancelled; then the primary lost",
        "no client got 202 for an event that the standby does not have",
        cancel_waits,
        effects=("failovers", "standby_stalls", "commit_waits_cancelled"),
        rounds=3,
        needs=Needs(standby=True),
    ),
)
