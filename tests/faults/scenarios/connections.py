"""Faults between an instance and its database: resets, silence, half-open connections, lost answers."""

import time
from random import Random

from tests.faults.bed import Bed
from tests.faults.plan import Action, Plan, Scenario, act, fault
from tests.faults.verbs import RECOVERY_SECONDS, heal, verb
from tests.support.waiting import until_true

# The database functions through which an instance changes data.
WRITES = (
    "publish_many",
    "route_events",
    "start_due_sagas",
    "claim_jobs",
    "deliver_now",
    "complete_deliveries",
    "report_results",
    "apply_results",
)
BACKENDS = """
    select array(select pid from pg_stat_activity
                 where datname = current_database() and application_name = 'webhookd' and query like $1)
"""
ANY_QUERY = "%"
TERMINATE = "select count(*) filter (where pg_terminate_backend(pid)) from unnest($1::integer[]) pid"
NEW_BACKENDS = f"select count(*) >= $3 from unnest(({BACKENDS})) pid where pid <> all ($2)"
# After its first heartbeat, the heartbeat is always the listener's last statement.
LISTENER = "%pg_listening_channels%"


@verb
async def lose_acknowledgements(bed: Bed, *, instance: int, function: str, count: int) -> None:
    """Commit calls, but drop their answers and connections."""
    wire = bed.instances[instance].wire
    lost = wire.answers_lost
    wire.lose_answers(rf"webhookd\.{function}\b", count)
    await until_true(lambda: wire.answers_lost >= lost + count)


@verb
async def reset_wire(bed: Bed, *, instance: int) -> int:
    """Reset every TCP connection of an instance, and return their number."""
    wire = bed.instances[instance].wire
    broken = wire.broken
    wire.reset()
    return wire.broken - broken


@verb
async def half_open_wire(bed: Bed, *, instance: int) -> int:
    """Close the server's side of each connection without notice to the instance; returns their number."""
    wire = bed.instances[instance].wire
    broken = wire.broken
    wire.half_open()
    return wire.broken - broken


@verb
async def blackhole_wire(bed: Bed, *, instance: int) -> None:
    """Drop every byte silently."""
    bed.instances[instance].wire.blackhole()
    bed.watch.database_lost([bed.instances[instance]])


@verb
async def stall_wire(bed: Bed, *, instance: int) -> None:
    """Forward nothing, but keep the bytes."""
    bed.instances[instance].wire.stall()
    bed.watch.database_lost([bed.instances[instance]])


@verb
async def ready(bed: Bed, *, instance: int) -> None:
    """Wait until an instance is ready."""
    await bed.instances[instance].until_ready()


@verb
async def heal_wire(bed: Bed, *, instance: int) -> None:
    """Forward again."""
    bed.watch.database_restored([bed.instances[instance]])
    bed.instances[instance].wire.flow()


@heal
async def wire_recovers(bed: Bed, *, instance: int) -> None:
    """Measure, from now, how long until the instance is ready."""
    started = time.monotonic()
    await bed.instances[instance].until_ready()
    bed.record_recovery("connection to the database back: instance ready", started, RECOVERY_SECONDS)


@verb
async def terminate_backend(bed: Bed, *, which: float) -> int:
    """Terminate one backend; `which` is its position in the list, from 0 to 1."""
    async with bed.superuser() as superuser:
        backends = await superuser.fetchval(BACKENDS, ANY_QUERY)
        chosen = backends[int(which * len(backends)) :][:1]
        terminated: int = await superuser.fetchval(TERMINATE, chosen)
    bed.effects["backends_terminated"] += terminated
    return terminated


@verb
async def terminate_listeners(bed: Bed) -> int:
    """Terminate the listeners' backends; returns when each instance has a new one."""
    async with bed.superuser() as superuser:
        listeners = await superuser.fetchval(BACKENDS, LISTENER)
        terminated: int = await superuser.fetchval(TERMINATE, listeners)
    bed.effects["listeners_terminated"] += terminated
    await bed.until(NEW_BACKENDS, LISTENER, listeners, len(bed.running))
    return terminated


def lose_answers(random: Random, rounds: int) -> list[Action]:
    """Lose the answer of every write function, in random order."""
    actions: list[Action] = []
    for _ in range(rounds):
        for function in random.sample(WRITES, len(WRITES)):
            actions += [
                fault("lose_acknowledgements", instance=random.randrange(3), function=function, count=1),
                act("accepted", more=random.randint(20, 60)),
            ]
    return actions


def reset_wires(random: Random, rounds: int) -> list[Action]:
    """Reset the connections of random instances."""
    actions: list[Action] = []
    for _ in range(rounds):
        actions += [
            fault("reset_wire", instance=random.randrange(3)),
            act("accepted", more=random.randint(20, 80)),
        ]
    return actions


def disconnect(how: str) -> Plan:
    """Cut one instance off from the database for a while; the other instances do its work."""

    def plan(random: Random, rounds: int) -> list[Action]:
        actions: list[Action] = []
        for _ in range(rounds):
            victim = random.randrange(3)
            actions += [
                fault(how, instance=victim),
                act("all_unready"),
                act("accepted", more=random.randint(50, 150)),
                act("heal_wire", instance=victim),
                act("wire_recovers", instance=victim),
                act("accepted", more=random.randint(50, 150)),
            ]
        return actions

    return plan


def half_open_wires(random: Random, rounds: int) -> list[Action]:
    """New connections always work, so the instance may stay ready."""
    actions: list[Action] = []
    for _ in range(rounds):
        victim = random.randrange(3)
        actions += [
            fault("half_open_wire", instance=victim),
            act("accepted", more=random.randint(100, 300)),
            act("ready", instance=victim),
        ]
    return actions


def terminate_backends(random: Random, rounds: int) -> list[Action]:
    """Terminate random backends, and after every twentieth all listeners."""
    actions: list[Action] = []
    for number in range(rounds):
        actions += [
            fault("terminate_backend", which=random.random()),
            act("accepted", more=random.randint(5, 30)),
        ]
        if number % 20 == 19:
            actions += [fault("terminate_listeners"), act("delivered", more=50)]
    return actions


SCENARIOS = (
    Scenario(
        "lost_acknowledgements",
        "the answer to a commit lost with its connection, for every write function",
        "the repeated call is recognised: no event is stored twice, no result is applied twice",
        lose_answers,
        effects=("acknowledgements_lost", "recognised_publishes"),
        rounds=6,
    ),
    Scenario(
        "resets",
        "a TCP reset of all connections of an instance",
        "the connections are replaced",
        reset_wires,
        effects=("connections_broken", "services_restarted"),
        rounds=50,
    ),
    Scenario(
        "half_open",
        "the server's side of an instance's connections closed without notice to the instance",
        "calls end by their own timeouts",
        half_open_wires,
        effects=("connections_broken", "failed_publishes"),
        rounds=3,
    ),
    Scenario(
        "blackhole",
        "every byte between an instance and the database dropped",
        "/readyz reports it, and the other instances do the work",
        disconnect("blackhole_wire"),
        effects=("connections_broken", "unready_probes"),
        rounds=3,
    ),
    Scenario(
        "stalled_wire",
        "every byte between an instance and the database delayed, then all delivered",
        "/readyz reports it; calls that timed out and are executed late do no harm",
        disconnect("stall_wire"),
        effects=("unready_probes",),
        rounds=3,
    ),
    Scenario(
        "backends",
        "backends of the server terminated one at a time, including those of the listeners",
        "every connection is replaced, including the listeners",
        terminate_backends,
        effects=("backends_terminated", "listeners_terminated", "services_restarted"),
        rounds=130,
    ),
)
