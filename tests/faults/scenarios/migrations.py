"""An upgrade as it is done: this release's migration under the last one's instances, then they one by one."""

from random import Random

from tests.faults.bed import Bed
from tests.faults.plan import Action, Needs, Scenario, act, fault
from tests.faults.verbs import heal
from tests.support.command import Command
from webhookd.db.schema_files import shipped

# The last release's tree, whose schema ends with 0004.
PREVIOUS = "5f8e1ab"
MAX_REFUSALS = 10
# What a migration says that did not get a lock in time, or stood in somebody's way: it may be asked again.
FOR_LOCKS = ("lock timeout", "deadlock detected")
VERSION = "select max(version) from webhookd.schema_migrations"


@heal
async def migrate(bed: Bed) -> None:
    """This release's own command, asked again while a lock is not got in time."""
    before = await bed.ask(VERSION)
    for _ in range(MAX_REFUSALS):
        ended = await Command(bed.folder).run("migrate", dsn=bed.database.dsn("migrator"))
        if ended.code == 0 or not any(words in " ".join(ended.err) for words in FOR_LOCKS):
            break
        bed.effects["migrations_put_off"] += 1
    if ended.code != 0:
        bed.problems.append(f"the migration was refused: {' '.join(ended.err)}")
    after, newest = await bed.ask(VERSION), shipped().migrations[-1].version
    if not before < after == newest:
        bed.problems.append(f"the schema was at {before} and is at {after}, where {newest} is the newest")
    bed.effects["migrations_applied"] += after - before


@heal
async def upgrade(bed: Bed, *, instance: int) -> None:
    """Ended in order, and started as this release."""
    upgraded = bed.instances[instance]
    if code := await upgraded.stop_in_order():
        bed.problems.append(f"instance {instance} ended with {code} at SIGTERM")
    del upgraded.daemon.environment["PYTHONPATH"]
    await upgraded.start()
    bed.effects["upgrades"] += 1


def migrating(random: Random, rounds: int) -> list[Action]:
    """The old ones go on for a while before the migration, after it, and beside the first new ones."""
    load = [("accepted", 100, 300), ("delivered", 100, 300)] * rounds

    def going_on() -> list[Action]:
        return [act(what, more=random.randint(least, most)) for what, least, most in load]

    actions = [*going_on(), fault("migrate"), *going_on(), act("all_ready")]
    for instance in random.sample(range(3), 3):
        actions += [fault("upgrade", instance=instance), *going_on()]
    return [*actions, act("all_ready")]


SCENARIOS = (
    Scenario(
        "migration",
        "this release's migration under the last one's instances, and their upgrade one after the other",
        "the old ones go on with the new schema until their turn; no lease expires, nothing is sent twice",
        migrating,
        effects=("migrations_applied", "upgrades"),
        forbidden=("leases_expired", "requests_doubled"),
        rounds=2,
        needs=Needs(previous=PREVIOUS),
    ),
)
