"""What an action can do: verbs by their names. Those here wait and look; each family adds its own."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tests.faults.bed import Bed
from tests.support.processes import processor_seconds
from tests.support.waiting import until_true
from webhookd.db.listener import HEARTBEAT_INTERVAL_SECONDS, HEARTBEAT_TIMEOUT_SECONDS

# A fault tells how much it hit, where that can be nothing.
Verb = Callable[..., Awaitable[int | None]]
Function = TypeVar("Function", bound=Verb)

VERBS: dict[str, Verb] = {}
# After these something is whole again, and the invariants that hold at every moment are looked at.
HEALS: set[str] = set()

# P10: what the database's return may take.
RETURN_SECONDS = 10.0
# A listener's beat just made, and the next not answered: by then an instance knows that its database is gone.
NOTICED_SECONDS = HEARTBEAT_INTERVAL_SECONDS + HEARTBEAT_TIMEOUT_SECONDS
MAX_IDLE_SHARE = 0.05


def verb(function: Function) -> Function:
    """Make a function what an action of its name does."""
    VERBS[function.__name__] = function
    return function


def heal(function: Function) -> Function:
    """A verb after which something is whole again."""
    HEALS.add(function.__name__)
    return verb(function)


@verb
async def accepted(bed: Bed, *, more: int) -> None:
    """Wait until so many more events were acknowledged."""
    await bed.publisher.accepted(more)


@verb
async def delivered(bed: Bed, *, more: int) -> None:
    """Wait until so many more requests came to the good receiver."""
    await bed.receiver.received(more)


@verb
async def refused(bed: Bed, *, more: int) -> None:
    """Wait until so many more publications were answered with 503."""
    await bed.publisher.refused(more)


@verb
async def wait(_: Bed, *, seconds: float) -> None:
    """Let time pass."""
    await asyncio.sleep(seconds)


@verb
async def all_unready(bed: Bed) -> None:
    """Every instance without a database comes to say so, in time; that it stays so, the watch sees."""
    for seen in bed.watch.seen.values():
        if seen.away_since is None:
            continue
        await until_true(seen.said_unready)
        first = seen.first_unready()
        assert first is not None
        bed.recovered(
            "the database away: /readyz says so", seen.away_since, NOTICED_SECONDS, first.answered_at
        )


@verb
async def all_ready(bed: Bed) -> None:
    """Every instance comes to say that it is ready, and it is."""
    await asyncio.gather(*(instance.until_ready() for instance in bed.living))


@heal
async def database_is_used(bed: Bed) -> None:
    """The database is back, as of now: the time until events are taken, delivered, and all are ready."""
    began = time.monotonic()
    await until_true(lambda: bed.publisher.last_accepted_at > began)
    bed.recovered("the database's return: first event accepted", began, RETURN_SECONDS)
    receipts = len(bed.receiver.receipts)
    await until_true(lambda: len(bed.receiver.receipts) > receipts)
    bed.recovered("the database's return: next delivery", began, RETURN_SECONDS)
    await all_ready(bed)
    bed.recovered("the database's return: every instance ready", began, RETURN_SECONDS)


@verb
async def idle(bed: Bed, *, seconds: float) -> None:
    """Measure what instances do that have no database and are asked nothing but their health."""
    bed.publisher.pause()
    await asyncio.sleep(1)  # what was asked is answered
    processes = [instance.daemon.process.pid for instance in bed.living]
    before = [processor_seconds(process) for process in processes]
    began = time.monotonic()
    await asyncio.sleep(seconds)
    elapsed = time.monotonic() - began
    shares = [
        (processor_seconds(process) - used) / elapsed for process, used in zip(processes, before, strict=True)
    ]
    bed.publisher.resume()
    bed.idle_shares += shares
    bed.problems += [
        f"{share:.1%} of a processor without a database" for share in shares if share >= MAX_IDLE_SHARE
    ]
