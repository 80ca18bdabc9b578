"""Hosts whose clocks are wrong: one ten minutes ahead, one ten behind, for their whole lives."""

from datetime import UTC, datetime
from random import Random

from tests.faults.bed import Bed
from tests.faults.plan import Action, Needs, Scenario, act, fault
from tests.faults.verbs import verb

TOLERANCE_SECONDS = 10
DELIVERED_BY = """
    select count(*) from webhookd.webhook_delivery_jobs
    where status = 'Completed' and split_part(worker_id, ':', 2) = $1
"""


@verb
async def delivered_by(bed: Bed, *, instance: int, effect: str) -> None:
    """How much an instance has done."""
    bed.effects[effect] += await bed.ask(DELIVERED_BY, bed.instances[instance].worker_process)


@verb
async def clock_is_wrong(bed: Bed, *, instance: int, minutes: int) -> None:
    """By a line that it logs now."""
    daemon = bed.instances[instance].daemon
    await daemon.reload()
    told = datetime.fromisoformat(daemon.logged("")[-1]["time"])
    ahead = (told - datetime.now(UTC)).total_seconds()
    if abs(ahead - minutes * 60) > TOLERANCE_SECONDS:
        bed.problems.append(f"the clock of instance {instance} is {ahead:.0f} s ahead, not {minutes} minutes")


def skewing(random: Random, rounds: int) -> list[Action]:
    """The wrong ones alone at times: they lease, sign, reap and retry by themselves."""
    actions = [
        act("clock_is_wrong", instance=instance, minutes=minutes)
        for instance, minutes in enumerate([10, -10, 0])
    ]
    for _ in range(rounds):
        actions += [
            act("accepted", more=random.randint(200, 400)),
            fault("kill_amid_deliveries", instance=2, leases=5),
            act("accepted", more=random.randint(200, 400)),
            act("start", instance=2),
        ]
    return [
        *actions,
        act("delivered_by", instance=0, effect="delivered_ten_minutes_ahead"),
        act("delivered_by", instance=1, effect="delivered_ten_minutes_behind"),
    ]


SCENARIOS = (
    Scenario(
        "clocks",
        "one instance ten minutes ahead and one ten minutes behind, and the right one killed",
        "time is the database's: every signature verifies, and the wrong take over the right one's leases",
        skewing,
        effects=("delivered_ten_minutes_ahead", "delivered_ten_minutes_behind", "leases_expired"),
        rounds=2,
        needs=Needs(wrong_clock=True),
    ),
)
