"""What lies between an instance and its database: cut, silent, half there, and answers that are lost."""

import time
from random import Random

from tests.faults.bed import Bed
from tests.faults.plan import Action, Plan, Scenario, act, fault
from tests.faults.verbs import RETURN_SECONDS, heal, verb
from tests.support.waiting import until_true

# What an instance may ask that changes something, by the function that does it.
GATED = ("publish_many", "route_events", "start_due_sagas", "claim_jobs", "report_results", "apply_results")
BACKENDS = """
    select array(select pid from pg_stat_activity
                 where datname = current_database() and application_name = 'webhookd' and query like $1)
"""
ANYBODY = "%"
TERMINATE = "select count(*) filter (where pg_terminate_backend(pid)) from unnest($1::integer[]) pid"
OTHERS = f"select count(*) >= $3 from unnest(({BACKENDS})) pid where pid <> all ($2)"
# The heartbeat is the listener's last statement from its first beat on.
LISTENER = "%pg_listening_channels%"


@verb
async def lose_acknowledgements(bed: Bed, *, instance: int, function: str, count: int) -> None:
    """Let calls be committed, and their answers be lost with the connection."""
    wire = bed.instances[instance].wire
    lost = wire.answers_lost
    wire.lose_answers(rf"webhookd\.{function}\b", count)
    await until_true(lambda: wire.answers_lost >= lost + count)


@verb
async def reset_wire(bed: Bed, *, instance: int) -> int:
    """A TCP reset of every connection of an instance; how many."""
    wire = bed.instances[instance].wire
    broken = wire.broken
    wire.reset()
    return wire.broken - broken


@verb
async def half_open_wire(bed: Bed, *, instance: int) -> int:
    """The server's side is gone, and nobody told the instance; of how many connections."""
    wire = bed.instances[instance].wire
    broken = wire.broken
    wire.half_open()
    return wire.broken - broken


@verb
async def blackhole_wire(bed: Bed, *, instance: int) -> None:
    """Every byte is lost, without a word."""
    bed.instances[instance].wire.blackhole()
    bed.watch.away([bed.instances[instance]])


@verb
async def stall_wire(bed: Bed, *, instance: int) -> None:
    """No byte moves."""
    bed.instances[instance].wire.stall()
    bed.watch.away([bed.instances[instance]])


@verb
async def ready(bed: Bed, *, instance: int) -> None:
    """An instance comes to say that it is ready."""
    await bed.instances[instance].until_ready()


@verb
async def heal_wire(bed: Bed, *, instance: int) -> None:
    """Carry again."""
    bed.watch.back([bed.instances[instance]])
    bed.instances[instance].wire.flow()


@heal
async def wire_is_used(bed: Bed, *, instance: int) -> None:
    """The database is back for one instance, as of now: the time until it is ready."""
    began = time.monotonic()
    await bed.instances[instance].until_ready()
    bed.recovered("the way to the database back: its instance ready", began, RETURN_SECONDS)


@verb
async def terminate_backend(bed: Bed, *, which: float) -> int:
    """End one of the server's processes, anyone's: each comes to its turn by the part of the list."""
    async with bed.superuser() as superuser:
        backends = await superuser.fetchval(BACKENDS, ANYBODY)
        chosen = backends[int(which * len(backends)) :][:1]
        ended: int = await superuser.fetchval(TERMINATE, chosen)
    bed.effects["backends_terminated"] += ended
    return ended


@verb
async def terminate_listeners(bed: Bed) -> int:
    """End those that wait for notifications; returns when each instance has another."""
    async with bed.superuser() as superuser:
        listeners = await superuser.fetchval(BACKENDS, LISTENER)
        ended: int = await superuser.fetchval(TERMINATE, listeners)
    bed.effects["listeners_terminated"] += ended
    await bed.until(OTHERS, LISTENER, listeners, len(bed.living))
    return ended


def losing(random: Random, rounds: int) -> list[Action]:
    """Of every gated call, in an order of the seed's."""
    actions: list[Action] = []
    for _ in range(rounds):
        for function in random.sample(GATED, len(GATED)):
            actions += [
                fault("lose_acknowledgements", instance=random.randrange(3), function=function, count=1),
                act("accepted", more=random.randint(20, 60)),
            ]
    return actions


def resetting(random: Random, rounds: int) -> list[Action]:
    """One instance after the other."""
    actions: list[Action] = []
    for _ in range(rounds):
        actions += [
            fault("reset_wire", instance=random.randrange(3)),
            act("accepted", more=random.randint(20, 80)),
        ]
    return actions


def going_dark(how: str) -> Plan:
    """One instance sees nothing of the database for a while; the others do its work."""

    def plan(random: Random, rounds: int) -> list[Action]:
        actions: list[Action] = []
        for _ in range(rounds):
            victim = random.randrange(3)
            actions += [
                fault(how, instance=victim),
                act("all_unready"),
                act("accepted", more=random.randint(50, 150)),
                act("heal_wire", instance=victim),
                act("wire_is_used", instance=victim),
                act("accepted", more=random.randint(50, 150)),
            ]
        return actions

    return plan


def half_opening(random: Random, rounds: int) -> list[Action]:
    """New connections are carried all the time: it need not come to be unready."""
    actions: list[Action] = []
    for _ in range(rounds):
        victim = random.randrange(3)
        actions += [
            fault("half_open_wire", instance=victim),
            act("accepted", more=random.randint(100, 300)),
            act("ready", instance=victim),
        ]
    return actions


def terminating(random: Random, rounds: int) -> list[Action]:
    """Anyone's, and now and then all listeners'."""
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
        "the answer to a commit lost with its connection, for every gated call",
        "asked again it is recognised: no event twice, no result applied twice",
        losing,
        effects=("acknowledgements_lost", "known_already"),
        rounds=6,
    ),
    Scenario(
        "resets",
        "a TCP reset of all of an instance's connections",
        "they are replaced",
        resetting,
        effects=("connections_broken", "services_restarted"),
        rounds=50,
    ),
    Scenario(
        "half_open",
        "the server's side of an instance's connections gone, and the instance not told",
        "its calls end by their own timeouts",
        half_opening,
        effects=("connections_broken", "turned_away"),
        rounds=3,
    ),
    Scenario(
        "blackhole",
        "every byte between an instance and the database lost",
        "it says that it is not ready, and the others do its work",
        going_dark("blackhole_wire"),
        effects=("connections_broken", "looks_unready"),
        rounds=3,
    ),
    Scenario(
        "stalled_wire",
        "no byte moves between an instance and the database, and then all of them",
        "it says that it is not ready; what it had asked for and given up does no harm when it is done late",
        going_dark("stall_wire"),
        effects=("looks_unready",),
        rounds=3,
    ),
    Scenario(
        "backends",
        "the server's processes terminated one after another, the listeners' among them",
        "each is replaced, the listeners too",
        terminating,
        effects=("backends_terminated", "listeners_terminated", "services_restarted"),
        rounds=130,
    ),
)
