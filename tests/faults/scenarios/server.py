"""PostgreSQL killed, stopped at once, and stalled."""

import asyncio
from random import Random

from tests.faults.bed import Bed
from tests.faults.plan import Action, Scenario, act, fault
from tests.faults.verbs import verb


@verb
async def crash_server(bed: Bed) -> None:
    """Kill -9 of every process of it."""
    await asyncio.to_thread(bed.server.crash)
    bed.watch.away(bed.living)
    bed.effects["servers_ended"] += 1


@verb
async def stop_server_at_once(bed: Bed) -> None:
    """Its immediate shutdown."""
    await asyncio.to_thread(bed.server.stop_at_once)
    bed.watch.away(bed.living)
    bed.effects["servers_ended"] += 1


@verb
async def restart_server(bed: Bed) -> None:
    """Return when it accepts connections."""
    bed.watch.back(bed.living)
    await asyncio.to_thread(bed.server.restart)


@verb
async def stall_server(bed: Bed) -> None:
    """SIGSTOP of every process of it."""
    await asyncio.to_thread(bed.server.stall)
    bed.watch.away(bed.living)
    bed.effects["stalls"] += 1


@verb
async def resume_server(bed: Bed) -> None:
    """SIGCONT."""
    bed.watch.back(bed.living)
    await asyncio.to_thread(bed.server.resume)


def crashing(random: Random, rounds: int) -> list[Action]:
    """Away until everybody has noticed, and at the first time for as long as to see that nobody spins."""
    actions: list[Action] = []
    for number in range(rounds):
        actions += [
            fault("crash_server"),
            act("refused", more=5),
            act("all_unready"),
            *([act("idle", seconds=4)] if number == 0 else []),
            act("wait", seconds=round(random.uniform(0, 2), 2)),
            act("restart_server"),
            act("database_is_used"),
            act("accepted", more=random.randint(200, 500)),
        ]
    return actions


def stopping_at_once(random: Random, rounds: int) -> list[Action]:
    """Again and again, and back at once, or now and then when everybody has noticed."""
    actions: list[Action] = []
    for number in range(rounds):
        actions += [
            fault("stop_server_at_once"),
            *([act("all_unready")] if number % 5 == 2 else []),
            act("restart_server"),
            act("accepted", more=random.randint(20, 80)),
        ]
    return [*actions, act("database_is_used")]


def stalling(random: Random, rounds: int) -> list[Action]:
    """Until everybody has noticed."""
    actions: list[Action] = []
    for number in range(rounds):
        actions += [
            fault("stall_server"),
            act("refused", more=5),
            act("all_unready"),
            *([act("idle", seconds=4)] if number == 0 else []),
            act("wait", seconds=round(random.uniform(0, 4), 2)),
            act("resume_server"),
            act("database_is_used"),
            act("accepted", more=random.randint(200, 500)),
        ]
    return actions


SCENARIOS = (
    Scenario(
        "server_killed",
        "kill -9 of PostgreSQL",
        "503 meanwhile, nobody spins, and its return is used within ten seconds",
        crashing,
        effects=("servers_ended", "turned_away", "looks_unready"),
        rounds=4,
    ),
    Scenario(
        "server_stopped",
        "PostgreSQL's immediate shutdown, twenty times under ingest",
        "every acknowledged event is there",
        stopping_at_once,
        effects=("servers_ended", "turned_away"),
        rounds=20,
    ),
    Scenario(
        "server_stalled",
        "SIGSTOP of every process of PostgreSQL",
        "503 meanwhile, nobody spins, and its return is used within ten seconds",
        stalling,
        effects=("stalls", "turned_away", "looks_unready"),
        rounds=2,
    ),
)
