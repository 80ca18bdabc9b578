"""Wrong clocks: one instance is always ten minutes ahead, another ten minutes behind."""

from datetime import UTC, datetime
from random import Random

from tests.faults.bed import Bed
from tests.faults.plan import Action, Needs, Scenario, act, fault
from tests.faults.verbs import verb

CLOCK_TOLERANCE_SECONDS = 10
DELIVERED_BY = """
    select count(*) from webhookd.webhook_delivery_jobs
    where status = 'Completed' and split_part(worker_id, ':', 2) = $1
"""


@verb
async def count_deliveries(bed: Bed, *, instance: int, effect: str) -> None:
    """Count the deliveries of one instance."""
    bed.effects[effect] += await bed.fetch_value(DELIVERED_BY, bed.instances[instance].process_id)


@verb
async def check_clock(bed: Bed, *, instance: int, minutes: int) -> None:
    """Check the clock of an instance by the time of a line that it logs now."""
    daemon = bed.instances[instance].daemon
    await daemon.reload()
    logged_at = datetime.fromisoformat(daemon.logged("")[-1]["time"])
    ahead = (logged_at - datetime.now(UTC)).total_seconds()
    if abs(ahead - minutes * 60) > CLOCK_TOLERANCE_SECONDS:
        bed.problems.append(f"clock of instance {instance}: {ahead:.0f} s ahead instead of {minutes} minutes")


def use_wrong_clocks(random: Random, rounds: int) -> list[Action]:
    """Kill the instance with the correct clock, so that only those with wrong clocks do the work."""
    actions = [
        act("check_clock", instance=instance, minutes=minutes)
        for instance, minutes in enumerate([10, -10, 0])
    ]
    for _ in range(rounds):
        actions += [
            act("accepted", more=random.randint(200, 400)),
            fault("kill_during_deliveries", instance=2, leases=5),
            act("accepted", more=random.randint(200, 400)),
            act("start", instance=2),
        ]
    return [
        *actions,
        act("count_deliveries", instance=0, effect="delivered_ten_minutes_ahead"),
        act("count_deliveries", instance=1, effect="delivered_ten_minutes_behind"),
    ]


SCENARIOS = (
    Scenario(
        "clocks",
        "clocks ten minutes ahead and ten minutes behind; the instance with the correct clock is killed",
        "instances use the database's time: signatures verify, and leases of the killed instance are reset",
        use_wrong_clocks,
        effects=("delivered_ten_minutes_ahead", "delivered_ten_minutes_behind", "leases_expired"),
        rounds=2,
        needs=Needs(wrong_clock=True),
    ),
)
