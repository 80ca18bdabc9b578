"""Takes a guard out of the database, to see that the test which relies on it then fails."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.database import Connection


@dataclass(frozen=True)
class Weakened:
    """A function without a piece of its text."""

    function: str
    guard: str
    instead: str = ""

    def __str__(self) -> str:
        return f"{self.function} without `{' '.join(self.guard.split())}`"

    async def take_away(self, superuser: "Connection") -> None:
        """Replace the function by one that lacks the guard."""
        definition: str = await superuser.fetchval(
            "select pg_get_functiondef(oid) from pg_proc where proname = $1", self.function
        )
        if (
            self.guard not in definition
        ):  # no AssertionError: whoever looks for mistakes takes that for a find
            raise LookupError(f"{self.function} has no such guard any more: {self.guard}")
        await superuser.execute(definition.replace(self.guard, self.instead))


@dataclass(frozen=True)
class Dropped:
    """A database without a unique index, and without the clause that counts on it."""

    index: str
    clause: str
    functions: tuple[str, ...]

    def __str__(self) -> str:
        return f"no {self.index}"

    async def take_away(self, superuser: "Connection") -> None:
        """Drop the index."""
        await superuser.execute(f"drop index webhookd.{self.index}")
        for function in self.functions:
            await Weakened(function, self.clause).take_away(superuser)


# What loads a payload after the claim's commit waits while somebody holds it, and a claim does not.
HOLDABLE_LOADING = Weakened(
    "load_deliveries",
    "perform require(small_only",
    "perform pg_advisory_xact_lock_shared(7) where not small_only; perform require(small_only",
)
HOLD_LOADING = "select pg_advisory_xact_lock(7)"
