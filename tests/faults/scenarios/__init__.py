"""All scenarios, one module per family. Importing this package registers all verbs."""

from tests.faults.plan import Scenario
from tests.faults.scenarios import (
    clocks,
    connections,
    disks,
    endpoints,
    instances,
    locks,
    migrations,
    mix,
    operations,
    poison,
    retention,
    server,
    standbys,
    support_actions,
)

FAMILIES = (
    instances,
    connections,
    server,
    disks,
    standbys,
    locks,
    endpoints,
    poison,
    operations,
    support_actions,
    retention,
    migrations,
    clocks,
    mix,
)
ALL: dict[str, Scenario] = {scenario.name: scenario for family in FAMILIES for scenario in family.SCENARIOS}
