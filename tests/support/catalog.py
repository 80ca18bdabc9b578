"""What PostgreSQL's catalog says of our tables, and what the server refuses.

Reads pg_catalog through a superuser's connection; whatever is tried here is undone again.
"""

import contextlib
from typing import TYPE_CHECKING, NamedTuple

import asyncpg

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from tests.support.database import Connection

# An expression that differs from the column's value, whatever that is, by the column's type.
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
    """A column, and how an UPDATE can give it another value."""

    name: str
    is_identity: bool
    different: str


async def columns(connection: "Connection", table: str) -> list[Column]:
    """Every column of a table, in order."""
    rows = await connection.fetch(
        """
        select attname as name, attidentity <> '' as is_identity, format_type(atttypid, null) as type
        from pg_attribute where attrelid = $1::text::regclass and attnum > 0 and not attisdropped
        order by attnum
        """,
        table,
    )
    assert rows
    # Only DEFAULT can be assigned to an identity column: the sequence's next number.
    return [
        Column(
            row["name"],
            row["is_identity"],
            "default" if row["is_identity"] else DIFFERENT[row["type"]].format(row["name"]),
        )
        for row in rows
    ]


def update(table: str, changes: "Mapping[str, str]", key: str = "id") -> str:
    """An UPDATE of the row $1 that assigns each expression to its column."""
    assignments = ", ".join(f"{column} = {expression}" for column, expression in changes.items())
    return f"update {table} set {assignments} where {key} = $1"


def insert(table: str, values: "Mapping[str, str]", source: str) -> str:
    """An INSERT of each expression into its column, computed from the row $1 of a source."""
    names, expressions = ", ".join(values), ", ".join(values.values())
    return f"insert into {table} ({names}) select {expressions} from {source} where id = $1"


@contextlib.asynccontextmanager
async def undone(connection: "Connection") -> "AsyncIterator[None]":
    """Take back whatever is done in here, also inside of another transaction."""
    transaction = connection.transaction()
    await transaction.start()
    try:
        yield
    finally:
        await transaction.rollback()


async def refusal(connection: "Connection", statement: str, *arguments: object) -> str | None:
    """What refused a statement: the constraint it names, else its SQLSTATE; None if it was served."""
    try:
        async with undone(connection):
            await connection.execute(statement, *arguments)
    except asyncpg.PostgresError as error:
        return error.constraint_name or error.sqlstate
    return None
