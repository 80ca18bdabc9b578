"""The verbs of actions, by name. The verbs here wait and measure; each scenario module adds its own."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tests.faults.bed import Bed
from tests.support.processes import processor_seconds
from tests.support.waiting import until_true
from webhookd.wakeups import HEARTBEAT_INTERVAL_SECONDS, HEARTBEAT_TIMEOUT_SECONDS

# A fault that can have no effect returns how many things it affected.
Verb = Callable[..., Awaitable[int | None]]
Function = TypeVar("Function", bound=Verb)

VERBS: dict[str, Verb] = {}
# After these verbs a fault is repaired, and the invariants that must always hold are checked.
HEALS: set[str] = set()

# P10: the limit for recovery after the database is back.
RECOVERY_SECONDS = 10.0
# The worst case until an instance notices the loss: a heartbeat has just succeeded, and the next times out.
NOTICE_SECONDS = HEARTBEAT_INTERVAL_SECONDS + HEARTBEAT_TIMEOUT_SECONDS
MAX_IDLE_SHARE = 0.05


def verb(function: Function) -> Function:
    """Register a function as the verb of its name."""
    VERBS[function.__name__] = function
    return function


def heal(function: Function) -> Function:
    """Register a verb after which a fault is repaired."""
    HEALS.add(function.__name__)
    return verb(function)


@verb
async def accepted(bed: Bed, *, more: int) -> None:
    """Wait until this many more events are acknowledged."""
    await bed.publisher.accepted(more)


@verb
async def delivered(bed: Bed, *, more: int) -> None:
    """Wait until the good receiver gets this many more requests."""
    await bed.receiver.received(more)


@verb
async def refused(bed: Bed, *, more: int) -> None:
    """Wait until this many more publish requests are answered with 503."""
    await bed.publisher.refused(more)


@verb
async def wait(_: Bed, *, seconds: float) -> None:
    """Let time pass."""
    await asyncio.sleep(seconds)


@verb
async def all_unready(bed: Bed) -> None:
    """Wait until every instance without a database reports it, in time; the watch checks that it stays so."""
    for observed in bed.watch.observed.values():
        if observed.database_lost_at is None:
            continue
        await until_true(observed.reported_unready)
        first = observed.first_unready()
        assert first is not None
        bed.record_recovery(
            "database lost: /readyz reports it", observed.database_lost_at, NOTICE_SECONDS, first.answered_at
        )


@verb
async def all_ready(bed: Bed) -> None:
    """Wait until every instance is ready."""
    await asyncio.gather(*(instance.until_ready() for instance in bed.running))


@heal
async def database_recovers(bed: Bed) -> None:
    """Measure, from now, how long until an event is accepted, one is delivered, and all are ready."""
    started = time.monotonic()
    await until_true(lambda: bed.publisher.last_accepted_at > started)
    bed.record_recovery("database back: first event accepted", started, RECOVERY_SECONDS)
    receipts = len(bed.receiver.receipts)
    await until_true(lambda: len(bed.receiver.receipts) > receipts)
    bed.record_recovery("database back: next delivery", started, RECOVERY_SECONDS)
    await all_ready(bed)
    bed.record_recovery("database back: every instance ready", started, RECOVERY_SECONDS)


@verb
async def measure_idle_cpu(bed: Bed, *, seconds: float) -> None:
    """Measure the CPU use of instances that have no database and get only health requests."""
    bed.publisher.pause()
    await asyncio.sleep(1)  # until open requests are answered
    processes = [instance.daemon.process.pid for instance in bed.running]
    before = [processor_seconds(process) for process in processes]
    started = time.monotonic()
    await asyncio.sleep(seconds)
    elapsed = time.monotonic() - started
    shares = [
        (processor_seconds(process) - used) / elapsed for process, used in zip(processes, before, strict=True)
    ]
    bed.publisher.resume()
    bed.idle_shares += shares
    bed.problems += [f"{share:.1%} CPU use without a database" for share in shares if share >= MAX_IDLE_SHARE]
