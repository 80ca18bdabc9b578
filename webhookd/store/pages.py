"""Lists, newest first, a page at a time: each page is a range of one index, read in the index's order.

So a page costs what it shows, wherever it is, however rare its rows are and whatever the statistics say. The
range is written with row comparisons, which no other index can serve or sort by: given `subscription_id = 7`
the planner may as well walk a year of all subscriptions' rows, in the hope of meeting that one's.
"""

from typing import Any, NamedTuple, TypeAlias

from webhookd.store.connection import Connection

Row: TypeAlias = dict[str, Any]

# What the planner would take instead when it expects few rows: all of a range, sorted.
# Without JIT: up to PostgreSQL 17 a plan that needs what is forbidden seems dear enough to compile.
_BY_INDEX = """
    set local enable_sort = off; set local enable_bitmapscan = off; set local enable_seqscan = off;
    set local jit = off"""


class Page(NamedTuple):
    """So many rows, after the one with this id; None: from the newest on."""

    limit: int
    after_id: int | None = None


class Range(NamedTuple):
    """A part of an index: the values of its first columns, and bounds of the column after them."""

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


def condition(part: Range, mark: tuple[object, ...] | None, arguments: Arguments) -> str:
    """What a row of the range fulfils; with a mark, the values of the columns after `equal`, one after it."""
    tests = []
    lower = part.equal if part.at_least is None else (*part.equal, part.at_least)
    if lower:
        tests.append(_compared(part.columns, ">=", lower, arguments))
    uppers = [(*part.equal, part.below)] if part.below is not None else []
    if mark is not None:
        uppers.append((*part.equal, *mark))
    if uppers:
        # One bound and not both: a scan may begin at either, and pass over all between them. At the same
        # value the shorter one is the lower, for it leaves out all that begin with it: as tuples compare.
        tests.append(_compared(part.columns, "<", min(uppers), arguments))
    elif part.equal:
        tests.append(_compared(part.columns, "<=", part.equal, arguments))
    return " and ".join(tests) or "true"


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
