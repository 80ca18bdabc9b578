"""PostgreSQL killed, shut down immediately, and stalled."""

import asyncio
from random import Random

from tests.faults.bed import Bed
from tests.faults.plan import Action, Scenario, act, fault
from tests.faults.verbs import verb


@verb
async def crash_server(bed: Bed) -> None:
    """Send SIGKILL to every process of the server."""
    await asyncio.to_thread(bed.server.crash)
    bed.watch.database_lost(bed.running)
    bed.effects["servers_stopped"] += 1


@verb
async def stop_server_immediately(bed: Bed) -> None:
    """Do an immediate shutdown."""
    await asyncio.to_thread(bed.server.stop_at_once)
    bed.watch.database_lost(bed.running)
    bed.effects["servers_stopped"] += 1


@verb
async def restart_server(bed: Bed) -> None:
    """Start the server, and return when it accepts connections."""
    bed.watch.database_restored(bed.running)
    await asyncio.to_thread(bed.server.restart)


@verb
async def stall_server(bed: Bed) -> None:
    """Send SIGSTOP to every process of the server."""
    await asyncio.to_thread(bed.server.stall)
    bed.watch.database_lost(bed.running)
    bed.effects["stalls"] += 1


@verb
async def resume_server(bed: Bed) -> None:
    """Send SIGCONT to every process of the server."""
    bed.watch.database_restored(bed.running)
    await asyncio.to_thread(bed.server.resume)


def crash(random: Random, rounds: int) -> list[Action]:
    """Crash until every instance reports it; the first time, also measure the CPU use of the instances."""
    actions: list[Action] = []
    for number in range(rounds):
        actions += [
            fault("crash_server"),
            act("refused", more=5),
            act("all_unready"),
            *([act("measure_idle_cpu", seconds=4)] if number == 0 else []),
            act("wait", seconds=round(random.uniform(0, 2), 2)),
            act("restart_server"),
            act("database_recovers"),
            act("accepted", more=random.randint(200, 500)),
        ]
    return actions


def stop_immediately(random: Random, rounds: int) -> list[Action]:
    """Stop and restart at once; every fifth time, restart after every instance has reported it."""
    actions: list[Action] = []
    for number in range(rounds):
        actions += [
            fault("stop_server_immediately"),
            *([act("all_unready")] if number % 5 == 2 else []),
            act("restart_server"),
            act("accepted", more=random.randint(20, 80)),
        ]
    return [*actions, act("database_recovers")]


def stall(random: Random, rounds: int) -> list[Action]:
    """Stall until every instance reports it."""
    actions: list[Action] = []
    for number in range(rounds):
        actions += [
            fault("stall_server"),
            act("refused", more=5),
            act("all_unready"),
            *([act("measure_idle_cpu", seconds=4)] if number == 0 else []),
            act("wait", seconds=round(random.uniform(0, 4), 2)),
            act("resume_server"),
            act("database_recovers"),
            act("accepted", more=random.randint(200, 500)),
        ]
    return actions


SCENARIOS = (
    Scenario(
        "server_killed",
        "SIGKILL of PostgreSQL",
        "503 meanwhile, no busy loop, and full recovery within ten seconds",
        crash,
        effects=("servers_stopped", "failed_publishes", "unready_probes"),
        rounds=4,
    ),
    Scenario(
        "server_stopped",
        "immediate shutdown of PostgreSQL, twenty times under load",
        "no acknowledged event is missing",
        stop_immediately,
        effects=("servers_stopped", "failed_publishes"),
        rounds=20,
    ),
    Scenario(
        "server_stalled",
        "SIGSTOP of every process of PostgreSQL",
        "503 meanwhile, no busy loop, and full recovery within ten seconds",
        stall,
        effects=("stalls", "failed_publishes", "unready_probes"),
        rounds=2,
    ),
)
