"""A short selection of the fault suite, always with the same seed; `make faults` runs all of it."""

import logging
import re

import pytest

from tests.faults.performance import perform
from tests.faults.report import line
from tests.faults.scenarios import ALL
from tests.support.installations import installation_near
from tests.support.postgres import Server

log = logging.getLogger(__name__)

SEED = 1
# How long something took, beside whatever else this machine does: logged here, and judged by `make faults`.
OF_TIME = re.compile(
    r"late: |no answer to /healthz: instance \d+: TimeoutError |\d+\.\d% of a processor without a database"
)
# By name, and how many rounds: one for each way in which instances, connections and the server can end.
SHORT = {"failpoints": 1, "lost_acknowledgements": 1, "server_stopped": 3}


@pytest.mark.parametrize("name", SHORT)
async def test_nothing_acknowledged_is_lost(name: str, postgres: Server) -> None:
    """Broken under load, healed, quiet: every invariant holds, and the faults had their effects."""
    result = await perform(ALL[name], SEED, installation_near(postgres.major), SHORT[name])
    assert not result.missing
    problems = [problem for problem in result.problems if not OF_TIME.match(problem)]
    if problems != result.problems:
        log.info(line(result))
    assert not problems, line(result)
