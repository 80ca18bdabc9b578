"""Everything that a bed without special needs can suffer, one after the other, as the seed has it."""

from collections.abc import Callable
from random import Random

from tests.faults.plan import Action, Needs, Scenario, act, fault
from tests.faults.scenarios.connections import GATED
from tests.faults.scenarios.instances import FAILPOINTS
from tests.faults.scenarios.locks import TABLES


def ended_and_started(random: Random) -> list[Action]:
    """An instance dies, somehow, and is replaced."""
    instance = random.randrange(3)
    how = random.choice(
        [
            fault("kill", instance=instance),
            fault("kill_amid_deliveries", instance=instance, leases=5),
            fault("die_at", instance=instance, point=random.choice(FAILPOINTS)),
        ]
    )
    return [how, act("accepted", more=random.randint(10, 100)), act("start", instance=instance)]


def restarted(random: Random) -> list[Action]:
    """An instance is restarted in order."""
    return [fault("restart_in_order", instance=random.randrange(3))]


def darkened(random: Random) -> list[Action]:
    """An instance loses sight of its database."""
    instance = random.randrange(3)
    return [
        fault(random.choice(["blackhole_wire", "stall_wire"]), instance=instance),
        act("wait", seconds=round(random.uniform(0.5, 8), 2)),
        act("heal_wire", instance=instance),
    ]


def disturbed(random: Random) -> list[Action]:
    """Something short."""
    instance = random.randrange(3)
    return [
        random.choice(
            [
                fault("reset_wire", instance=instance),
                fault("half_open_wire", instance=instance),
                fault("terminate_backend", which=random.random()),
                fault("terminate_listeners"),
                fault("lose_acknowledgements", instance=instance, function=random.choice(GATED), count=1),
                fault("sighups", instance=instance, count=random.randint(1, 10)),
                fault("lock_table", table=random.choice(TABLES), seconds=round(random.uniform(0.2, 2), 2)),
                fault("leave_transaction_open", seconds=round(random.uniform(0.5, 3), 2)),
            ]
        )
    ]


def without_server(random: Random) -> list[Action]:
    """The database goes, and comes back."""
    end, back = random.choice(
        [
            ("crash_server", "restart_server"),
            ("stop_server_at_once", "restart_server"),
            ("stall_server", "resume_server"),
        ]
    )
    return [
        fault(end),
        act("wait", seconds=round(random.uniform(0, 4), 2)),
        act(back),
        act("database_is_used"),
    ]


KINDS: tuple[tuple[Callable[[Random], list[Action]], int], ...] = (
    (disturbed, 12),
    (ended_and_started, 4),
    (restarted, 2),
    (darkened, 2),
    (without_server, 2),
)


def mixing(random: Random, rounds: int) -> list[Action]:
    """The next begins when the last is healed, but what it did to the deliveries is still under way."""
    kinds, weights = zip(*KINDS, strict=True)
    actions: list[Action] = []
    for kind in random.choices(kinds, weights, k=rounds):
        actions += [*kind(random), act("accepted", more=random.randint(5, 60))]
    return [*actions, act("all_ready")]


SCENARIOS = (
    Scenario(
        "mix",
        "all that, one after the other, before the last is digested",
        "the invariants",
        mixing,
        effects=("leases_expired", "connections_broken", "turned_away", "looks_unready"),
        rounds=70,
        needs=Needs(failpoints=True),
    ),
)
