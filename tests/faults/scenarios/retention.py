"""Sweeps of retention that are interrupted: their transaction ended, their instance or the server killed.

Rows that a sweep removes are archived by a trigger (tests/support/invariants.py), so that the invariants
still see them.
"""

import asyncio
import time
from random import Random

import asyncpg

from tests.faults.bed import Bed
from tests.faults.plan import Action, Needs, Scenario, act, fault
from tests.faults.scenarios.server import crash_server, restart_server
from tests.faults.verbs import database_recovers, heal

# Longer than an outage in the mix: a client that repeats a publish must find its event, and an action of
# support its delivery.
PERIOD_SECONDS = 90
PERIOD_DAYS = PERIOD_SECONDS / 86_400
SETTINGS = {"retention.events_days": PERIOD_DAYS, "retention.dead_letters_days": PERIOD_DAYS}
HOWS = ("terminate", "kill", "crash")
SEARCH_SECONDS = 5.0
# The turn of an instance that was killed during a sweep is over after a minute.
TURN_SECONDS = 75.0
SWEEP = """
    select a.pid, split_part(t.holder, ':', 2) as process_id
    from pg_stat_activity a cross join webhookd.retention_turn t
    where a.state = 'active' and a.query like '%webhookd.sweep_events%' and a.pid <> pg_backend_pid()
    limit 1
"""
EXPIRED = f"""
    select count(*) > 0 from webhookd.events
    where created_at < now() - interval '{PERIOD_SECONDS} seconds'
"""


@heal
async def interrupt_sweep(bed: Bed, *, how: str) -> int:
    """Wait for a sweep with something to remove, and interrupt it; returns 0 if none was seen."""
    await bed.until(EXPIRED)
    deadline = time.monotonic() + TURN_SECONDS
    found = await _running_sweep(bed)
    # No load while the turn of a killed instance lasts: the failing endpoint, with one request at a time,
    # would have a backlog of minutes at the end.
    bed.publisher.pause()
    try:
        while found is None and time.monotonic() < deadline:
            found = await _running_sweep(bed)
    finally:
        bed.publisher.resume()
    if found is None:
        return 0
    backend_id, process_id = found
    match how:
        case "terminate":
            async with bed.superuser() as superuser:
                if not await superuser.fetchval("select pg_terminate_backend($1)", backend_id):
                    return 0
        case "kill":
            victims = [instance for instance in bed.running if instance.process_id == process_id]
            if not victims:
                return 0
            victims[0].kill()
            await victims[0].start()
        case "crash":
            await crash_server(bed)
            await restart_server(bed)
            await database_recovers(bed)
    bed.effects["sweeps_interrupted"] += 1
    return 1


async def _running_sweep(bed: Bed) -> tuple[int, str] | None:
    """Return the server process of a running sweep, and the process id of its instance."""
    for instance in bed.running:
        instance.daemon.sighup()  # ends the pause of the service
    deadline = time.monotonic() + SEARCH_SECONDS
    async with bed.superuser() as superuser:
        while time.monotonic() < deadline:
            try:
                row = await superuser.fetchrow(SWEEP)
            except asyncpg.PostgresError:
                return None
            if row is not None:
                return row["pid"], row["process_id"]
            await asyncio.sleep(0.002)
    return None


def interrupt(random: Random, rounds: int) -> list[Action]:
    """Interrupt sweeps in every way, with load in between."""
    actions: list[Action] = []
    for number in range(rounds):
        actions += [
            fault("interrupt_sweep", how=HOWS[number % len(HOWS)]),
            act("accepted", more=random.randint(200, 500)),
        ]
    return [*actions, act("all_ready")]


SCENARIOS = (
    Scenario(
        "retention",
        "sweeps interrupted: their transaction, their instance or the server killed",
        "an event is removed completely or not at all, and nothing live is removed",
        interrupt,
        effects=("sweeps_interrupted", "events_removed", "dead_letters_removed"),
        rounds=9,
        needs=Needs(settings=SETTINGS),
    ),
)
