"""A synchronous standby: it takes over, and it does not answer while somebody cancels the wait for it."""

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
    assert bed.surroundings.standby is not None
    return bed.surroundings.standby


@verb
async def standby_follows(bed: Bed) -> None:
    """Return when commits wait for it."""
    standby = _standby(bed)
    while not await asyncio.to_thread(standby.follows):  # noqa: ASYNC110  it is the server that is asked
        await asyncio.sleep(0.1)


@verb
async def lose_primary(bed: Bed) -> None:
    """Kill -9 of it, for good."""
    await asyncio.to_thread(bed.server.crash)
    bed.watch.away(bed.living)


@verb
async def crash_standby(bed: Bed) -> None:
    """Kill -9 and a restart, the primary gone: it has what was on its disk, and not what was on its way."""
    standby = _standby(bed)
    await asyncio.to_thread(standby.crash)
    await asyncio.to_thread(standby.restart)


@verb
async def promote_standby(bed: Bed) -> None:
    """The standby takes over, and instances find it by themselves."""
    standby = _standby(bed)
    bed.watch.back(bed.living)
    await asyncio.to_thread(standby.promote)
    bed.server = bed.database.cluster.server = standby
    # A primary of its own from here on: it has no standby to wait for.
    await bed.ask("alter system reset synchronous_standby_names")
    await bed.ask("select pg_reload_conf()")
    bed.effects["failovers"] += 1


@verb
async def stall_standby(bed: Bed) -> None:
    """SIGSTOP of every process of it; commits wait."""
    await asyncio.to_thread(_standby(bed).stall)
    bed.effects["standby_stalls"] += 1


@verb
async def resume_standby(bed: Bed) -> None:
    """SIGCONT."""
    await asyncio.to_thread(_standby(bed).resume)


@verb
async def cancel_commit_waits(bed: Bed, *, seconds: float) -> None:
    """As an operator in a hurry: end every wait for the standby, again and again.

    The server then says to who waited that it is committed, with a warning alone; and so it is, but not on
    the standby. What clients are told of it is seen after a failover.
    """
    told = len(bed.publisher.accepted_events)
    ends = time.monotonic() + seconds
    async with bed.superuser() as superuser:
        while time.monotonic() < ends:
            bed.effects["commit_waits_cancelled"] += await superuser.fetchval(CANCEL)
            await asyncio.sleep(0.1)
    bed.effects["accepted_meanwhile"] += len(bed.publisher.accepted_events) - told


def failing_over(random: Random, rounds: int) -> list[Action]:
    """With stalls of the standby before."""
    actions: list[Action] = [act("standby_follows")]
    for _ in range(rounds):
        actions += [
            fault("stall_standby"),
            act("refused", more=10),
            act("wait", seconds=round(random.uniform(0, 3), 2)),
            act("resume_standby"),
            act("database_is_used"),
            act("accepted", more=random.randint(200, 400)),
        ]
    return [
        *actions,
        fault("lose_primary"),
        act("all_unready"),
        act("promote_standby"),
        act("database_is_used"),
        act("accepted", more=random.randint(300, 600)),
    ]


def cancelling(random: Random, rounds: int) -> list[Action]:
    """And then the primary is lost before the standby got anything of it."""
    actions: list[Action] = [act("standby_follows"), act("accepted", more=200), fault("stall_standby")]
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
        act("database_is_used"),
        act("accepted", more=random.randint(300, 600)),
    ]


SCENARIOS = (
    Scenario(
        "failover",
        "the synchronous standby stalled, and then the primary lost for good and the standby promoted",
        "instances find the new primary by their DSN; nothing acknowledged is missing there",
        failing_over,
        effects=("failovers", "standby_stalls", "turned_away", "looks_unready"),
        rounds=2,
        needs=Needs(standby=True),
    ),
    Scenario(
        "commit_wait_cancelled",
        "the standby stalled, the waits for it cancelled, and then the primary lost for good",
        "nobody was told 202 for what the standby never got",
        cancelling,
        effects=("failovers", "standby_stalls", "commit_waits_cancelled"),
        rounds=3,
        needs=Needs(standby=True),
    ),
)
