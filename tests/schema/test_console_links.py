"""The console's signing key and its one-time links in the database: each works once, and not for long."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import pytest

from tests.support.catalog import refusal
from tests.support.flow import Flow
from tests.support.guards import Weakened
from tests.support.history import watch
from tests.support.pages import ROOT, blocks
from tests.support.races import Contest
from tests.support.sweeps import containing, erase
from tests.support.waiting import until_blocked
from webhookd.console import links
from webhookd.core.errors import Refusal, Refused
from webhookd.db.connection import translated
from webhookd.deliveries import tenants
from webhookd.retention import queries

if TYPE_CHECKING:
    from tests.support.database import Database

Result = TypeVar("Result")

FINGERPRINT = "0a" * 16
# A few levels of each index, for each statement.
MAX_BLOCKS = 60
# A code that no link has.
UNKNOWN = "u" * 43
COUNT = "select count(*) from webhookd.console_links"


async def portal_link(flow: Flow, tenant: str = "acme", seconds: int = 600) -> links.NewLink:
    """Create a link to the portal of a tenant."""
    return await links.create_link(
        flow.daemon,
        "portal",
        token_fingerprint=FINGERPRINT,
        actor="shop",
        expires_in_seconds=seconds,
        tenant=tenant,
        capabilities=["view", "manage"],
    )


async def login_link(flow: Flow, actor: str = "shop", tenant: str = "") -> links.NewLink:
    """Create a link to the console."""
    return await links.create_link(
        flow.daemon,
        "login",
        token_fingerprint=FINGERPRINT,
        actor=actor,
        expires_in_seconds=300,
        session_seconds=28_800,
        tenant=tenant,
    )


async def expire(flow: Flow, *new_links: links.NewLink) -> None:
    """Move the end of links to a second ago."""
    for link in new_links:
        await flow.superuser.execute(
            "update webhookd.console_links set expires_at = now() - interval '1 second'"
            " where code_sha256 = $1",
            hashlib.sha256(link.code.encode()).digest(),
        )


class Race(Contest[Flow]):
    """Two daemons on one database."""


RunRace = Callable[[Race], Awaitable[None]]


@pytest.fixture
async def race(database: "Database") -> Race:
    """Connect both sides, and create a tenant."""
    race = Race(await Flow.open(database), await Flow.open(database))
    await tenants.put(race.first.daemon, "acme", {})
    return race


# The signing key


async def test_key_is_random_and_stays(flow: Flow) -> None:
    """Every call returns the same 32 bytes; a new row would have others."""
    key = await links.console_key(flow.daemon)
    assert len(key) == 32
    assert await links.console_key(flow.daemon) == key
    [default] = await flow.superuser.fetch(
        "select pg_get_expr(adbin, adrelid) as text from pg_attrdef"
        " where adrelid = 'webhookd.console_key'::regclass and pg_get_expr(adbin, adrelid) <> 'true'"
    )
    other = [await flow.superuser.fetchval(f"select {default['text']}") for _ in range(2)]
    assert len({key, *other}) == 3
    assert {len(each) for each in other} == {32}


async def test_key_is_replaced_as_documented(flow: Flow, database: "Database") -> None:
    """The statement of docs/console.md works for the login that migrates, and for no other."""
    [statement] = blocks(ROOT / "docs" / "console.md", "sql")
    before = await links.console_key(flow.daemon)
    assert await refusal(flow.daemon, statement) == "42501"
    migrator = await database.connect("migrator")
    await migrator.execute(statement)
    assert await links.console_key(flow.daemon) not in (before, b"")


async def test_there_is_one_key(flow: Flow) -> None:
    """A second row, and a key of another length, are refused."""
    for statement in (
        "insert into webhookd.console_key default values",
        "insert into webhookd.console_key (only_row) values (false)",
        "update webhookd.console_key set key = '\\x00'",
    ):
        with pytest.raises(Exception, match="violates"):
            await flow.superuser.execute(statement)


# Links


async def test_link_is_redeemed_once(flow: Flow) -> None:
    """With the right kind, and only then; the session ends as it was created."""
    await tenants.put(flow.daemon, "acme", {})
    now = await flow.daemon.fetchval("select now()")
    portal, login = await portal_link(flow), await login_link(flow)
    assert portal.session_expires_at == portal.expires_at
    assert timedelta(0) <= portal.expires_at - now - timedelta(seconds=600) < timedelta(seconds=5)
    assert login.session_expires_at - login.expires_at == timedelta(seconds=28_800 - 300)
    assert await links.redeem_link(flow.daemon, "login", portal.code) is None
    assert await links.redeem_link(flow.daemon, "portal", portal.code) == links.Redeemed(
        FINGERPRINT, "shop", "acme", frozenset({"view", "manage"}), portal.session_expires_at
    )
    assert await links.redeem_link(flow.daemon, "portal", portal.code) is None
    assert await links.redeem_link(flow.daemon, "login", login.code) == links.Redeemed(
        FINGERPRINT, "shop", "", frozenset(), login.session_expires_at
    )
    assert await flow.superuser.fetchval(COUNT) == 0


@pytest.mark.parametrize("code", ["", "x", "\0", "\ud800", "é", "a" * 100_000, "' or true --"])
async def test_unknown_code_redeems_nothing(flow: Flow, code: str) -> None:
    """Whatever a URL may contain."""
    link = await login_link(flow)
    assert await links.redeem_link(flow.daemon, "login", code) is None
    assert await links.redeem_link(flow.daemon, "login", link.code[:-1]) is None
    assert await links.redeem_link(flow.daemon, "login", link.code) is not None


async def test_expired_link_is_not_redeemed(flow: Flow) -> None:
    """It is deleted by the attempt."""
    link = await login_link(flow)
    await expire(flow, link)
    assert await links.redeem_link(flow.daemon, "login", link.code) is None
    assert await flow.superuser.fetchval(COUNT) == 0


async def test_link_expires_at_its_time(flow: Flow) -> None:
    """Not before: a second is enough."""
    link = await login_link(flow)
    await flow.superuser.execute(
        "update webhookd.console_links set expires_at = clock_timestamp() + interval '5 seconds'"
    )
    assert await links.redeem_link(flow.daemon, "login", link.code) is not None


@pytest.mark.parametrize("act", ["create", "redeem"])
async def test_expired_links_are_removed_in_passing(flow: Flow, act: str) -> None:
    """By every call, a hundred at most, the oldest first; live links stay."""
    await flow.superuser.execute(
        """
        insert into webhookd.console_links
            (code_sha256, kind, token_fingerprint, actor, expires_at, session_expires_at)
        select sha256(n::text::bytea), 'login', '', 'old', now() - make_interval(secs => n), now()
        from generate_series(1, 150) n
        """
    )
    live = await login_link(flow)
    assert await flow.superuser.fetchval(f"{COUNT} where actor = 'old' and expires_at <= now()") == 50
    assert (
        await flow.superuser.fetchval(
            f"{COUNT} where actor = 'old' and expires_at < now() - interval '60 seconds'"
        )
        == 0
    )
    if act == "create":
        await login_link(flow)
    else:
        assert await links.redeem_link(flow.daemon, "login", UNKNOWN) is None
    assert await flow.superuser.fetchval(f"{COUNT} where actor = 'old'") == 0
    assert await links.redeem_link(flow.daemon, "login", live.code) is not None


async def test_expired_links_do_not_count(flow: Flow) -> None:
    """A thousand live links are the limit, with any number of expired ones."""
    await flow.superuser.execute(
        """
        insert into webhookd.console_links
            (code_sha256, kind, token_fingerprint, actor, expires_at, session_expires_at)
        select sha256(n::text::bytea), 'login', $1, 'shop',
               now() + case when n > 1500 then interval '1 hour' else interval '-1 hour' end, now()
        from generate_series(1, 2499) n
        """,
        FINGERPRINT,
    )
    await login_link(flow)
    with pytest.raises(Refused, match="1000 links") as refused, translated():
        await login_link(flow)
    assert refused.value.refusal is Refusal.LIMIT_REACHED


async def test_same_code_cannot_be_stored_twice(flow: Flow) -> None:
    """A code has 256 random bits, so this shows only that the first link is not replaced."""
    call = "select webhookd.create_console_link(sha256('same'), 'login', '', $1, 60)"
    await flow.daemon.execute(call, "first")
    with pytest.raises(Exception, match="console_links_pkey"):
        await flow.daemon.execute(call, "second")


# Races


async def test_one_of_two_redeems_gets_the_link(race: Race) -> None:
    """The second waits for the first, and then finds nothing."""
    link = await login_link(race.first)
    async with race.first.daemon.transaction():
        assert await links.redeem_link(race.first.daemon, "login", link.code) is not None
        second = await race.waits(links.redeem_link(race.second.daemon, "login", link.code))
    assert await second is None


async def test_link_of_a_failed_redeem_stays(race: Race) -> None:
    """If the first transaction is rolled back, the second gets the link."""
    link = await login_link(race.first)
    transaction = race.first.daemon.transaction()
    await transaction.start()
    assert await links.redeem_link(race.first.daemon, "login", link.code) is not None
    second = await race.waits(links.redeem_link(race.second.daemon, "login", link.code))
    await transaction.rollback()
    assert await second is not None


async def test_twenty_redeems_at_once(database: "Database") -> None:
    """Exactly one gets each link."""
    flows = [await Flow.open(database) for _ in range(10)]
    for _ in range(20):
        link = await login_link(flows[0])
        redeemed = await asyncio.gather(
            *(links.redeem_link(flow.daemon, "login", link.code) for flow in flows)
        )
        assert len([each for each in redeemed if each is not None]) == 1


async def test_expired_links_in_use_are_skipped(race: Race) -> None:
    """Two calls that remove expired links do not wait for each other."""
    await expire(race.first, await login_link(race.first))
    async with race.first.daemon.transaction():
        assert await links.redeem_link(race.first.daemon, "login", UNKNOWN) is None
        assert await race.skips(links.redeem_link(race.second.daemon, "login", "other")) is None


# Erasure


async def test_erasure_deletes_links_at_once(flow: Flow) -> None:
    """Before anything else is removed; links of other tenants and of no tenant stay."""
    for tenant in ("acme", "globex"):
        await tenants.put(flow.daemon, tenant, {})
    gone = await portal_link(flow)
    kept = [await portal_link(flow, "globex"), await login_link(flow)]
    await queries.request_tenant_erasure(flow.daemon, "acme", "support")
    assert await links.redeem_link(flow.daemon, "portal", gone.code) is None
    assert await flow.superuser.fetchval(COUNT) == len(kept)
    await erase(flow)
    assert await links.redeem_link(flow.daemon, "portal", kept[0].code) is not None
    assert await links.redeem_link(flow.daemon, "login", kept[1].code) is not None


async def test_end_of_an_erasure_deletes_later_links(flow: Flow) -> None:
    """A login with the tenant's token in the meantime, and expired links, which may name it as actor."""
    await tenants.put(flow.daemon, "marked-tenant", {})
    await queries.request_tenant_erasure(flow.daemon, "marked-tenant", "support")
    await login_link(flow, "the token of marked-tenant", "marked-tenant")
    await expire(flow, await login_link(flow, "marked-tenant"))
    assert await containing(flow.superuser, ["marked-tenant"]) != []
    await erase(flow)
    assert await containing(flow.superuser, ["marked-tenant"]) == []


async def test_tenant_must_exist_and_not_be_erased(flow: Flow) -> None:
    """404 before and after, 409 during an erasure; it does not create the tenant."""

    async def refusal() -> Refusal:
        with pytest.raises(Refused) as refused, translated():
            await portal_link(flow)
        return refused.value.refusal

    assert await refusal() is Refusal.NOT_FOUND
    await tenants.put(flow.daemon, "acme", {})
    await queries.request_tenant_erasure(flow.daemon, "acme", "support")
    assert await refusal() is Refusal.BEING_ERASED
    await erase(flow)
    assert await refusal() is Refusal.NOT_FOUND
    assert await flow.superuser.fetchval("select count(*) from webhookd.tenants") == 0


async def link_during_an_erasure(race: Race) -> None:
    """The link waits for the request, and is then refused."""
    transaction = race.first.daemon.transaction()
    await transaction.start()
    await queries.request_tenant_erasure(race.first.daemon, "acme", "support")
    task = await race.waits(portal_link(race.second))
    await transaction.commit()
    with pytest.raises(Refused) as refused, translated():
        await task
    assert refused.value.refusal is Refusal.BEING_ERASED


async def erasure_during_a_link(race: Race) -> None:
    """The request waits for the link, and deletes it."""
    transaction = race.first.daemon.transaction()
    await transaction.start()
    await portal_link(race.first)
    task = await race.waits(queries.request_tenant_erasure(race.second.daemon, "acme", "support"))
    await transaction.commit()
    await task
    assert await race.count(COUNT) == 0


RACES = [link_during_an_erasure, erasure_during_a_link]


@pytest.mark.parametrize("run", RACES, ids=lambda run: run.__name__)
async def test_no_link_survives_an_erasure(race: Race, run: RunRace) -> None:
    """Whichever comes first."""
    await run(race)


@pytest.mark.parametrize("run", RACES, ids=lambda run: run.__name__)
async def test_race_fails_without_the_lock(race: Race, run: RunRace) -> None:
    """The test above depends on the lock of the tenant's row."""
    await Weakened("create_console_link", " for key share").take_away(race.first.superuser)
    with pytest.raises(AssertionError):
        await run(race)


async def test_waiting_link_holds_nothing_that_an_erasure_deletes(race: Race) -> None:
    """An erasure locks the tenant first, and then deletes its links, also those that have expired."""
    expired = await portal_link(race.first)
    await expire(race.first, expired)
    erasing = race.first.superuser
    async with erasing.transaction():
        await erasing.execute("select from webhookd.tenants where tenant = 'acme' for update")
        task = asyncio.create_task(portal_link(race.second))
        await until_blocked(erasing, race.second.daemon.get_server_pid(), erasing.get_server_pid())
        await erasing.execute("delete from webhookd.console_links")
    await task
    assert await race.count(COUNT) == 1


# Plans


async def test_calls_read_few_blocks(flow: Flow) -> None:
    """Beside 20,000 live links of other tokens, in a session that planned its statements without any."""
    await tenants.put(flow.daemon, "acme", {})
    await flow.superuser.execute("vacuum analyze webhookd.console_links")
    for _ in range(6):
        await portal_link(flow)
        await links.redeem_link(flow.daemon, "portal", UNKNOWN)
    link = await portal_link(flow)
    await flow.superuser.execute(
        """
        insert into webhookd.console_links (code_sha256, kind, token_fingerprint, actor, tenant, capabilities,
                                            expires_at, session_expires_at)
        select sha256(n::text::bytea), 'portal', lpad((n / 1000)::text, 32, '0'), 'shop', 'acme', '{view}',
               now() + interval '1 hour', now() + interval '1 hour'
        from generate_series(1, 20000) n
        """
    )
    await watched(flow, lambda: portal_link(flow))
    await watched(flow, lambda: links.redeem_link(flow.daemon, "portal", UNKNOWN))
    assert await watched(flow, lambda: links.redeem_link(flow.daemon, "portal", link.code)) is not None


async def watched(flow: Flow, call: Callable[[], Awaitable[Result]]) -> Result:
    """Run a call that must read few blocks of links and tenants."""
    result, touched = await watch(flow.daemon, lambda _: call())
    assert sum(touched.blocks.values()) < MAX_BLOCKS, touched.blocks
    return result
