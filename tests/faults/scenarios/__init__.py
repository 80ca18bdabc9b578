"""Every scenario, one module a family. Importing this gives all verbs their names."""

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
    server,
    standbys,
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
    migrations,
    clocks,
    mix,
)
ALL: dict[str, Scenario] = {scenario.name: scenario for family in FAMILIES for scenario in family.SCENARIOS}
