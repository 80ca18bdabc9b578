"""The listener behind a pooler."""

import contextlib

import pytest

from tests.stage.conftest import Parts, running
from tests.support.database import Database
from tests.support.pooler import RotatingPooler
from tests.support.waiting import CONDITION_TIMEOUT_SECONDS, until_true
from webhookd import wakeups
from webhookd.daemon.services import Service, supervise
from webhookd.db.connection import connected
from webhookd.wakeups import Listener, Work


async def test_listener_behind_a_pooler_retries_and_keeps_running(
    database: Database, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service that ended would raise an alert forever, and the pooler's mode may change."""
    monkeypatch.setattr(wakeups, "NO_LISTEN_INTERVAL_SECONDS", 0.01)
    monkeypatch.setattr(wakeups, "HEARTBEAT_TIMEOUT_SECONDS", CONDITION_TIMEOUT_SECONDS)
    async with RotatingPooler(database.dsn("daemon")) as pooler, contextlib.AsyncExitStack() as others:
        # One session per channel and one more: the check runs on a session that does not listen.
        for _ in Work:
            await others.enter_async_context(connected(pooler.dsn))
        service = Service("listener", Listener(pooler.dsn, parts.pool, parts.wakeups).run)
        async with running(lambda: supervise(service, parts.metrics)):
            await until_true(lambda: pooler.transactions >= 30)
            assert (service.state, service.restarts) == ("running", 0)
