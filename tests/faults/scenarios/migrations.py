"""An upgrade under load: the next release's migration beside this release's instances, then their upgrade."""

from random import Random

from tests.faults import next_release
from tests.faults.bed import Bed
from tests.faults.plan import Action, Scenario, act, fault
from tests.faults.verbs import heal
from tests.support.command import Command

MAX_TRIES = 10
# A migration with one of these errors changed nothing and can be tried again.
LOCK_ERRORS = ("lock timeout", "deadlock detected")
VERSION = "select max(version) from webhookd.schema_migrations"


@heal
async def migrate(bed: Bed) -> None:
    """Run the next release's `webhookd migrate`, again after a lock error."""
    tree = next_release.create_tree(bed.folder / "next_release")
    before = await bed.fetch_value(VERSION)
    for _ in range(MAX_TRIES):
        ended = await Command(bed.folder).run(
            "migrate", dsn=bed.database.dsn("migrator"), PYTHONPATH=str(tree)
        )
        if ended.code == 0 or not any(words in " ".join(ended.err) for words in LOCK_ERRORS):
            break
        bed.effects["migrations_retried"] += 1
    if ended.code != 0:
        bed.problems.append(f"the migration failed: {' '.join(ended.err)}")
    after = await bed.fetch_value(VERSION)
    if not before < after == next_release.NEWEST:
        bed.problems.append(
            f"the schema went from {before} to {after}, where {next_release.NEWEST} is the newest"
        )
    bed.effects["migrations_applied"] += after - before


@heal
async def upgrade(bed: Bed, *, instance: int) -> None:
    """Stop an instance with SIGTERM and start it as the next release."""
    upgraded = bed.instances[instance]
    if code := await upgraded.stop_gracefully():
        bed.problems.append(f"instance {instance}: exit code {code} after SIGTERM")
    upgraded.daemon.environment["PYTHONPATH"] = str(bed.folder / "next_release")
    upgraded.daemon.is_forked = False  # a forked process has the modules of this release loaded
    await upgraded.start()
    if upgraded.daemon.logged(f"webhookd {next_release.VERSION} started"):
        bed.effects["upgrades"] += 1
    else:
        bed.problems.append(f"instance {instance} does not run version {next_release.VERSION}")


def migrating(random: Random, rounds: int) -> list[Action]:
    """Load before the migration, after it, and beside each upgraded instance."""
    load = [("accepted", 100, 300), ("delivered", 100, 300)] * rounds

    def under_load() -> list[Action]:
        return [act(what, more=random.randint(least, most)) for what, least, most in load]

    actions = [*under_load(), fault("migrate"), *under_load(), act("all_ready")]
    for instance in random.sample(range(3), 3):
        actions += [fault("upgrade", instance=instance), *under_load()]
    return [*actions, act("all_ready")]


SCENARIOS = (
    Scenario(
        "migration",
        "the next release's migration beside this release's instances, and their upgrade one after the other",
        "old instances continue with the new schema until their upgrade; no lease expires, no double send",
        migrating,
        effects=("migrations_applied", "upgrades"),
        forbidden=("leases_expired", "duplicate_requests"),
        rounds=2,
    ),
)
