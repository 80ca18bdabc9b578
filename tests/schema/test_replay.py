"""A replay of everything: which deliveries it sends again, and what repeating it does."""

from datetime import timedelta

import pytest

from tests.support.flow import Flow
from tests.support.guards import Weakened
from webhookd.deliveries import router

EVENTS = 3
GUARD = Weakened("resend_deliveries", "and s.created_at < started_at")


async def repeated(flow: Flow) -> list[int]:
    """Replay all deliveries, let them end, and repeat the replay; return how many each call created."""
    subscription_id = await flow.subscribe()
    for _ in range(EVENTS):
        await flow.publish()
    await flow.route()
    await flow.attempt(200)
    now = await flow.daemon.fetchval("select clock_timestamp()")
    what = router.Replay(
        subscription_id, now - timedelta(days=1), now, None, include_all=True, started_at=now
    )
    created = []
    for _ in range(2):
        created.append((await router.replay(flow.daemon, what, 0, 10, dry_run=False)).created)
        await flow.attempt(200)
    again = what._replace(started_at=await flow.daemon.fetchval("select clock_timestamp()"))
    created.append((await router.replay(flow.daemon, again, 0, 10, dry_run=False)).created)
    return created


async def test_repeated_replay_sends_each_delivery_once(flow: Flow) -> None:
    """Also if the deliveries of the first call have ended by then. A new replay sends them again."""
    assert await repeated(flow) == [EVENTS, 0, EVENTS]


@pytest.mark.nightly
async def test_guard_is_needed(flow: Flow) -> None:
    """Without it, the repeated call sends them again."""
    await GUARD.take_away(flow.superuser)
    assert await repeated(flow) == [EVENTS, EVENTS, EVENTS]
