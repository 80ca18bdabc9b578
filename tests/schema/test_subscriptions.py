"""Subscriptions at the database: creation, verification, change log, secrets and held work.

All calls use the daemon's login; the superuser only reads what the daemon may not see.
"""

import asyncio
import json
import re
from typing import Any

import asyncpg
import pytest

from tests.support.database import Database
from tests.support.flow import ADDRESS, EVENT_TYPE, POLICY, Flow
from tests.support.waiting import finished, until_blocked, until_finished
from webhookd.core.errors import Refusal
from webhookd.core.states import SagaStatus
from webhookd.db.connection import Connection
from webhookd.deliveries import attempts, dead_letters, subscriptions

OTHER_ADDRESS = "https://elsewhere.example/hook?tenant=7"
HOUR_SECONDS = 3600


def refused(sqlstate: str) -> "pytest.RaisesExc[asyncpg.PostgresError]":
    """Expect an error with this SQLSTATE."""
    return pytest.raises(asyncpg.PostgresError, check=lambda error: error.sqlstate == sqlstate)


async def subscription(flow: Flow, subscription_id: int) -> dict[str, Any]:
    """Return the row of a subscription."""
    row = await flow.daemon.fetchrow("select * from webhookd.subscriptions where id = $1", subscription_id)
    assert row is not None
    return dict(row)


async def is_verified(flow: Flow, subscription_id: int) -> bool:
    """Tell whether the endpoint has answered a challenge."""
    return bool((await subscription(flow, subscription_id))["verified"])


async def change(flow: Flow, subscription_id: int, **changes: Any) -> None:
    """Change some fields."""
    await subscriptions.update(flow.daemon, subscription_id, changes)


async def change_log(flow: Flow, subscription_id: int) -> list[tuple[Any, ...]]:
    """Return the change log, oldest first."""
    rows = await flow.daemon.fetch(
        "select callback_url, active, verified from webhookd.subscription_changes"
        " where subscription_id = $1 order by id",
        subscription_id,
    )
    return [tuple(row) for row in rows]


async def delivery(flow: Flow) -> attempts.Lease:
    """Return a lease of the only waiting attempt; the attempt waits again afterwards."""
    [lease] = await flow.claim()
    assert await attempts.release(flow.daemon, [lease]) == [lease.job_id]
    return lease


async def with_attempt(flow: Flow, subscription_id: int) -> int:
    """Create a waiting attempt for a verified subscription, which must be the only one."""
    await flow.publish()
    await flow.route()
    [started] = await flow.start([subscription_id])
    assert started.started == 1
    return subscription_id


async def let_secrets_age(flow: Flow, subscription_id: int, seconds: float) -> None:
    """Move the end of earlier secrets into the past by some seconds."""
    await flow.superuser.execute(
        "update webhookd.subscription_secrets set previous_valid_until = array("
        " select u - make_interval(secs => $2) from unnest(previous_valid_until) with ordinality as p (u, n)"
        " order by n) where subscription_id = $1",
        subscription_id,
        seconds,
    )


@pytest.fixture
async def other(database: Database) -> Connection:
    """Connect as a second daemon."""
    return await database.connect("daemon")


# Creation


async def test_new_subscription_is_active_and_unverified(flow: Flow) -> None:
    """It has the given fields and its own secret, and gets no event before it is verified."""
    created = await subscriptions.create(
        flow.daemon,
        EVENT_TYPE,
        ADDRESS,
        max_attempts=3,
        base_delay_seconds=0.5,
        headers={"x-tenant": "7"},
        description="orders of tenant 7",
    )
    row = await subscription(flow, created.subscription_id)
    assert row.pop("created_at") == row.pop("updated_at")
    assert row == {
        "id": created.subscription_id,
        "event_type": EVENT_TYPE,
        "callback_url": ADDRESS,
        "active": True,
        "verified": False,
        "max_attempts": 3,
        "base_delay_seconds": 0.5,
        "description": "orders of tenant 7",
        "tenant": "",
        "event_types": [EVENT_TYPE],
        "filter": None,
        "paused": False,
        "tenant_active": True,
        "deleted_at": None,
        "routable": False,
        "deliverable": False,
        "pending_callback_url": None,
        "verified_by": None,
        "format": "raw",
        "max_per_second": None,
    }
    assert re.fullmatch(r"whsec_[A-Za-z0-9+/]{43}=", created.signing_secret)
    await flow.publish()
    routed = await flow.route()
    assert (routed.events, routed.sagas) == (1, 0)


async def test_secrets_differ(flow: Flow) -> None:
    """Every subscription gets a different secret."""
    created = [await subscriptions.create(flow.daemon, EVENT_TYPE, ADDRESS) for _ in range(5)]
    assert len({each.signing_secret for each in created}) == 5


async def test_secret_can_be_imported(flow: Flow) -> None:
    """A subscription from another system keeps its secret and signs with it."""
    brought = "whsec_" + "A" * 32
    row = await flow.daemon.fetchrow(
        "select * from webhookd.create_subscription($1, $2, secret => $3)", EVENT_TYPE, ADDRESS, brought
    )
    assert row is not None
    assert row["signing_secret"] == brought
    assert (await subscriptions.begin_verification(flow.daemon, row["subscription_id"])).secrets == [brought]


# Verification


async def test_answered_challenge_verifies(flow: Flow) -> None:
    """The signed challenge goes to the current address with the headers; its answer verifies once."""
    created = await subscriptions.create(flow.daemon, EVENT_TYPE, ADDRESS, headers={"x": "y"})
    verification = await subscriptions.begin_verification(flow.daemon, created.subscription_id)
    assert (verification.callback_url, verification.secrets) == (ADDRESS, [created.signing_secret])
    assert json.loads(verification.headers) == {"x": "y"}
    assert len(verification.challenge) >= 32
    assert not await is_verified(flow, created.subscription_id)
    await subscriptions.complete_verification(flow.daemon, created.subscription_id, verification.challenge)
    assert await is_verified(flow, created.subscription_id)
    with refused("WH413"):
        await subscriptions.complete_verification(
            flow.daemon, created.subscription_id, verification.challenge
        )


async def test_wrong_challenge_is_refused(flow: Flow) -> None:
    """A wrong challenge, or another subscription's, is refused, and the right one stays valid."""
    first, second = await flow.subscribe(verified=False), await flow.subscribe(verified=False)
    verification = await subscriptions.begin_verification(flow.daemon, first)
    others = await subscriptions.begin_verification(flow.daemon, second)
    for wrong in (others.challenge, verification.challenge.upper(), "", verification.challenge[:-1]):
        with refused("WH413"):
            await subscriptions.complete_verification(flow.daemon, first, wrong)
        assert not await is_verified(flow, first)
    await subscriptions.complete_verification(flow.daemon, first, verification.challenge)
    assert await is_verified(flow, first)


async def test_new_challenge_invalidates_the_previous_one(flow: Flow) -> None:
    """Only the latest challenge counts."""
    subscription_id = await flow.subscribe(verified=False)
    first = await subscriptions.begin_verification(flow.daemon, subscription_id)
    second = await subscriptions.begin_verification(flow.daemon, subscription_id)
    assert first.challenge != second.challenge
    with refused("WH413"):
        await subscriptions.complete_verification(flow.daemon, subscription_id, first.challenge)
    assert not await is_verified(flow, subscription_id)
    await subscriptions.complete_verification(flow.daemon, subscription_id, second.challenge)
    assert await is_verified(flow, subscription_id)


async def test_new_challenge_keeps_the_verification(flow: Flow) -> None:
    """A new challenge, answered or not, does not remove an existing verification."""
    subscription_id = await flow.subscribe()
    await subscriptions.begin_verification(flow.daemon, subscription_id)
    assert await is_verified(flow, subscription_id)


async def addresses(flow: Flow, subscription_id: int) -> tuple[str, str | None, bool]:
    """Return the address, the pending address, and whether the first is verified."""
    row = await subscription(flow, subscription_id)
    return row["callback_url"], row["pending_callback_url"], row["verified"]


async def test_new_address_waits_until_it_is_verified(flow: Flow) -> None:
    """Until then the old one stays in use; the open challenge of the old one becomes invalid."""
    subscription_id = await flow.subscribe()
    verification = await subscriptions.begin_verification(flow.daemon, subscription_id)
    await change(flow, subscription_id, callback_url=OTHER_ADDRESS)
    assert await addresses(flow, subscription_id) == (ADDRESS, OTHER_ADDRESS, True)
    with refused("WH413"):
        await subscriptions.complete_verification(flow.daemon, subscription_id, verification.challenge)
    verification = await subscriptions.begin_verification(flow.daemon, subscription_id)
    assert verification.callback_url == OTHER_ADDRESS
    await subscriptions.complete_verification(flow.daemon, subscription_id, verification.challenge)
    assert await addresses(flow, subscription_id) == (OTHER_ADDRESS, None, True)


async def test_new_address_of_an_unverified_subscription_replaces_the_old(flow: Flow) -> None:
    """Nothing is sent to either, so there is nothing to keep."""
    subscription_id = await flow.subscribe(verified=False)
    await change(flow, subscription_id, callback_url=OTHER_ADDRESS)
    assert await addresses(flow, subscription_id) == (OTHER_ADDRESS, None, False)


async def test_old_address_ends_a_move(flow: Flow) -> None:
    """It is still verified, and nothing is pending."""
    subscription_id = await flow.subscribe()
    await change(flow, subscription_id, callback_url=OTHER_ADDRESS)
    await change(flow, subscription_id, callback_url=ADDRESS)
    assert await addresses(flow, subscription_id) == (ADDRESS, None, True)


async def test_address_that_sql_changed_is_not_verified(flow: Flow) -> None:
    """A trigger sets `verified` to false for every role that changes the row."""
    subscription_id = await flow.subscribe()
    await flow.superuser.execute("update webhookd.subscriptions set callback_url = $1", OTHER_ADDRESS)
    assert await addresses(flow, subscription_id) == (OTHER_ADDRESS, None, False)


async def test_old_address_does_not_restore_the_old_challenge(flow: Flow) -> None:
    """Changing the address and changing it back keeps the challenge invalid."""
    subscription_id = await flow.subscribe()
    verification = await subscriptions.begin_verification(flow.daemon, subscription_id)
    await change(flow, subscription_id, callback_url=OTHER_ADDRESS)
    await change(flow, subscription_id, callback_url=ADDRESS)
    with refused("WH413"):
        await subscriptions.complete_verification(flow.daemon, subscription_id, verification.challenge)


async def test_same_address_changes_nothing(flow: Flow) -> None:
    """Setting the current address keeps the verification and the challenge."""
    subscription_id = await flow.subscribe()
    verification = await subscriptions.begin_verification(flow.daemon, subscription_id)
    await change(flow, subscription_id, callback_url=ADDRESS)
    assert await is_verified(flow, subscription_id)
    await subscriptions.complete_verification(flow.daemon, subscription_id, verification.challenge)


async def test_other_changes_keep_the_challenge(flow: Flow) -> None:
    """Pausing, headers, policy and secrets do not disturb an open verification."""
    subscription_id = await flow.subscribe(verified=False)
    verification = await subscriptions.begin_verification(flow.daemon, subscription_id)
    await change(flow, subscription_id, active=False, headers={"x": "y"}, max_attempts=2)
    await subscriptions.rotate_secret(flow.daemon, subscription_id, 0)
    await subscriptions.complete_verification(flow.daemon, subscription_id, verification.challenge)
    assert await is_verified(flow, subscription_id)


@pytest.mark.parametrize("committed", [True, False], ids=["committed", "rolled back"])
async def test_verification_waits_for_an_open_address_change(
    flow: Flow, other: Connection, *, committed: bool
) -> None:
    """After a commit of the change the verification is refused; after a rollback it succeeds."""
    subscription_id = await flow.subscribe(verified=False)
    verification = await subscriptions.begin_verification(flow.daemon, subscription_id)
    transaction = flow.daemon.transaction()
    await transaction.start()
    await change(flow, subscription_id, callback_url=OTHER_ADDRESS)
    completing = asyncio.create_task(
        subscriptions.complete_verification(other, subscription_id, verification.challenge)
    )
    await until_blocked(flow.superuser, other.get_server_pid(), flow.daemon.get_server_pid())
    assert not await finished(completing)
    await (transaction.commit() if committed else transaction.rollback())
    await until_finished(completing)
    if committed:
        with refused("WH413"):
            await completing
    else:
        await completing
    assert await is_verified(flow, subscription_id) is not committed


async def test_address_change_waits_for_an_open_verification(flow: Flow, other: Connection) -> None:
    """A change that waited for the verification still leaves the new address unverified."""
    subscription_id = await flow.subscribe(verified=False)
    verification = await subscriptions.begin_verification(flow.daemon, subscription_id)
    async with flow.daemon.transaction():
        await subscriptions.complete_verification(flow.daemon, subscription_id, verification.challenge)
        changing = asyncio.create_task(
            subscriptions.update(other, subscription_id, {"callback_url": OTHER_ADDRESS})
        )
        await until_blocked(flow.superuser, other.get_server_pid(), flow.daemon.get_server_pid())
    await until_finished(changing)
    await changing
    row = await subscription(flow, subscription_id)
    assert (row["callback_url"], row["pending_callback_url"], row["verified"]) == (
        ADDRESS,
        OTHER_ADDRESS,
        True,
    )


async def test_verification_waits_for_a_new_challenge(flow: Flow, other: Connection) -> None:
    """The verification waits for the open new challenge, and is then refused."""
    subscription_id = await flow.subscribe(verified=False)
    first = await subscriptions.begin_verification(flow.daemon, subscription_id)
    async with flow.daemon.transaction():
        await subscriptions.begin_verification(flow.daemon, subscription_id)
        completing = asyncio.create_task(
            subscriptions.complete_verification(other, subscription_id, first.challenge)
        )
        await until_blocked(flow.superuser, other.get_server_pid(), flow.daemon.get_server_pid())
    await until_finished(completing)
    with refused("WH413"):
        await completing
    assert not await is_verified(flow, subscription_id)


# Changes and their log


async def test_only_named_fields_change(flow: Flow) -> None:
    """Each field changes alone; an unknown field is refused."""
    created = await subscriptions.create(flow.daemon, EVENT_TYPE, ADDRESS, description="before")
    expected = await subscription(flow, created.subscription_id)
    for field, value in {
        "active": False,
        "paused": True,
        "max_attempts": 7,
        "base_delay_seconds": 1.5,
        "description": "after",
        "callback_url": OTHER_ADDRESS,
        "format": "standard",
        "max_per_second": 2.5,
    }.items():
        await change(flow, created.subscription_id, **{field: value})
        now = await subscription(flow, created.subscription_id)
        expected |= {field: value, "updated_at": now["updated_at"]}
        assert now == expected
    with refused(Refusal.INVALID_ARGUMENT.value):
        await change(flow, created.subscription_id, description="last", verified=True)
    assert await subscription(flow, created.subscription_id) == expected


async def test_overrides_are_set_and_removed(flow: Flow) -> None:
    """An override replaces the configured value until null removes it."""
    subscription_id = await flow.subscribe()
    await change(flow, subscription_id, max_attempts=1)
    await flow.publish()
    await flow.route()
    [moved] = await flow.attempt(500, POLICY._replace(max_attempts=5))
    assert (moved.status, moved.attempt_count) == (SagaStatus.DEAD_LETTERED, 1)
    await change(flow, subscription_id, max_attempts=None, base_delay_seconds=1000.0)
    await flow.publish()
    await flow.route()
    [moved] = await flow.attempt(500, POLICY._replace(base_delay_seconds=0))
    assert moved.status is SagaStatus.PENDING_RETRY
    waits = await flow.superuser.fetchval("select $1::timestamptz > now()", moved.next_attempt_at)
    assert waits, "the subscription's own delay decides"
    await change(flow, subscription_id, base_delay_seconds=None)
    row = await subscription(flow, subscription_id)
    assert (row["max_attempts"], row["base_delay_seconds"]) == (None, None)
    await flow.publish()
    await flow.route()
    [moved] = await flow.attempt(500, POLICY._replace(base_delay_seconds=0))
    waits = await flow.superuser.fetchval("select $1::timestamptz > now()", moved.next_attempt_at)
    assert not waits, "the configuration's delay decides again"


async def test_headers_are_replaced_completely(flow: Flow) -> None:
    """New headers replace all old ones, from the next claim on."""
    created = await subscriptions.create(flow.daemon, EVENT_TYPE, ADDRESS, headers={"a": "1", "b": "2"})
    await flow.verify(created.subscription_id)
    await with_attempt(flow, created.subscription_id)
    assert json.loads((await delivery(flow)).headers) == {"a": "1", "b": "2"}
    await change(flow, created.subscription_id, headers={"b": "3"})
    assert json.loads((await delivery(flow)).headers) == {"b": "3"}
    await change(flow, created.subscription_id, description="other")
    assert json.loads((await delivery(flow)).headers) == {"b": "3"}
    await change(flow, created.subscription_id, headers={})
    assert json.loads((await delivery(flow)).headers) == {}


async def test_change_log_has_each_state_once(flow: Flow) -> None:
    """Creation and each change of address, active or verified is a row; other changes are not."""
    subscription_id = await flow.subscribe(verified=False)
    await flow.verify(subscription_id)
    await change(flow, subscription_id, active=False)
    await change(flow, subscription_id, active=True)
    await change(flow, subscription_id, callback_url=OTHER_ADDRESS)
    await flow.verify(subscription_id)
    expected = [
        (ADDRESS, True, False),
        (ADDRESS, True, True),
        (ADDRESS, False, True),
        (ADDRESS, True, True),
        (OTHER_ADDRESS, True, True),
    ]
    assert await change_log(flow, subscription_id) == expected
    await change(flow, subscription_id, active=True, callback_url=OTHER_ADDRESS)
    await change(flow, subscription_id, description="x", headers={"x": "y"}, max_attempts=3)
    await subscriptions.rotate_secret(flow.daemon, subscription_id, 0)
    await subscriptions.begin_verification(flow.daemon, subscription_id)
    assert await change_log(flow, subscription_id) == expected


async def test_change_log_has_no_refused_changes(flow: Flow) -> None:
    """A refused or rolled-back change leaves no row."""
    subscription_id = await flow.subscribe(verified=False)
    before = await change_log(flow, subscription_id)
    with refused("WH400"):
        await change(flow, subscription_id, active=False, callback_url="http://insecure.example/")
    transaction = flow.daemon.transaction()
    await transaction.start()
    await change(flow, subscription_id, active=False)
    await transaction.rollback()
    assert await change_log(flow, subscription_id) == before
    assert (await subscription(flow, subscription_id))["active"]


# Secrets


async def rotate(flow: Flow, subscription_id: int, overlap_seconds: float = HOUR_SECONDS) -> str:
    """Rotate and return the new secret."""
    rotated = await subscriptions.rotate_secret(flow.daemon, subscription_id, overlap_seconds)
    return rotated.signing_secret


async def subscribed_with_attempt(flow: Flow) -> subscriptions.Created:
    """Create a verified subscription with a waiting attempt, to see its signing secrets."""
    created = await subscriptions.create(flow.daemon, EVENT_TYPE, ADDRESS)
    await flow.verify(created.subscription_id)
    await with_attempt(flow, created.subscription_id)
    return created


async def test_both_secrets_sign_during_the_overlap(flow: Flow) -> None:
    """The new secret signs first, at once; the old one signs too until its overlap ends."""
    created = await subscribed_with_attempt(flow)
    assert (await delivery(flow)).secrets == [created.signing_secret]
    async with flow.daemon.transaction():
        rotated = await subscriptions.rotate_secret(flow.daemon, created.subscription_id, 90.5)
        ends = await flow.daemon.fetchval("select now() + interval '90.5 s'")
    assert rotated.previous_valid_until == ends
    both = [rotated.signing_secret, created.signing_secret]
    assert (await delivery(flow)).secrets == both
    assert (await subscriptions.begin_verification(flow.daemon, created.subscription_id)).secrets == both
    await let_secrets_age(flow, created.subscription_id, 90.5)
    assert (await delivery(flow)).secrets == [rotated.signing_secret]


async def test_each_earlier_secret_ends_at_its_own_time(flow: Flow) -> None:
    """A later rotation neither shortens nor extends the overlap of an earlier one."""
    created = await subscribed_with_attempt(flow)
    second = await rotate(flow, created.subscription_id, HOUR_SECONDS)
    third = await rotate(flow, created.subscription_id, 3 * HOUR_SECONDS)
    assert (await delivery(flow)).secrets == [third, second, created.signing_secret]
    await let_secrets_age(flow, created.subscription_id, 2 * HOUR_SECONDS)
    assert (await delivery(flow)).secrets == [third, second]
    await let_secrets_age(flow, created.subscription_id, 2 * HOUR_SECONDS)
    assert (await delivery(flow)).secrets == [third]


async def test_secrets_are_returned_newest_first(flow: Flow) -> None:
    """The order is that of the rotations, even if a newer secret ends earlier."""
    created = await subscribed_with_attempt(flow)
    second = await rotate(flow, created.subscription_id, 3 * HOUR_SECONDS)
    third = await rotate(flow, created.subscription_id, HOUR_SECONDS)
    assert (await delivery(flow)).secrets == [third, second, created.signing_secret]


async def test_at_most_four_secrets_sign(flow: Flow) -> None:
    """After many rotations in one overlap the newest four secrets sign."""
    created = await subscribed_with_attempt(flow)
    rotated = [await rotate(flow, created.subscription_id, HOUR_SECONDS + n) for n in range(6)]
    assert (await delivery(flow)).secrets == rotated[:1:-1]


async def test_no_overlap_revokes_at_once(flow: Flow) -> None:
    """An overlap of 0 removes every earlier secret, including those of earlier overlaps."""
    created = await subscribed_with_attempt(flow)
    await rotate(flow, created.subscription_id)
    last = await rotate(flow, created.subscription_id, 0)
    assert (await delivery(flow)).secrets == [last]
    kept = await flow.superuser.fetchval("select previous_secrets from webhookd.subscription_secrets")
    assert kept == [], "a revoked secret is not kept"


async def test_rotation_can_import_a_secret(flow: Flow) -> None:
    """A given secret signs next, together with the previous one."""
    created = await subscribed_with_attempt(flow)
    brought = "whsec_" + "B" * 32
    answer = await flow.daemon.fetchval(
        "select signing_secret from webhookd.rotate_secret($1, 60, $2)", created.subscription_id, brought
    )
    assert answer == brought
    assert (await delivery(flow)).secrets == [brought, created.signing_secret]


async def test_concurrent_rotations_keep_both_secrets(flow: Flow, other: Connection) -> None:
    """The second rotation waits for the first and keeps its secret as an earlier one."""
    created = await subscribed_with_attempt(flow)
    async with flow.daemon.transaction():
        first = await rotate(flow, created.subscription_id)
        rotating = asyncio.create_task(
            subscriptions.rotate_secret(other, created.subscription_id, 2 * HOUR_SECONDS)
        )
        await until_blocked(flow.superuser, other.get_server_pid(), flow.daemon.get_server_pid())
    await until_finished(rotating)
    second = await rotating
    assert (await delivery(flow)).secrets == [second.signing_secret, first, created.signing_secret]


# Held subscriptions, see D20 and D22


async def hold(flow: Flow, subscription_id: int, how: str) -> None:
    """Make a subscription inactive, paused or unverified."""
    if how == "inactive":
        await change(flow, subscription_id, active=False)
    elif how == "paused":
        await change(flow, subscription_id, paused=True)
    else:
        await flow.unverify(subscription_id)


async def release_hold(flow: Flow, subscription_id: int, how: str) -> None:
    """Make it active and verified again."""
    if how == "inactive":
        await change(flow, subscription_id, active=True)
    elif how == "paused":
        await change(flow, subscription_id, paused=False)
    else:
        await flow.verify(subscription_id)


held = pytest.mark.parametrize("how", ["inactive", "paused", "unverified"])
unroutable = pytest.mark.parametrize("how", ["inactive", "unverified"])


@held
async def test_held_work_waits_and_continues(flow: Flow, how: str) -> None:
    """During a hold no attempt is created or claimed; afterwards both continue, and no attempt is lost."""
    subscription_id = await with_attempt(flow, await flow.subscribe())
    await flow.publish()
    await flow.route()
    await hold(flow, subscription_id, how)
    sagas_before = await flow.daemon.fetch("select * from webhookd.webhook_delivery_sagas order by id")
    jobs_before = await flow.daemon.fetch("select * from webhookd.webhook_delivery_jobs order by id")
    assert await flow.start() == []
    [nothing] = await flow.start([subscription_id])
    assert (nothing.started, nothing.active, nothing.drained) == (0, 1, True)
    assert await flow.claim() == []
    assert (
        await flow.daemon.fetch("select * from webhookd.webhook_delivery_sagas order by id") == sagas_before
    )
    assert await flow.daemon.fetch("select * from webhookd.webhook_delivery_jobs order by id") == jobs_before

    await release_hold(flow, subscription_id, how)
    [started] = await flow.start()
    assert (started.subscription_id, started.started, started.active) == (subscription_id, 1, 2)
    leases = await flow.claim()
    assert [lease.attempt for lease in leases] == [1, 1]
    for lease in leases:
        await flow.report(lease)
    moved = await flow.apply()
    assert [(each.status, each.attempt_count) for each in moved] == [(SagaStatus.COMPLETED, 1)] * 2


@held
async def test_held_retry_keeps_its_count(flow: Flow, how: str) -> None:
    """A saga between attempts keeps its count and its due time during a hold."""
    saga_id = await flow.saga_in(SagaStatus.PENDING_RETRY)
    subscription_id = await flow.daemon.fetchval("select id from webhookd.subscriptions")
    await hold(flow, subscription_id, how)
    [nothing] = await flow.start([subscription_id])
    assert nothing.started == 0
    assert await flow.saga_status(saga_id) is SagaStatus.PENDING_RETRY
    await release_hold(flow, subscription_id, how)
    [moved] = await flow.attempt(200)
    assert (moved.saga_id, moved.status, moved.attempt_count) == (saga_id, SagaStatus.COMPLETED, 2)


@held
async def test_hold_does_not_block_other_subscriptions(flow: Flow, how: str) -> None:
    """Claims skip older held attempts, also one at a time."""
    held_id = await flow.subscribe("held.type")
    for _ in range(5):
        await flow.publish("held.type")
    await flow.route()
    await flow.start()
    other_id = await with_attempt(flow, await flow.subscribe())
    await hold(flow, held_id, how)
    [lease] = await flow.claim(wanted=1)
    assert lease.subscription_id == other_id


@unroutable
async def test_held_subscription_gets_no_new_saga(flow: Flow, how: str) -> None:
    """An event published during a hold is never delivered to it."""
    subscription_id = await flow.subscribe()
    await hold(flow, subscription_id, how)
    await flow.publish()
    assert (await flow.route()).sagas == 0
    await release_hold(flow, subscription_id, how)
    assert (await flow.route()).sagas == 0
    await flow.publish()
    assert (await flow.route()).sagas == 1


@held
async def test_leased_attempt_finishes_during_a_hold(flow: Flow, how: str) -> None:
    """A lease from before the hold can be loaded, reported and applied."""
    subscription_id = await with_attempt(flow, await flow.subscribe())
    [lease] = await flow.claim()
    await hold(flow, subscription_id, how)
    assert len(await attempts.load(flow.daemon, [lease])) == 1
    await flow.report(lease)
    [moved] = await flow.apply()
    assert moved.status is SagaStatus.COMPLETED


@unroutable
async def test_requeue_is_refused_while_held(flow: Flow, how: str) -> None:
    """A dead letter of a held subscription is not requeued, alone or in bulk; after the hold it is."""
    await flow.saga_in(SagaStatus.DEAD_LETTERED)
    letter_id, subscription_id = tuple(
        await flow.daemon.fetchrow("select id, subscription_id from webhookd.dead_letters") or ()
    )
    await hold(flow, subscription_id, how)
    with refused("WH412") as caught:
        await flow.requeue(letter_id)
    assert caught.value.message == f"subscription {subscription_id} is not active and verified"
    everything = dead_letters.Filter()
    for dry_run in (True, False):
        bulk = await dead_letters.requeue_many(flow.daemon, everything, 0, 100, dry_run=dry_run)
        assert (bulk.matched, bulk.requeued, bulk.skipped) == (1, 0, 1)
    assert await flow.daemon.fetchval("select count(*) from webhookd.webhook_delivery_sagas") == 1
    await release_hold(flow, subscription_id, how)
    assert (await flow.requeue(letter_id)).created


async def test_repeated_requeue_returns_its_saga_during_a_hold(flow: Flow) -> None:
    """A second requeue returns the saga of the first, for any state of the subscription."""
    await flow.saga_in(SagaStatus.DEAD_LETTERED)
    letter_id = await flow.daemon.fetchval("select id from webhookd.dead_letters")
    requeued = await flow.requeue(letter_id)
    await change(flow, requeued.subscription_id, active=False)
    assert await flow.requeue(letter_id) == requeued._replace(created=False)


# The address (D21)


async def test_claim_reads_the_current_address(flow: Flow) -> None:
    """A saga and an attempt created for the old address go to the new one after its verification."""
    subscription_id = await with_attempt(flow, await flow.subscribe())
    await flow.publish()
    await flow.route()
    await change(flow, subscription_id, callback_url=OTHER_ADDRESS)
    assert (await delivery(flow)).callback_url == ADDRESS
    await flow.verify(subscription_id)
    await flow.start()
    assert [lease.callback_url for lease in await flow.claim()] == [OTHER_ADDRESS] * 2


async def test_retry_goes_to_the_new_address(flow: Flow) -> None:
    """The next attempt of a delivery that failed at the old address goes to the new one."""
    subscription_id = await with_attempt(flow, await flow.subscribe())
    [lease] = await flow.claim()
    assert lease.callback_url == ADDRESS
    await flow.report(lease, 500)
    await flow.apply()
    await change(flow, subscription_id, callback_url=OTHER_ADDRESS)
    await flow.verify(subscription_id)
    await flow.start()
    [lease] = await flow.claim()
    assert (lease.callback_url, lease.attempt) == (OTHER_ADDRESS, 2)


async def test_open_address_change_does_not_block_claims(flow: Flow, other: Connection) -> None:
    """Until the change commits, claims use the old address without waiting."""
    subscription_id = await with_attempt(flow, await flow.subscribe())
    async with other.transaction():
        await subscriptions.update(other, subscription_id, {"callback_url": OTHER_ADDRESS})
        claiming = asyncio.create_task(flow.claim())
        await until_finished(claiming)
        [lease] = await claiming
    assert lease.callback_url == ADDRESS
