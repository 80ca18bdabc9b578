"""The invariants' queries themselves: what they must find, and what only looks like it."""

from datetime import timedelta

from tests.support.flow import Flow
from tests.support.invariants import AUDIT, broken_invariants

RECEIPT = """
    insert into public.receipts (saga_id, response_status, received_at, body, verifies)
    select id, 200, $1, '{}', true from webhookd.webhook_delivery_sagas
"""
LATE = "I6 a request came after its saga was Completed, and neither a lease nor an answer was lost"


async def test_a_slow_transaction_does_not_backdate_a_completion(flow: Flow) -> None:
    """Applied by a transaction that began before the request: the stamp is its beginning, and no proof."""
    await flow.superuser.execute(AUDIT)
    await flow.subscribe()
    await flow.publish()
    await flow.route()
    await flow.start()
    [lease] = await flow.claim()
    reporting = Flow(flow.superuser, flow.superuser)
    async with flow.daemon.transaction():
        began = await flow.daemon.fetchval("select now()")
        received_at = await flow.superuser.fetchval("select clock_timestamp()")
        await flow.superuser.execute(RECEIPT, received_at)
        await reporting.report(lease)
        await flow.apply()
    stamped = await flow.superuser.fetchval("select result_applied_at from webhookd.webhook_delivery_jobs")
    assert stamped == began < received_at
    assert await broken_invariants(flow.superuser) == []


async def test_a_request_after_the_end_is_found(flow: Flow) -> None:
    """A second one for a delivery that has its result, with every lease kept and every answer received."""
    await flow.superuser.execute(AUDIT)
    await flow.subscribe()
    await flow.publish()
    await flow.route()
    await flow.attempt(200)
    finished_at = await flow.superuser.fetchval("select finished_at from webhookd.webhook_delivery_jobs")
    await flow.superuser.execute(RECEIPT, finished_at - timedelta(seconds=1))
    assert await broken_invariants(flow.superuser) == []
    await flow.superuser.execute(RECEIPT, finished_at + timedelta(seconds=1))
    assert LATE in await broken_invariants(flow.superuser)
