"""A short part of the fault suite with a fixed seed; `make faults` runs all of it."""

import logging
import re

import pytest

from tests.faults.report import result_text
from tests.faults.runner import run_scenario
from tests.faults.scenarios import ALL
from tests.support.installations import installation_near
from tests.support.postgres import Server

log = logging.getLogger(__name__)

SEED = 1
# Time limits depend on the load of this machine: here they are only logged; `make faults` enforces them.
TIMING = re.compile(
    r"late: |/healthz failed: instance \d+: TimeoutError |\d+\.\d% CPU use without a database"
)
# Rounds by scenario: one scenario each for faults of instances, connections and the server.
SHORT = {"failpoints": 1, "lost_acknowledgements": 1, "server_stopped": 3}


@pytest.mark.parametrize("name", SHORT)
async def test_no_acknowledged_event_is_lost(name: str, postgres: Server) -> None:
    """After faults under load, every invariant holds, and the faults had their effects."""
    result = await run_scenario(ALL[name], SEED, installation_near(postgres.major), SHORT[name])
    assert not result.missing
    problems = [problem for problem in result.problems if not TIMING.match(problem)]
    if problems != result.problems:
        log.info(result_text(result))
    assert not problems, result_text(result)
