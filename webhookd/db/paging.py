"""Lists, newest first, a page at a time: each page is a piece of one index, read in the index's order.

So a page costs what it shows, wherever it is, however rare its rows are and whatever the statistics say.

Where it begins is a row comparison over the index's columns, which no other index can serve or sort by: given
`subscription_id = 7` the planner may walk a year of everybody's rows, in the hope of meeting that one's.
Where it ends is asked outside of the LIMIT, of so many rows and no more: a scan that is told the end as
another row comparison does not stop at it, but goes on to where the first column changes.
"""

from typing import Any, NamedTuple, TypeAlias

from webhookd.db.connection import Connection

Row: TypeAlias = dict[str, Any]

# What the planner would take instead when it expects few rows: all of a range, sorted.
# Without JIT: up to PostgreSQL 17 a plan that needs what is forbidden seems dear enough to compile.
_BY_INDEX = """
    set local enable_sort = off; set local enable_bitmapscan = off; set local enable_seqscan = off;
    set local jit = off"""

_PIECE = "select * from (select {shown} from {table} where {start} order by {order} limit {limit}) {alias}"


class Page(NamedTuple):
    """So many rows, after the one with this id; None: from the newest on."""

    limit: int
    after_id: int | None = None


class Range(NamedTuple):
    """What a list shows, as a part of an index: its first columns' values, and bounds of the next one."""

    columns: tuple[str, ...]  # all of them, in order; the last is the row's id
    equal: tuple[object, ...] = ()
    at_least: object = None
    below: object = None

    @property
    def order(self) -> str:
        return ", ".join(f"{column} desc" for column in self.columns)


class Arguments(list[object]):
    """Of one statement: adding one gives its placeholder."""

    def add(self, value: object) -> str:
        self.append(value)
        return f"${len(self)}"


def piece(
    table: str,
    part: Range,
    mark: tuple[object, ...] | None,
    limit: int,
    arguments: Arguments,
    shown: str = "*",
) -> str:
    """A SELECT of the next rows of a table (`webhookd.events e`) that are in the range.

    After the mark, which is the values of the columns after `equal` in the last row shown. `shown`: the
    columns, the range's among them, of a table that has one that nobody may read.
    """
    ends = [
        f"{column} = {arguments.add(value)}" for column, value in zip(part.columns, part.equal, strict=False)
    ]
    if part.at_least is not None:
        ends.append(f"{part.columns[len(part.equal)]} >= {arguments.add(part.at_least)}")
    query = _PIECE.format(
        shown=shown,
        table=table,
        alias=table.rsplit(maxsplit=1)[-1],
        start=_start(part, mark, arguments),
        order=part.order,
        limit=arguments.add(limit),
    )
    return " ".join([query, *(["where", " and ".join(ends)] if ends else [])])


def _start(part: Range, mark: tuple[object, ...] | None, arguments: Arguments) -> str:
    starts = [(*part.equal, part.below)] if part.below is not None else []
    if mark is not None:
        starts.append((*part.equal, *mark))
    if starts:
        # At the same time the shorter one is earlier, for it leaves out all of that time: as tuples compare.
        return _compared(part.columns, "<", min(starts), arguments)
    return _compared(part.columns, "<=", part.equal, arguments) if part.equal else "true"


def _compared(
    columns: tuple[str, ...], operator: str, values: tuple[object, ...], arguments: Arguments
) -> str:
    names = ", ".join(columns[: len(values)])
    placeholders = ", ".join(arguments.add(value) for value in values)
    return f"({names}) {operator} ({placeholders})"


async def fetch_by_index(connection: Connection, query: str, arguments: Arguments) -> list[Row]:
    """The rows of a query whose order is an index's."""
    async with connection.transaction(readonly=True):
        await connection.execute(_BY_INDEX)
        return [dict(row) for row in await connection.fetch(query, *arguments)]
