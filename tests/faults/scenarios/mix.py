"""A random mix of all faults that need no special test bed."""

from collections.abc import Callable
from random import Random

from tests.faults.plan import Action, Needs, Scenario, act, fault
from tests.faults.scenarios.connections import WRITES
from tests.faults.scenarios.instances import FAILPOINTS
from tests.faults.scenarios.locks import TABLES
from tests.faults.scenarios.retention import HOWS
from tests.faults.scenarios.retention import SETTINGS as RETENTION
from tests.faults.scenarios.support_actions import (
    EFFECTS,
    FAULTS,
    NO_FAULT,
    SETTINGS,
    STEPS,
    hold_and_release,
)


def kill_and_start(random: Random) -> list[Action]:
    """Kill an instance in some way, and start it again."""
    instance = random.randrange(3)
    kill = random.choice(
        [
            fault("kill", instance=instance),
            fault("kill_during_deliveries", instance=instance, leases=5),
            fault("die_at", instance=instance, point=random.choice(FAILPOINTS)),
        ]
    )
    return [kill, act("accepted", more=random.randint(10, 100)), act("start", instance=instance)]


def restart(random: Random) -> list[Action]:
    """Restart an instance gracefully."""
    return [fault("restart_gracefully", instance=random.randrange(3))]


def disconnect(random: Random) -> list[Action]:
    """Cut an instance off from its database for a while."""
    instance = random.randrange(3)
    return [
        fault(random.choice(["blackhole_wire", "stall_wire"]), instance=instance),
        act("wait", seconds=round(random.uniform(0.5, 8), 2)),
        act("heal_wire", instance=instance),
    ]


def disturb(random: Random) -> list[Action]:
    """Inject one short fault."""
    instance = random.randrange(3)
    return [
        random.choice(
            [
                fault("reset_wire", instance=instance),
                fault("half_open_wire", instance=instance),
                fault("terminate_backend", which=random.random()),
                fault("terminate_listeners"),
                fault(
                    "lose_acknowledgements",
                    instance=instance,
                    function=random.choice(WRITES),
                    count=1,
                ),
                fault("send_sighups", instance=instance, count=random.randint(1, 10)),
                fault("lock_table", table=random.choice(TABLES), seconds=round(random.uniform(0.2, 2), 2)),
                fault("leave_transaction_open", seconds=round(random.uniform(0.5, 3), 2)),
            ]
        )
    ]


def stop_server(random: Random) -> list[Action]:
    """Stop or stall the database server for a while."""
    stop, start = random.choice(
        [
            ("crash_server", "restart_server"),
            ("stop_server_immediately", "restart_server"),
            ("stall_server", "resume_server"),
        ]
    )
    return [
        fault(stop),
        act("wait", seconds=round(random.uniform(0, 4), 2)),
        act(start),
        act("database_recovers"),
    ]


def use_support(random: Random) -> list[Action]:
    """Use the API as a support engineer does, with a fault during the request or without."""
    return random.choice(STEPS)(random, random.choice([NO_FAULT, *FAULTS]))


def interrupt_sweep(random: Random) -> list[Action]:
    """Interrupt retention while it removes events."""
    return [fault("interrupt_sweep", how=random.choice(HOWS))]


def disturb_paused(random: Random) -> list[Action]:
    """Inject a short fault while a subscription is paused."""
    hold, accepted, release = hold_and_release(random, NO_FAULT, NO_FAULT, "paused", random.randint(20, 100))
    return [hold, *disturb(random), accepted, release]


KINDS: tuple[tuple[Callable[[Random], list[Action]], int], ...] = (
    (disturb, 12),
    (kill_and_start, 4),
    (restart, 2),
    (disconnect, 2),
    (stop_server, 2),
    (use_support, 4),
    (disturb_paused, 2),
    (interrupt_sweep, 3),
)


def mix(random: Random, rounds: int) -> list[Action]:
    """Start each fault when the last is repaired, while deliveries still suffer from it.

    Every action of support occurs at least once, so that each has its effect.
    """
    kinds, weights = zip(*KINDS, strict=True)
    chosen = [kind(random) for kind in random.choices(kinds, weights, k=rounds)]
    chosen += [step(random, random.choice([NO_FAULT, *FAULTS])) for step in STEPS]
    actions: list[Action] = []
    for some in random.sample(chosen, len(chosen)):
        actions += [*some, act("accepted", more=random.randint(5, 60))]
    # At the end there is always something to remove.
    return [*actions, *interrupt_sweep(random), act("all_ready")]


SCENARIOS = (
    Scenario(
        "mix",
        "random faults of all kinds, each before the effects of the last are over",
        "all invariants",
        mix,
        effects=(
            "leases_expired",
            "connections_broken",
            "failed_publishes",
            "unready_probes",
            "sweeps_interrupted",
            "events_removed",
            *EFFECTS,
        ),
        rounds=70,
        needs=Needs(failpoints=True, settings=SETTINGS | RETENTION),
    ),
)
