"""Migrates a database to the schema of this webhookd, or refuses it with the reason.

The roles, which belong to the server, are created in a transaction of their own. Then one transaction, under
an advisory lock, applies the pending migrations, and the functions, privileges and triggers if they changed.
A second migration that waited for the lock finds nothing to do.
"""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import asyncpg

from webhookd import __version__
from webhookd.core.errors import SchemaProblem
from webhookd.db.connection import Connection, connected

OLDEST_SERVER = 15
# How long to wait for another migration to end.
MIGRATION_TIMEOUT_SECONDS = 60
# How long to wait for a table's lock. Short, because every other user of the table queues behind this wait.
TABLE_LOCK_TIMEOUT_SECONDS = 3

# An arbitrary number that all versions share. A transaction-level lock also works behind PgBouncer.
_LOCK_KEY = 0x77656268_6F6F6B64
_OWNER = "webhookd_owner"
_OWNER_LINE = re.compile(r"\A-- owner: ([a-z_]+)\n")
_CREATED = re.compile(r"^create or replace function webhookd\.(\w+)", re.MULTILINE)
# The values of schema_code.part.
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
class Migration:
    """A numbered change of the tables: applied once, never edited after the first tagged release."""

    version: int
    name: str
    text: str = field(repr=False)

    @property
    def checksum(self) -> str:
        return _checksum(self.text)


@dataclass(frozen=True)
class FunctionFile:
    """Functions of one owner, created as that role; all are applied again when any file changes."""

    name: str
    owner: str
    text: str = field(repr=False)


@dataclass(frozen=True)
class Schema:
    """Everything that `webhookd migrate` applies."""

    roles: str
    migrations: tuple[Migration, ...]
    revoke: str
    functions: tuple[FunctionFile, ...]
    planner: str
    triggers: str
    grants: str

    @property
    def triggers_checksum(self) -> str:
        """A checksum of its own, because applying triggers locks tables."""
        return _checksum(self.triggers)

    @property
    def code_checksum(self) -> str:
        """Of everything that is applied together: roles, functions, planner settings and privileges."""
        functions = [file.text for file in self.functions]
        return _checksum("\0".join([self.roles, self.revoke, *functions, self.planner, self.grants]))


@cache
def shipped() -> Schema:
    """Read schema/ of this webhookd: inside the package when installed from a wheel, else beside it."""
    package = Path(__file__).resolve().parent.parent
    folder = package / "schema"
    if not folder.is_dir():
        folder = package.parent / "schema"
    parts = ("roles", "revoke", "planner", "triggers", "grants")
    return Schema(
        migrations=tuple(
            Migration(int(path.name[:4]), path.stem, path.read_text("utf-8"))
            for path in sorted((folder / "migrations").glob("*.sql"))
        ),
        functions=tuple(_function_files(folder)),
        **{part: (folder / f"{part}.sql").read_text("utf-8") for part in parts},
    )


def _function_files(folder: Path) -> Iterator[FunctionFile]:
    """Yield the functions, in an order in which each finds the helpers that it uses."""
    paths = [folder / "common.sql"]
    for product in ("deliveries", "jobqueue", "console"):
        paths += sorted((folder / product).glob("*.sql"), key=lambda path: (path.stem != "common", path))
    for path in paths:
        text = path.read_text("utf-8")
        [owner] = _OWNER_LINE.findall(text)
        yield FunctionFile(path.relative_to(folder).with_suffix("").as_posix(), owner, text)


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Installed:
    """The schema that a database has, by its own record; empty before the first migration."""

    migrations: dict[int, str]  # checksum by version
    code: dict[str, str]  # checksum by part
    code_version: str | None  # the newest webhookd version that applied a part


@dataclass(frozen=True)
class Pending:
    """What migrating would apply; false if the database is up to date."""

    migrations: tuple[Migration, ...]
    code: bool
    triggers: bool

    def __bool__(self) -> bool:
        return bool(self.migrations) or self.code or self.triggers

    def describe(self) -> list[str]:
        lines = [migration.name for migration in self.migrations]
        return lines + ["functions and privileges"] * self.code + ["triggers"] * self.triggers


async def migrate(dsn: str, schema: Schema | None = None) -> Pending:
    """Bring the database up to date and return what was applied."""
    schema = schema or shipped()
    async with connected(dsn) as connection:
        await _require_usable(connection)
        # First without a lock: on an up-to-date database, every login that can read the schema succeeds.
        if not compare(schema, await _installed(connection)):
            return Pending((), code=False, triggers=False)
        await _require_privileges(connection)
        try:
            async with connection.transaction():
                await _fix_search_path(connection)
                await connection.execute(schema.roles)
            async with connection.transaction():
                return await _apply(connection, schema)
        except asyncpg.InsufficientPrivilegeError as error:
            raise SchemaProblem(
                f"this login cannot migrate: {error.message} "
                "(it needs CREATEROLE, and CREATE on the database)"
            ) from error
        except asyncpg.PostgresError as error:
            # For example a role of another login, a lock timeout, a read-only database: for the operator.
            hint = f" ({error.hint})" if error.hint else ""
            raise SchemaProblem(f"the migration failed: {error.message}{hint}") from error


def everything() -> Pending:
    """What migrating an empty database applies."""
    return Pending(shipped().migrations, code=True, triggers=True)


async def check(dsn: str, schema: Schema | None = None) -> Pending:
    """Return what migrating would apply, without changing anything."""
    schema = schema or shipped()
    async with connected(dsn) as connection:
        await _require_usable(connection)
        return compare(schema, await _installed(connection))


def compare(schema: Schema, installed: Installed) -> Pending:
    """Return what the database lacks; refuse one that is newer, or whose migrations are not ours."""
    known = {migration.version: migration for migration in schema.migrations}
    baseline = min(known)
    # Checked before unknown versions: the pre-releases had migrations 0002 to 0008, which are not newer.
    if installed.migrations.get(baseline, known[baseline].checksum) != known[baseline].checksum:
        raise SchemaProblem(
            "this database was created by a pre-release of webhookd and cannot be migrated: create a new "
            "database (for the embedded server: set database.data_dir to an empty folder)"
        )
    ahead = sorted(set(installed.migrations) - set(known))
    if ahead:
        raise SchemaProblem(
            f"the database's schema is newer than this webhookd: it has migration {ahead[-1]:04d}, "
            f"webhookd {__version__} knows up to {max(known):04d}. Upgrade webhookd"
        )
    for version, checksum in installed.migrations.items():
        if known[version].checksum != checksum:
            raise SchemaProblem(
                f"migration {known[version].name} differs from the one that was applied to the database: "
                "an applied migration must never be edited"
            )
    code = installed.code.get(_FUNCTIONS) != schema.code_checksum
    triggers = installed.code.get(_TRIGGERS) != schema.triggers_checksum
    newer = installed.code_version and _release(installed.code_version) > _release(__version__)
    if newer and (code or triggers):
        raise SchemaProblem(
            "the database's functions are newer than this webhookd: "
            f"they are from {installed.code_version}, this is {__version__}. Upgrade webhookd"
        )
    pending = tuple(
        migration for migration in schema.migrations if migration.version not in installed.migrations
    )
    return Pending(pending, code=code, triggers=triggers)


async def _apply(connection: Connection, schema: Schema) -> Pending:
    await _fix_search_path(connection)
    await _bound_lock_waits(connection, MIGRATION_TIMEOUT_SECONDS)
    await connection.execute("select pg_advisory_xact_lock($1)", _LOCK_KEY)
    await _bound_lock_waits(connection, TABLE_LOCK_TIMEOUT_SECONDS)
    # Compared again, now under the lock: another migration may have been faster.
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


async def _fix_search_path(connection: Connection) -> None:
    """Keep our SQL from using functions or operators of other schemas in the login's search path."""
    await connection.execute("set local search_path = pg_catalog, pg_temp")


async def _bound_lock_waits(connection: Connection, seconds: int) -> None:
    """Set lock_timeout, unless a shorter one is set already."""
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
    owners = ", ".join(sorted({file.owner for file in schema.functions} - {_OWNER}))
    await connection.execute(schema.revoke)
    # To create or receive a function, a role needs CREATE on the schema. It does not keep it.
    await connection.execute(f"grant usage, create on schema webhookd to {owners}")
    for file in schema.functions:
        await _hand_over(connection, file)
    earlier = await _functions(connection)
    for file in schema.functions:
        await _execute_as(connection, file.owner, file.text)
    await connection.execute(f"revoke create on schema webhookd from {owners}")
    # A function that was not replaced is from an earlier release and in no file any more.
    for signature, _ in sorted(earlier.items() & (await _functions(connection)).items()):
        await connection.execute(f"drop routine {signature}")
    await connection.execute(schema.planner)
    await connection.execute(schema.grants)


async def _hand_over(connection: Connection, file: FunctionFile) -> None:
    """Give the file's owner the functions that another role owned in an earlier release.

    Only its owner can replace a function. By name: all overloads of a name have the same owner.
    """
    functions = await connection.fetch(
        "select oid::regprocedure::text as signature from pg_proc "
        "where pronamespace = 'webhookd'::regnamespace and proname = any($1) "
        "and proowner <> $2::text::regrole",
        created_names(file),
        file.owner,
    )
    for function in functions:
        await connection.execute(f"alter routine {function['signature']} owner to {file.owner}")


def created_names(file: FunctionFile) -> list[str]:
    """Return the names of the functions that a file creates."""
    return _CREATED.findall(file.text)


async def _functions(connection: Connection) -> dict[str, str]:
    """Return the catalog row's ctid of each function, by signature; replacing a function changes it."""
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


async def _require_privileges(connection: Connection) -> None:
    """Check first: the roles belong to the server and would stay if the rest failed."""
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
        raise SchemaProblem(f"this login cannot migrate: it lacks {lacks}")


async def _installed(connection: Connection) -> Installed:
    owner = await connection.fetchval(
        "select pg_get_userbyid(nspowner) from pg_namespace where nspname = 'webhookd'"
    )
    if owner is None:
        return Installed({}, {}, None)
    if owner != _OWNER:
        raise SchemaProblem("the database has a schema named webhookd that webhookd did not create")
    try:
        migrations = await connection.fetch("select version, checksum from webhookd.schema_migrations")
        code = await connection.fetch("select part, checksum, webhookd_version from webhookd.schema_code")
    except asyncpg.UndefinedTableError as error:
        raise SchemaProblem(
            "the schema webhookd exists, but its table schema_migrations or schema_code does not"
        ) from error
    except asyncpg.InsufficientPrivilegeError as error:
        raise SchemaProblem(
            f"this login cannot read the schema: {error} "
            "(use the login that migrated, or one with the role webhookd_app)"
        ) from error
    return Installed(
        {row["version"]: row["checksum"] for row in migrations},
        {row["part"]: row["checksum"] for row in code},
        max((row["webhookd_version"] for row in code), key=_release, default=None),
    )


def _release(version: str) -> tuple[int, ...]:
    """Return a version's numbers; a pre-release counts as its release."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
