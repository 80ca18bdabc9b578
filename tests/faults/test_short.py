"""A short selection of the fault suite, always with the same seed; `make faults` runs all of it."""

import pytest

from tests.faults.performance import perform
from tests.faults.report import line
from tests.faults.scenarios import ALL
from tests.support.installations import installation_near
from tests.support.postgres import Server

SEED = 1
# By name, and how many rounds: one for each way in which instances, connections and the server can end.
SHORT = {"failpoints": 1, "lost_acknowledgements": 1, "server_stopped": 3}


@pytest.mark.parametrize("name", SHORT)
async def test_nothing_acknowledged_is_lost(name: str, postgres: Server) -> None:
    """Broken under load, healed, quiet: every invariant holds, and the faults had their effects."""
    result = await perform(ALL[name], SEED, installation_near(postgres.major), SHORT[name])
    assert not result.missing
    assert result.passed, line(result)
