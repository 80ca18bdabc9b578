"""How the supervisor logs a failed service."""

import logging

import pytest

from webhookd.core.errors import DatabaseBusy, DatabaseUnavailable
from webhookd.core.metrics import Metrics
from webhookd.daemon.services import Service, supervise


@pytest.mark.parametrize(
    ("error", "level"),
    [
        (DatabaseBusy("lock timeout"), logging.WARNING),
        (DatabaseUnavailable("connection refused"), logging.DEBUG),  # the pool has logged it already
        (RuntimeError("a bug"), logging.ERROR),
    ],
)
async def test_log_level_of_a_failure_depends_on_its_cause(
    error: Exception, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A lock timeout is a warning, not silent and not a bug; the service restarts each time."""
    errors = [error]

    async def run() -> None:
        if errors:
            raise errors.pop()

    service = Service("jobs", run)
    with caplog.at_level(logging.DEBUG, logger="webhookd.daemon.services"):
        await supervise(service, Metrics())
    assert (service.state, service.restarts) == ("ended", 1)
    assert [record.levelno for record in caplog.records] == [level]
