"""Lists of subscriptions: search and tenant, the rows they show and the blocks they read."""

from typing import TYPE_CHECKING, Any

import pytest

from tests.support.flow import ADDRESS, Flow
from tests.support.history import watch
from webhookd.db.paging import Page
from webhookd.deliveries import reads, subscriptions, tenants

if TYPE_CHECKING:
    from tests.support.database import Connection

PAGE = Page(100)
SUBSCRIPTIONS = 20_000
# A list by tenant reads the rows of its page, each with its endpoint's health, and a descent of the index.
BLOCKS_OF_PAGE = 40


async def create(flow: Flow, url: str, description: str | None = None, **fields: Any) -> int:
    """Create a verified subscription."""
    created = await subscriptions.create(flow.daemon, "*", url, description=description, **fields)
    await flow.verify(created.subscription_id)
    return created.subscription_id


async def test_search_finds_a_part_of_url_or_description(flow: Flow) -> None:
    """In any case, literally, in the old and the new address; a deleted one is not found."""
    shop = await create(flow, "https://shop.example/Hooks_1", "The 100% Warehouse")
    moved = await create(flow, "https://moved.example/hooks")
    await subscriptions.update(flow.daemon, moved, {"callback_url": "https://new.example/here"})
    deleted = await create(flow, "https://deleted.example/hooks")
    await subscriptions.delete(flow.daemon, deleted)
    plain = await create(flow, "https://plain.example/hooksX1")

    async def found(text: str) -> list[int]:
        return [row["id"] for row in await reads.subscriptions(flow.daemon, PAGE, search=text)]

    assert await found("HOOKS") == [plain, moved, shop]
    assert await found("hooks_1") == [shop], "an underscore is no wildcard"
    assert await found("100% ware") == [shop]
    assert await found("%") == [shop], "a percent sign is no wildcard"
    assert await found("new.example") == [moved]
    assert await found("moved.example") == [moved]
    assert await found("deleted") == []
    assert await found("example/hooks the") == []


async def test_hold_reason_is_shown(flow: Flow) -> None:
    """The first reason of several, and none for a subscription that gets its deliveries."""
    subscription_id = await create(flow, ADDRESS, tenant="acme")

    async def shown() -> tuple[str | None, bool]:
        [row] = await reads.subscriptions(flow.daemon, PAGE)
        assert row == await reads.subscription(flow.daemon, subscription_id)
        return row["held_because"], row["tenant_active"]

    assert await shown() == (None, True)
    await tenants.put(flow.daemon, "acme", {"active": False})
    assert await shown() == ("tenant_inactive", False)
    for change, reason in (({"paused": True}, "paused"), ({"active": False}, "disabled")):
        await subscriptions.update(flow.daemon, subscription_id, change)
        assert await shown() == (reason, False)
    await flow.unverify(subscription_id)
    assert await shown() == ("disabled", False)
    await subscriptions.update(flow.daemon, subscription_id, {"active": True})
    assert await shown() == ("unverified", False)


@pytest.mark.parametrize("is_known", [True, False], ids=["known", "unknown"])
async def test_list_of_a_tenant_reads_few_blocks_beside_many(flow: Flow, *, is_known: bool) -> None:
    """Ten subscriptions of 2,000 tenants each, with or without statistics, also a hundred by their ids."""
    async with flow.superuser.transaction():
        await flow.superuser.execute("set local session_replication_role = replica")
        await flow.superuser.execute(
            """
            insert into webhookd.subscriptions (event_type, event_types, callback_url, verified, tenant)
            select '*', '{*}', 'https://receiver.example/' || i, true, 't' || i % 2000
            from generate_series(1, $1::integer) i
            """,
            SUBSCRIPTIONS,
        )
    if is_known:
        await flow.superuser.execute("analyze webhookd.subscriptions")
    # A session that has used the statement often may plan it without knowing the tenant.
    await flow.daemon.execute("set plan_cache_mode = force_generic_plan")

    def list_tenant(connection: "Connection") -> Any:
        return reads.subscriptions(connection, PAGE, tenant="t7")

    def search(connection: "Connection") -> Any:
        return reads.subscriptions(connection, PAGE, search="receiver.example/777")

    rows, touched = await watch(flow.daemon, list_tenant)
    assert [row["id"] for row in rows] == sorted((row["id"] for row in rows), reverse=True)
    assert (len(rows), {row["tenant"] for row in rows}) == (10, {"t7"})
    assert touched.blocks["subscriptions"] <= BLOCKS_OF_PAGE
    ids = list(range(1, SUBSCRIPTIONS, SUBSCRIPTIONS // 100))[:100]
    rows, touched = await watch(
        flow.daemon, lambda connection: reads.subscriptions(connection, PAGE, ids=ids)
    )
    assert [row["id"] for row in rows] == ids[::-1][: PAGE.limit]
    assert touched.blocks["subscriptions"] <= 4 * len(ids) + BLOCKS_OF_PAGE, "an index and a row for each"
    await flow.daemon.execute("reset plan_cache_mode")
    rows, touched = await watch(flow.daemon, search)
    assert len(rows) == 11
    assert touched.blocks["subscriptions"] <= SUBSCRIPTIONS + BLOCKS_OF_PAGE, "each row once"
