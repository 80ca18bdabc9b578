"""After the faults: waits for quiet, and tells what was promised and not kept, and what the faults did."""

import asyncio
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from tests.faults.bed import Bed
from tests.faults.instance import Instance
from tests.faults.plan import Scenario
from tests.faults.verbs import RETURN_SECONDS
from tests.support.invariants import broken_rows
from tests.support.traffic import record

if TYPE_CHECKING:
    from tests.support.database import Connection

# Nothing waits, not even a dead endpoint's retries: all sagas have ended.
QUIET = """
    select not exists (select from webhookd.event_routing_queue)
        and not exists (select from webhookd.webhook_delivery_sagas
                        where status not in ('Completed', 'DeadLettered'))
"""
# More requests than results came of leases that expired; a second 2xx, of an answer that was lost.
DUPLICATES = """
    with of_saga as (
        select r.requests, r.answered, j.finished, j.unanswered, j.resets,
               greatest(r.requests - j.finished, 0) as by_lease
        from (select saga_id, count(*) as requests,
                     count(*) filter (where response_status between 200 and 299) as answered
              from public.receipts group by saga_id) r
        join (select saga_id, count(*) filter (where finished_at is not null) as finished,
                     count(*) filter (where status = 'Failed' and response_status is null) as unanswered,
                     sum(lease_resets) as resets
              from webhookd.webhook_delivery_jobs group by saga_id) j using (saga_id)),
    extra as (
        select by_lease, resets, unanswered, greatest(answered - 1 - by_lease, 0) as by_lost_answer
        from of_saga)
    select coalesce(sum(by_lease), 0)::bigint as by_lease,
           coalesce(sum(by_lost_answer), 0)::bigint as by_lost_answer,
           coalesce(sum(greatest(by_lease - resets, 0)
                        + greatest(by_lost_answer - unanswered, 0)), 0)::bigint as unexplained
    from extra
"""
FACTS = """
    select (select coalesce(sum(lease_resets), 0) from webhookd.webhook_delivery_jobs)
            + (select count(*) from webhookd.webhook_delivery_jobs where error_code = 'LEASE_EXPIRED')
               as leases_expired,
           (select count(*) from webhookd.webhook_delivery_jobs where status = 'Failed') as attempts_failed,
           (select count(*) from webhookd.dead_letters) as dead_letters,
           (select count(*) from webhookd.webhook_delivery_sagas) as deliveries
"""
FAILURES = """
    select 'failed_' || error_code as code, count(*) from webhookd.webhook_delivery_jobs
    where status = 'Failed' group by 1
"""
AT_EVERY_MOMENT = ("I3", "I4", "I5", "I8")
MAX_RESIDENT_BYTES = 256 * 1024 * 1024


async def check(bed: Bed, scenario: Scenario) -> None:
    """Fill in the bed's problems and effects."""
    await bed.until(QUIET)
    bed.problems += await not_ready(bed)
    async with bed.superuser() as superuser:
        await record(superuser, bed.publisher, bed.receiver.rows() + bad_receipts(bed))
        bed.problems += await broken(bed, superuser)
        bed.effects += Counter(await facts(superuser))
    bed.effects += Counter(counted(bed))
    if unexplained := bed.effects.pop("duplicates_unexplained", 0):
        bed.problems.append(f"{unexplained} duplicates without a lease expiry or a lost answer")
    bed.problems += [f"no answer to /healthz: {silence}" for silence in bed.watch.silences()]
    bed.problems += [f"/readyz did not tell the truth: {untruth}" for untruth in bed.watch.untruths()]
    bed.problems += await ended_in_order(bed)
    bed.problems += own_errors(bed, scenario)
    if bed.watch.most_resident_bytes > MAX_RESIDENT_BYTES:
        bed.problems.append(f"an instance grew to {bed.watch.most_resident_bytes >> 20} MiB")
    bed.problems += [f"no effect: {name} is 0" for name in scenario.effects if not bed.effects[name]]
    bed.problems += [
        f"{bed.effects[name]} {name}, where there should be none"
        for name in scenario.forbidden
        if bed.effects[name]
    ]


async def broken(bed: Bed, superuser: "Connection", only: tuple[str, ...] = ()) -> list[str]:
    """Each invariant that does not hold, its first rows kept beside the logs."""
    rows = await broken_rows(superuser, only)
    with (bed.folder / "broken.txt").open("a") as kept:
        for name, found in rows.items():
            kept.writelines([f"{name}\n", *(f"  {dict(row)}\n" for row in found)])
    return list(rows)


async def broken_meanwhile(bed: Bed) -> list[str]:
    """Which of those that hold at every moment do not at this one: all asked of one snapshot."""
    async with (
        bed.superuser() as superuser,
        superuser.transaction(isolation="repeatable_read", readonly=True),
    ):
        return [f"under load: {name}" for name in await broken(bed, superuser, AT_EVERY_MOMENT)]


async def facts(superuser: "Connection") -> dict[str, int]:
    """What the database can tell of the faults' effects."""
    found = await superuser.fetchrow(FACTS)
    duplicates = await superuser.fetchrow(DUPLICATES)
    assert found is not None
    assert duplicates is not None
    failures = {row["code"]: row["count"] for row in await superuser.fetch(FAILURES)}
    told = failures | {f"duplicates_{name}": int(value) for name, value in duplicates.items()}
    told["requests_doubled"] = told["duplicates_by_lease"] + told["duplicates_by_lost_answer"]
    return told | {name: int(value) for name, value in found.items()}


def counted(bed: Bed) -> dict[str, int]:
    """What everybody else can tell."""
    wires = [instance.wire for instance in bed.instances if not bed.needs.standby]
    stale = sum(
        instance.daemon.metric("webhookd_delivery_reports_total", verdict="stale") for instance in bed.living
    )
    restarts = sum(instance.daemon.metric("webhookd_service_restarts_total") for instance in bed.living)
    return {
        "connections_broken": sum(wire.broken for wire in wires),
        "acknowledgements_lost": sum(wire.answers_lost for wire in wires),
        "turned_away": sum(bed.publisher.rejections.values()),
        "known_already": bed.publisher.duplicates,
        "looks_unready": sum(seen.unready for seen in bed.watch.seen.values()),
        "services_restarted": int(restarts),
        "reports_stale": int(stale),
    }


async def not_ready(bed: Bed) -> list[str]:
    """Who does not say that it is ready, in the time that the database's return may take."""

    async def is_ready(instance: Instance) -> bool:
        try:
            async with asyncio.timeout(RETURN_SECONDS):
                await instance.until_ready()
        except (TimeoutError, AssertionError):
            return False
        return True

    ready = await asyncio.gather(*(is_ready(instance) for instance in bed.instances))
    return [f"instance {number} is not ready at the end" for number, is_so in enumerate(ready) if not is_so]


async def ended_in_order(bed: Bed) -> list[str]:
    """Who does not end as it should when it is asked to."""
    codes = await asyncio.gather(*(instance.stop_in_order() for instance in bed.instances))
    return [f"instance {number} ended with {code} at SIGTERM" for number, code in enumerate(codes) if code]


def bad_receipts(bed: Bed) -> list[tuple[object, ...]]:
    """What came to the failing endpoints, as far as a scenario has any."""
    rows: list[tuple[object, ...]] = bed.kept.get("bad_receipts", [])
    return rows


def own_errors(bed: Bed, scenario: Scenario) -> list[str]:
    """What instances logged as errors: neither a database that is away is one, nor an endpoint that fails."""
    found: Counter[str] = Counter()
    for instance in bed.instances:
        for text in instance.lines():
            try:
                line: dict[str, Any] = json.loads(text)
                level = line["level"]
            except (ValueError, TypeError, KeyError):
                found[f"instance {instance.number} wrote what is no log line: {text[:200]}"] += 1
                continue
            if level == "error" and not any(piece in text for piece in scenario.may_log):
                last = str(line.get("exception", "")).strip().splitlines()[-1:]
                found[" ".join([f"instance {instance.number} logged:", line["message"], *last])] += 1
    return [f"{what} ({times} times)" for what, times in found.items()]
