"""Reads the catalog of our tables, and finds out which statements the server refuses.

Uses a superuser's connection; every attempt is rolled back.
"""

import contextlib
from typing import TYPE_CHECKING, NamedTuple

import asyncpg

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from tests.support.database import Connection

# For each type an expression that differs from any current value of the column.
DIFFERENT = {
    "bigint": "coalesce({0}, 0) + 1",
    "boolean": "not {0}",
    "bytea": "coalesce({0}, '') || '\\x00'",
    "character varying": "coalesce({0}, '') || 'x'",
    "double precision": "coalesce({0}, 0) + 1",
    "integer": "coalesce({0}, 0) + 1",
    "json": "json_build_array({0})",
    "jsonb": """{0} || '{{"another": 1}}'""",
    "smallint": "coalesce({0}, 0) + 1",
    "text": "coalesce({0}, '') || 'x'",
    "timestamp with time zone": "coalesce({0}, now()) + interval '1 second'",
    "uuid": "gen_random_uuid()",
    "webhookd.job_status": "case {0} when 'Pending' then 'Leased' else 'Pending' end::webhookd.job_status",
    "webhookd.saga_status": "case {0} when 'Pending' then 'InProgress' else 'Pending' end"
    "::webhookd.saga_status",
}


class Column(NamedTuple):
    """A column, with an expression that gives it another value."""

    name: str
    is_identity: bool
    different: str


async def columns(connection: "Connection", table: str) -> list[Column]:
    """Return every column of a table, in order."""
    rows = await connection.fetch(
        """
        select attname as name, attidentity <> '' as is_identity, format_type(atttypid, null) as type
        from pg_attribute where attrelid = $1::text::regclass and attnum > 0 and not attisdropped
        order by attnum
        """,
        table,
    )
    assert rows
    # An identity column only accepts DEFAULT: the next number of the sequence.
    return [
        Column(
            row["name"],
            row["is_identity"],
            "default" if row["is_identity"] else DIFFERENT[row["type"]].format(row["name"]),
        )
        for row in rows
    ]


def update(table: str, changes: "Mapping[str, str]", key: str = "id") -> str:
    """Return an UPDATE of the row $1 that assigns each expression to its column."""
    assignments = ", ".join(f"{column} = {expression}" for column, expression in changes.items())
    return f"update {table} set {assignments} where {key} = $1"


def insert(table: str, values: "Mapping[str, str]", source: str) -> str:
    """Return an INSERT of the expressions, computed from the row $1 of a source."""
    names, expressions = ", ".join(values), ", ".join(values.values())
    return (
        f"insert into {table} ({names}) overriding system value "
        f"select {expressions} from {source} where id = $1"
    )


@contextlib.asynccontextmanager
async def undone(connection: "Connection") -> "AsyncIterator[None]":
    """Roll back everything in the block, also inside another transaction."""
    transaction = connection.transaction()
    await transaction.start()
    try:
        yield
    finally:
        await transaction.rollback()


async def refusal(connection: "Connection", statement: str, *arguments: object) -> str | None:
    """Return the constraint or SQLSTATE that refused a statement; None if it succeeded."""
    try:
        async with undone(connection):
            await connection.execute(statement, *arguments)
    except asyncpg.PostgresError as error:
        return error.constraint_name or error.sqlstate
    return None
