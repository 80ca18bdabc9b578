"""What a supervised service's end is told as."""

import logging

import pytest

from webhookd.core.errors import DatabaseBusy, DatabaseUnavailable
from webhookd.core.metrics import Metrics
from webhookd.daemon.services import Service, supervise


@pytest.mark.parametrize(
    ("error", "level"),
    [
        (DatabaseBusy("a lock was not had in time"), logging.WARNING),
        (DatabaseUnavailable("away"), logging.DEBUG),  # the pool has said it
        (RuntimeError("a bug"), logging.ERROR),
    ],
)
async def test_a_failure_is_told_by_its_weight(
    error: Exception, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody's lock in the way is neither silent nor a bug; the service is begun anew each time."""
    errors = [error]

    async def run() -> None:
        if errors:
            raise errors.pop()

    service = Service("jobs", run)
    with caplog.at_level(logging.DEBUG, logger="webhookd.daemon.services"):
        await supervise(service, Metrics())
    assert (service.state, service.restarts) == ("ended", 1)
    assert [record.levelno for record in caplog.records] == [level]
