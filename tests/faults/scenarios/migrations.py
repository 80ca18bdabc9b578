"""The next release's migration, while instances of this one go on with their work.

There is no next release yet, so it is made up: columns on the busiest tables, an index, and every function
and trigger applied anew, as by a release that changed them all.
"""

from dataclasses import replace
from random import Random

from tests.faults.bed import Bed
from tests.faults.plan import Action, Scenario, act, fault
from tests.faults.verbs import verb
from webhookd.model.errors import SchemaProblem
from webhookd.store.migrations import migrate
from webhookd.store.schema_files import Migration, Schema, shipped

FIRST_VERSION = 9001
STEP = """
alter table webhookd.webhook_delivery_sagas add column of_{version} integer not null default 0;
alter table webhookd.webhook_delivery_jobs add column of_{version} text;
create index idx_of_{version} on webhookd.events (created_at);
"""


@verb
async def migrate_to(bed: Bed, *, version: int) -> None:
    """As `webhookd migrate` of that release, asked again while a lock is not got in time."""
    while True:
        try:
            await migrate(bed.database.dsn("migrator"), release(version))
        except SchemaProblem:
            bed.effects["migrations_put_off"] += 1
        else:
            bed.effects["migrations_applied"] += 1
            return


def release(version: int) -> Schema:
    """The schema of a release to come."""
    current = shipped()
    steps = [
        Migration(number, f"{number}_to_come", STEP.format(version=number))
        for number in range(FIRST_VERSION, version + 1)
    ]
    remark = f"\n-- of {version}\n"
    return replace(
        current,
        migrations=(*current.migrations, *steps),
        functions=tuple(replace(file, text=file.text + remark) for file in current.functions),
        triggers=current.triggers + remark,
    )


def migrating(random: Random, rounds: int) -> list[Action]:
    """One release after the other."""
    actions: list[Action] = []
    for number in range(rounds):
        actions += [
            fault("migrate_to", version=FIRST_VERSION + number),
            act("accepted", more=random.randint(100, 300)),
            act("delivered", more=random.randint(100, 300)),
        ]
    return [*actions, act("all_ready")]


SCENARIOS = (
    Scenario(
        "migration",
        "a later release's migration applied under the load of this one's instances",
        "they go on, and need no restart",
        migrating,
        effects=("migrations_applied",),
        rounds=5,
    ),
)
