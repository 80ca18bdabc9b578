"""Behind a pooler in transaction mode, without LISTEN and without session state, everything works."""

import asyncio

import pytest

from tests.flow.conftest import MakeDaemon
from tests.flow.test_lifecycle import COMPLETED, publish_many, receipts
from tests.support.database import Database
from tests.support.endpoint import Endpoint
from tests.support.flow import EVENT_TYPE, Flow
from tests.support.pooler import PgBouncer, Pooler, RotatingPooler
from tests.support.waiting import until
from webhookd.deliveries import subscriptions

BOUNCER = pytest.mark.skipif(not PgBouncer.is_installed(), reason="PgBouncer is not installed here")


@pytest.mark.parametrize("kind", [RotatingPooler, pytest.param(PgBouncer, marks=BOUNCER)])
async def test_everything_works_by_polling(
    flow: Flow, database: Database, endpoint: Endpoint, make_daemon: MakeDaemon, kind: type[Pooler]
) -> None:
    """Deliveries, a retry, a dead letter and the API; each call uses another session."""
    created = await subscriptions.create(flow.daemon, EVENT_TYPE, endpoint.url("/good"))
    await flow.verify(created.subscription_id)
    bad = await subscriptions.create(flow.daemon, "bad.type", endpoint.url("/bad"), max_attempts=2)
    await flow.verify(bad.subscription_id)
    endpoint.answer(500, path="/bad")
    async with kind(database.dsn("daemon")) as pooler:
        daemon = await make_daemon(database={"dsn": pooler.dsn}).start()
        await publish_many(flow, 300, [EVENT_TYPE])
        await flow.publish("bad.type")
        await until(flow.daemon, COMPLETED, 300)
        await until(flow.daemon, "select exists (select from webhookd.dead_letters)")
        assert len(endpoint.requests_for("/bad")) == 2
        assert set(receipts(endpoint).values()) == {1, 2}

        # In a thread, because the pooler runs in this loop.
        event = {"event_type": EVENT_TYPE, "payload": {"n": 1}}
        status, accepted = await asyncio.to_thread(daemon.post_json, "/v1/events", event)
        assert status == 202, accepted
        await endpoint.received(301, "/good")
        found = await asyncio.to_thread(daemon.get_json, f"/v1/events/{accepted['id']}")
        assert len(found["deliveries"]) == 1

        await daemon.until(lambda: daemon.logged("LISTEN has no effect"), "without LISTEN")
        assert daemon.logged("behind a pooler")
        assert daemon.get("/readyz")[0] == 200
        assert daemon.metric("webhookd_service_restarts_total") == 0
        assert daemon.metric("webhookd_database_up") == 1
        daemon.sigterm()
        assert await daemon.ended() == 0
