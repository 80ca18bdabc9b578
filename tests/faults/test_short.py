"""A short part of the fault suite with a fixed seed; `make faults` runs all of it.

One test bed for all kinds of faults: starting the servers and instances takes longer than most faults.
"""

import logging
import re
from random import Random

from tests.faults.plan import Action, Needs, Scenario, act, fault
from tests.faults.report import result_text
from tests.faults.runner import run_scenario
from tests.faults.scenarios.connections import lose_answers
from tests.faults.scenarios.instances import FAILPOINTS
from tests.faults.scenarios.server import stop_immediately
from tests.faults.scenarios.support_actions import (
    SETTINGS,
    disable,
    pause,
    replay_everything,
    resend_completed,
    retry,
    verify_address,
)
from tests.support.installations import installation_near
from tests.support.postgres import Server

log = logging.getLogger(__name__)

SEED = 1
SERVER_STOPS = 3
# Time limits depend on the load of this machine: here they are only logged; `make faults` enforces them.
TIMING = re.compile(
    r"late: |/healthz failed: instance \d+: TimeoutError |\d+\.\d% CPU use without a database"
)


def kill_in_pairs(random: Random) -> list[Action]:
    """Kill at every failpoint, two instances at a time, so that two start at the same time."""
    points = random.sample(FAILPOINTS, len(FAILPOINTS))
    actions: list[Action] = []
    for start in range(0, len(points), 2):
        pair = points[start : start + 2]
        victims = zip(random.sample(range(3), len(pair)), pair, strict=True)
        actions += [fault("die_at", instance=victim, point=point) for victim, point in victims]
        actions += [act("accepted", more=50), act("start_stopped"), act("delivered", more=50)]
    return actions


def interrupt_support(random: Random) -> list[Action]:
    """Use the actions of support, each with one fault; `make faults` uses each with every fault."""
    return [
        *retry(random, "reset"),
        *pause(random, "lost_answer"),
        *disable(random, "lost_answer"),
        *replay_everything(random, "lost_answer"),
        *verify_address(random, "reset"),
        *resend_completed(random, "kill"),
    ]


def break_everything(random: Random, rounds: int) -> list[Action]:
    """Break instances, connections and the server."""
    return [
        *kill_in_pairs(random),
        *lose_answers(random, rounds),
        *interrupt_support(random),
        *stop_immediately(random, SERVER_STOPS),
    ]


SHORT = Scenario(
    "short",
    "SIGKILL at every failpoint, lost answers to every write function, faults during the actions of support, "
    "immediate shutdowns of PostgreSQL",
    "no acknowledged event is missing",
    break_everything,
    effects=(
        "leases_expired",
        "duplicate_requests",
        "acknowledgements_lost",
        "recognised_publishes",
        "servers_stopped",
        "failed_publishes",
        "resent_deliveries",
        "advanced_retries",
        "events_while_paused",
        "replayed_events",
        "replayed_deliveries",
        "requests_after_move",
    ),
    rounds=1,
    needs=Needs(failpoints=True, settings=SETTINGS),
)


async def test_no_acknowledged_event_is_lost(postgres: Server) -> None:
    """After faults under load, every invariant holds, and every fault had its effect."""
    result = await run_scenario(SHORT, SEED, installation_near(postgres.major))
    log.info(result_text(result))
    assert not result.missing
    problems = [problem for problem in result.problems if not TIMING.match(problem)]
    assert not problems, f"{problems}; logs: {result.folder}"
    planned = SHORT.actions(SEED)
    assert result.faults == sum(action.is_fault for action in planned)
