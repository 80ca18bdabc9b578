"""Removes a guard from the database, to show that a test fails without it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.database import Connection


@dataclass(frozen=True)
class Weakened:
    """A function without a part of its text."""

    function: str
    guard: str
    instead: str = ""

    def __str__(self) -> str:
        return f"{self.function} without `{' '.join(self.guard.split())}`"

    async def take_away(self, superuser: "Connection") -> None:
        """Replace the function by a version without the guard."""
        definition: str = await superuser.fetchval(
            "select pg_get_functiondef(oid) from pg_proc where proname = $1", self.function
        )
        # Not an AssertionError: a search for mistakes would count it as found.
        if self.guard not in definition:
            raise LookupError(f"{self.function} no longer has the guard: {self.guard}")
        await superuser.execute(definition.replace(self.guard, self.instead))


@dataclass(frozen=True)
class Dropped:
    """A database without a unique index, and functions without the ON CONFLICT clause that needs it."""

    index: str
    clause: str
    functions: tuple[str, ...]

    def __str__(self) -> str:
        return f"no {self.index}"

    async def take_away(self, superuser: "Connection") -> None:
        """Drop the index and remove the clause."""
        await superuser.execute(f"drop index webhookd.{self.index}")
        for function in self.functions:
            await Weakened(function, self.clause).take_away(superuser)


# Loading a payload after a claim waits while a test holds the advisory lock; a claim does not wait.
HOLDABLE_LOADING = Weakened(
    "load_payloads",
    "perform require(",
    "perform pg_advisory_xact_lock_shared(7); perform require(",
)
HOLD_LOADING = "select pg_advisory_xact_lock(7)"
