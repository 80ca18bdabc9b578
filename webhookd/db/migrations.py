"""Brings a database to this webhookd's schema, or says why not.

First the cluster's roles, in a transaction of their own; then, in one transaction under an advisory lock,
the migrations not applied yet, and the functions and rights if they changed. Whoever comes second finds
nothing to do.
"""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import asyncpg

from webhookd import __version__
from webhookd.core.errors import SchemaProblem
from webhookd.db.connection import Connection, connected
from webhookd.db.schema_files import FunctionFile, Migration, Schema, shipped

OLDEST_SERVER = 15
# How long to wait for another migration; and for a transaction on our tables, while others queue behind us.
MIGRATION_TIMEOUT_SECONDS = 60
TABLE_LOCK_TIMEOUT_SECONDS = 3

# Any number does, as long as every webhookd uses it. Transaction-scoped: it also holds behind PgBouncer.
_LOCK_KEY = 0x77656268_6F6F6B64
_OWNER = "webhookd_owner"
_CREATED = re.compile(r"^create or replace function webhookd\.(\w+)", re.MULTILINE)
# The parts of schema_code.
_FUNCTIONS = "functions"
_TRIGGERS = "triggers"

_BOOKKEEPING = """
create table webhookd.schema_migrations (
    version          integer primary key,
    name             text not null,
    checksum         text not null,
    webhookd_version text not null,
    applied_at       timestamptz not null default now()
);
create table webhookd.schema_code (
    part             text primary key,
    checksum         text not null,
    webhookd_version text not null,
    applied_at       timestamptz not null default now()
);
"""


@dataclass(frozen=True)
class Installed:
    """What a database says of itself; empty before the first migration."""

    migrations: dict[int, str]
    code: dict[str, str]  # checksums, by part
    code_version: str | None  # the newest webhookd that applied any


@dataclass(frozen=True)
class Pending:
    """What is still to be done; nothing of it when the database is up to date."""

    migrations: tuple[Migration, ...]
    code: bool
    triggers: bool

    def __bool__(self) -> bool:
        return bool(self.migrations) or self.code or self.triggers

    def describe(self) -> list[str]:
        """A line for each thing to do."""
        lines = [migration.name for migration in self.migrations]
        return lines + ["functions and rights"] * self.code + ["triggers"] * self.triggers


async def migrate(dsn: str, schema: Schema | None = None) -> Pending:
    """Bring the database up to date. Returns what was done."""
    schema = schema or shipped()
    async with connected(dsn) as connection:
        await _require_usable(connection)
        # Looked at without lock or rights first: an up-to-date database is left alone, whoever asks.
        if not compare(schema, await _installed(connection)):
            return Pending((), code=False, triggers=False)
        await _require_rights(connection)
        try:
            async with connection.transaction():
                await _use_own_names(connection)
                await connection.execute(schema.roles)
            async with connection.transaction():
                return await _apply(connection, schema)
        except asyncpg.InsufficientPrivilegeError as error:
            raise SchemaProblem(
                f"this login may not migrate: {error.message} "
                "(it needs CREATEROLE, and CREATE on the database)"
            ) from error
        except asyncpg.PostgresError as error:
            # A role of another login, a lock not got, a read-only database: whatever, it is for a person.
            hint = f" ({error.hint})" if error.hint else ""
            raise SchemaProblem(f"the database could not be migrated: {error.message}{hint}") from error


def everything() -> Pending:
    """What there is to do where nothing was done yet."""
    return Pending(tuple(shipped().migrations), code=True, triggers=True)


async def check(dsn: str, schema: Schema | None = None) -> Pending:
    """What migrating would do; changes nothing."""
    schema = schema or shipped()
    async with connected(dsn) as connection:
        await _require_usable(connection)
        return compare(schema, await _installed(connection))


def compare(schema: Schema, installed: Installed) -> Pending:
    """What the database lacks. Refuses a database that is ahead of us, or whose past is not ours."""
    known = {migration.version: migration for migration in schema.migrations}
    ahead = sorted(set(installed.migrations) - set(known))
    if ahead:
        raise SchemaProblem(
            f"the database's schema is newer than this webhookd: it has migration {ahead[-1]:04d}, "
            f"webhookd {__version__} knows up to {max(known, default=0):04d}. Upgrade webhookd"
        )
    for version, checksum in installed.migrations.items():
        if known[version].checksum != checksum:
            raise SchemaProblem(
                f"migration {known[version].name} is not the one that was applied to the database: "
                "an applied migration is never edited"
            )
    code = installed.code.get(_FUNCTIONS) != schema.code_checksum
    triggers = installed.code.get(_TRIGGERS) != schema.triggers_checksum
    newer = installed.code_version and _release(installed.code_version) > _release(__version__)
    if newer and (code or triggers):
        raise SchemaProblem(
            "the database's functions are newer than this webhookd: "
            f"they are of {installed.code_version}, this is {__version__}. Upgrade webhookd"
        )
    pending = tuple(
        migration for migration in schema.migrations if migration.version not in installed.migrations
    )
    return Pending(pending, code=code, triggers=triggers)


async def _apply(connection: Connection, schema: Schema) -> Pending:
    await _use_own_names(connection)
    await _bound_lock_waits(connection, MIGRATION_TIMEOUT_SECONDS)
    await connection.execute("select pg_advisory_xact_lock($1)", _LOCK_KEY)
    await _bound_lock_waits(connection, TABLE_LOCK_TIMEOUT_SECONDS)
    # Again, under the lock: another may have been first.
    pending = compare(schema, await _installed(connection))
    if not pending:
        return pending
    if not await connection.fetchval("select exists (select from pg_namespace where nspname = 'webhookd')"):
        await connection.execute(f"create schema webhookd authorization {_OWNER}")
        await _execute_as(connection, _OWNER, _BOOKKEEPING)
    for migration in pending.migrations:
        await _execute_as(connection, _OWNER, migration.text)
        await connection.execute(
            "insert into webhookd.schema_migrations (version, name, checksum, webhookd_version) "
            "values ($1, $2, $3, $4)",
            migration.version,
            migration.name,
            migration.checksum,
            __version__,
        )
    if pending.code:
        await _apply_code(connection, schema)
        await _note(connection, _FUNCTIONS, schema.code_checksum)
    if pending.triggers:
        await _execute_as(connection, _OWNER, schema.triggers)
        await _note(connection, _TRIGGERS, schema.triggers_checksum)
    return pending


async def _use_own_names(connection: Connection) -> None:
    """Nothing of ours may bind to what somebody made in a schema that the login's path leads to."""
    await connection.execute("set local search_path = pg_catalog, pg_temp")


async def _bound_lock_waits(connection: Connection, seconds: int) -> None:
    """Not longer than this, nor than a bound that is set already: others queue behind a lock we wait for."""
    await connection.execute(
        "select set_config('lock_timeout', $1, true) "
        "where (select setting::int from pg_settings where name = 'lock_timeout') not between 1 and $2",
        f"{seconds}s",
        seconds * 1000,
    )


async def _note(connection: Connection, part: str, checksum: str) -> None:
    await connection.execute(
        "insert into webhookd.schema_code (part, checksum, webhookd_version) values ($1, $2, $3) "
        "on conflict (part) do update set "
        "checksum = excluded.checksum, webhookd_version = excluded.webhookd_version, applied_at = now()",
        part,
        checksum,
        __version__,
    )


async def _apply_code(connection: Connection, schema: Schema) -> None:
    await connection.execute(schema.revoke)
    for file in schema.functions:
        await _hand_over(connection, file)
    earlier = await _functions(connection)
    for file in schema.functions:
        async with _creating(connection, file.owner):
            await _execute_as(connection, file.owner, file.text)
    # What was not written anew is of an earlier release, and in no file any more.
    for signature, _ in sorted(earlier.items() & (await _functions(connection)).items()):
        await connection.execute(f"drop routine {signature}")
    await connection.execute(schema.grants)


@asynccontextmanager
async def _creating(connection: Connection, owner: str) -> AsyncIterator[None]:
    """The owner of a function needs CREATE on its schema while it gets it, and never else."""
    if owner == _OWNER:
        yield
        return
    await connection.execute(f"grant usage, create on schema webhookd to {owner}")
    yield
    await connection.execute(f"revoke create on schema webhookd from {owner}")


async def _hand_over(connection: Connection, file: FunctionFile) -> None:
    """Functions that another owned in an earlier release: none but its owner may replace one.

    By name: all of one name are of one owner.
    """
    others = await connection.fetch(
        "select oid::regprocedure::text as signature from pg_proc "
        "where pronamespace = 'webhookd'::regnamespace and proname = any($1) "
        "and proowner <> $2::text::regrole",
        created_names(file),
        file.owner,
    )
    if others:
        async with _creating(connection, file.owner):
            for function in others:
                await connection.execute(f"alter routine {function['signature']} owner to {file.owner}")


def created_names(file: FunctionFile) -> list[str]:
    """The functions that a file makes."""
    return _CREATED.findall(file.text)


async def _functions(connection: Connection) -> dict[str, str]:
    """The place in the catalog of each, by its signature: another as soon as it is written anew."""
    rows = await connection.fetch(
        "select oid::regprocedure::text as signature, ctid::text as place from pg_proc "
        "where pronamespace = 'webhookd'::regnamespace"
    )
    return {row["signature"]: row["place"] for row in rows}


async def _execute_as(connection: Connection, role: str, script: str) -> None:
    await connection.execute(f"set local role {role}")
    await connection.execute(script)
    await connection.execute("reset role")


async def _require_usable(connection: Connection) -> None:
    major = connection.get_server_version().major
    if major < OLDEST_SERVER:
        raise SchemaProblem(f"PostgreSQL {major} is too old: webhookd needs {OLDEST_SERVER} or newer")
    encoding = await connection.fetchval("select current_setting('server_encoding')")
    if encoding != "UTF8":
        raise SchemaProblem(f"the database's encoding is {encoding}: webhookd needs UTF8")


async def _require_rights(connection: Connection) -> None:
    """Asked before the roles are made: they are the cluster's, and would stay when the rest is refused."""
    lacks = await connection.fetchval(
        """
        select case
            when not (select rolsuper or rolcreaterole from pg_roles where rolname = current_user)
                then 'CREATEROLE'
            when to_regnamespace('webhookd') is null
                and not has_database_privilege(current_database(), 'create') then 'CREATE on the database'
        end
        """
    )
    if lacks:
        raise SchemaProblem(f"this login may not migrate: it lacks {lacks}")


async def _installed(connection: Connection) -> Installed:
    owner = await connection.fetchval(
        "select pg_get_userbyid(nspowner) from pg_namespace where nspname = 'webhookd'"
    )
    if owner is None:
        return Installed({}, {}, None)
    if owner != _OWNER:
        raise SchemaProblem("the database has a schema named webhookd that webhookd did not make")
    try:
        migrations = await connection.fetch("select version, checksum from webhookd.schema_migrations")
        code = await connection.fetch("select part, checksum, webhookd_version from webhookd.schema_code")
    except asyncpg.UndefinedTableError as error:
        raise SchemaProblem(
            "the schema webhookd is there, but not its tables: was it taken out by hand?"
        ) from error
    except asyncpg.InsufficientPrivilegeError as error:
        raise SchemaProblem(
            f"this login may not look at the schema: {error} "
            "(it is neither the one that migrated nor one that was granted webhookd_app)"
        ) from error
    return Installed(
        {row["version"]: row["checksum"] for row in migrations},
        {row["part"]: row["checksum"] for row in code},
        max((row["webhookd_version"] for row in code), key=_release, default=None),
    )


def _release(version: str) -> tuple[int, ...]:
    """Its numbers; a pre-release counts as the release it leads to."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
