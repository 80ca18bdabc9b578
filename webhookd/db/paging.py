"""Keyset pages, newest first: each page is a range of one index, read in the index's order.

So the cost of a page depends on its size only: not on its position, its selectivity or the statistics.

The start is a row comparison over the index's columns, which no other index can serve or sort by. With
`subscription_id = 7` instead, the planner may walk a year of all subscriptions' rows to find those of one.
The end is checked outside of the LIMIT, on the rows of the page only: with the end as a second row comparison
the scan does not stop there, but continues until the first column changes.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple, TypeAlias

from webhookd.core.errors import Refusal, Refused
from webhookd.db.connection import Connection

Row: TypeAlias = dict[str, Any]

# The time of a row is the start of its transaction, and its id comes later. The daemon's sessions end a
# statement, and an idle transaction, after 12 s, and no transaction has more than two statements (see
# db/pool.py). So this is the most by which the order of ids and the order of times can differ.
OVERLAP = timedelta(minutes=1)

# Forbids the plan that the planner prefers when it expects few rows: read a whole range, then sort it.
# Without JIT: up to PostgreSQL 17 the cost penalty of a disabled plan node is high enough to trigger JIT.
_BY_INDEX = """
    set local enable_sort = off; set local enable_bitmapscan = off; set local enable_seqscan = off;
    set local jit = off"""

_PIECE = """select * from (
    select {shown} from {table} where {conditions} order by {order} limit {limit}) {alias}"""


class Page(NamedTuple):
    """At most `limit` rows after the row with this id; None starts at the newest."""

    limit: int
    after_id: int | None = None


class Range(NamedTuple):
    """The rows of a list as a range of an index: values of its first columns, and bounds of the next."""

    columns: tuple[str, ...]  # all columns of the index, in order; the last is the row's id
    equal: tuple[object, ...] = ()
    at_least: object = None
    below: object = None

    @property
    def order(self) -> str:
        return ", ".join(f"{column} desc" for column in self.columns)


class Column(str):
    """The name of a column, which stands in a statement as it is."""

    __slots__ = ()


class Arguments(list[object]):
    """The arguments of one statement; add() returns the placeholder."""

    def add(self, value: object) -> str:
        if isinstance(value, Column):
            return value
        self.append(value)
        return f"${len(self)}"


def piece(
    table: str,
    part: Range,
    mark: tuple[object, ...] | None,
    limit: int,
    arguments: Arguments,
    shown: str = "*",
    only: str = "true",
    tests: Sequence[str] = (),
) -> str:
    """Build a SELECT of the next rows of a table (`webhookd.events e`) that are in the range.

    `mark` has the values of the columns after `equal` in the last row of the previous page. `shown` names the
    columns to read, including the range's, if the table has a column that the role may not read. `only` is
    the predicate of a partial index, which must be literal text for the planner to use that index. `tests`
    are conditions that the index does not serve: rows that fail them are read and left out. Then the scan
    must not leave the range to fill the page, so its ends are checked inside of the LIMIT too.
    """
    conditions = [only, _start(part, mark, arguments), *tests]
    if tests:
        conditions += _ends(part, arguments)
    ends = _ends(part, arguments)
    query = _PIECE.format(
        shown=shown,
        table=table,
        alias=table.rsplit(maxsplit=1)[-1],
        conditions=" and ".join(conditions),
        order=part.order,
        limit=arguments.add(limit),
    )
    return " ".join([query, *(["where", " and ".join(ends)] if ends else [])])


def _ends(part: Range, arguments: Arguments) -> list[str]:
    """Return the conditions of the range, without the start of the page."""
    ends = [
        f"{column} = {arguments.add(value)}" for column, value in zip(part.columns, part.equal, strict=False)
    ]
    if part.at_least is not None:
        ends.append(f"{part.columns[len(part.equal)]} >= {arguments.add(part.at_least)}")
    return ends


def _start(part: Range, mark: tuple[object, ...] | None, arguments: Arguments) -> str:
    starts = [(*part.equal, part.below)] if part.below is not None else []
    if mark is not None:
        starts.append((*part.equal, *mark))
    if starts:
        # As tuples compare: with equal times the shorter one is smaller, for it excludes that whole time.
        return _compared(part.columns, "<", min(starts), arguments)
    return _compared(part.columns, "<=", part.equal, arguments) if part.equal else "true"


def _compared(
    columns: tuple[str, ...], operator: str, values: tuple[object, ...], arguments: Arguments
) -> str:
    names = ", ".join(columns[: len(values)])
    placeholders = ", ".join(arguments.add(value) for value in values)
    return f"({names}) {operator} ({placeholders})"


_POSITION = """
    select t.{time}, true from {table} t where t.id = $1 and ($2::text is null or t.tenant = $2)
    union all
    (select t.{time}, false from {table} t where t.id > $1 order by t.id limit 1)"""


async def time_mark(
    connection: Connection, what: str, table: str, time: str, row_id: int, tenant: str | None
) -> tuple[datetime, int]:
    """Return the position of the previous page's last row in a list by time; with a tenant, of its rows only.

    Retention may have removed that row since. Then the list continues where the row can have been at the
    earliest: OVERLAP after the next row by id. So the page may repeat rows of that time, but it leaves out
    none.
    """
    rows = await connection.fetch(_POSITION.format(time=time, table=table), row_id, tenant)
    if not rows:
        message = f"cursor: {what} {row_id} does not exist; begin again without a cursor"
        raise Refused(Refusal.INVALID_ARGUMENT, message)
    # Its own time, if the row exists.
    at, exists = max(rows, key=lambda row: row[1])
    return at if exists else at + OVERLAP, row_id


async def fetch_by_index(connection: Connection, query: str, arguments: Arguments) -> list[Row]:
    """Run a query that must read an index in its order."""
    async with connection.transaction(readonly=True):
        await connection.execute(_BY_INDEX)
        return [dict(row) for row in await connection.fetch(query, *arguments)]
