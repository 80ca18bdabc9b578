"""After the faults: waits until all deliveries have ended, then finds broken promises and counts effects."""

import asyncio
import json
import math
from collections import Counter
from typing import TYPE_CHECKING, Any

from tests.faults.bed import Bed
from tests.faults.instance import LEASE_SECONDS, Instance
from tests.faults.plan import Scenario
from tests.faults.verbs import RECOVERY_SECONDS
from tests.support.invariants import MATERIALIZE, broken_rows, is_removing, with_removed
from tests.support.traffic import record

if TYPE_CHECKING:
    from tests.support.database import Connection

# All sagas have ended, including the retries to failing endpoints.
QUIET = """
    select not exists (select from webhookd.event_routing_queue)
        and not exists (select from webhookd.webhook_delivery_sagas
                        where status not in ('Completed', 'DeadLettered'))
"""
# More requests than results: each was caused by an expired lease. A second 2xx: caused by a lost answer.
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
           (select count(*) from public.removed_events) as events_removed,
           (select count(*) from public.removed_dead_letters) as dead_letters_removed,
           (select count(*) from webhookd.webhook_delivery_sagas) as deliveries,
           (select count(*) from webhookd.webhook_delivery_sagas where dead_letter_id is not null)
               as requeued_dead_letters,
           (select count(distinct s.id) from public.resends r
            join webhookd.webhook_delivery_sagas s on s.id = r.new_saga_id and s.status = 'Completed')
               as resent_deliveries,
           -- I2 requires a saga for each, and I5 that none is sent before the end of the pause.
           (select count(*) from public.holds h
            join webhookd.subscriptions u on u.id = h.subscription_id
            join webhookd.events e on e.event_type = u.event_type and e.created_at between h.since and h.until
            join webhookd.webhook_delivery_sagas s
                on s.event_id = e.id and s.subscription_id = u.id and s.resent_from is null
            where h.kind = 'paused' and s.status = 'Completed') as events_while_paused
"""
FAILURES = """
    select 'failed_' || error_code as code, count(*) from webhookd.webhook_delivery_jobs
    where status = 'Failed' group by 1
"""
HOLD_ALWAYS = ("I3", "I4", "I5", "I8", "resend:")
MAX_RESIDENT_BYTES = 256 * 1024 * 1024


async def check(bed: Bed, scenario: Scenario) -> None:
    """Add the problems and effects to the test bed."""
    await bed.until(QUIET)
    bed.problems += await not_ready(bed)
    async with bed.superuser() as superuser:
        if await is_removing(superuser):
            async with superuser.transaction(isolation="repeatable_read"):
                await superuser.execute(MATERIALIZE)
        await record(superuser, bed.publisher, bed.receiver.rows() + bad_receipts(bed))
        await bed.support.record(superuser)
        await superuser.execute("analyze")  # the invariants join tables that were just filled
        bed.problems += await broken(bed, superuser)
        bed.effects += Counter(await facts(superuser))
    bed.effects += Counter(observed_effects(bed))
    if unexplained := bed.effects.pop("duplicates_unexplained", 0):
        bed.problems.append(f"{unexplained} duplicates without an expired lease or a lost answer")
    bed.problems += requests_at_old_addresses(bed)
    bed.problems += [f"/healthz failed: {failure}" for failure in bed.watch.health_failures()]
    bed.problems += [f"/readyz was wrong: {answer}" for answer in bed.watch.false_ready()]
    bed.problems += await failed_shutdowns(bed)
    bed.problems += logged_errors(bed, scenario)
    if bed.watch.max_resident_bytes > MAX_RESIDENT_BYTES:
        bed.problems.append(f"an instance grew to {bed.watch.max_resident_bytes >> 20} MiB")
    bed.problems += [f"no effect: {name} is 0" for name in scenario.effects if not bed.effects[name]]
    bed.problems += [
        f"{bed.effects[name]} {name}, expected none" for name in scenario.forbidden if bed.effects[name]
    ]


async def broken(bed: Bed, superuser: "Connection", only: tuple[str, ...] = ()) -> list[str]:
    """Name each broken invariant; its first rows are written to broken.txt."""
    rows = await broken_rows(superuser, only)
    with (bed.folder / "broken.txt").open("a") as kept:
        for name, found in rows.items():
            kept.writelines([f"{name}\n", *(f"  {dict(row)}\n" for row in found)])
    return list(rows)


async def broken_under_load(bed: Bed) -> list[str]:
    """Name each broken invariant of those that must always hold, all checked in one snapshot."""
    async with (
        bed.superuser() as superuser,
        superuser.transaction(isolation="repeatable_read", readonly=True),
    ):
        return [f"under load: {name}" for name in await broken(bed, superuser, HOLD_ALWAYS)]


async def facts(superuser: "Connection") -> dict[str, int]:
    """Count effects in the database."""
    found = await superuser.fetchrow(await with_removed(superuser, FACTS))
    duplicates = await superuser.fetchrow(await with_removed(superuser, DUPLICATES))
    assert found is not None
    assert duplicates is not None
    failures = {
        row["code"]: row["count"] for row in await superuser.fetch(await with_removed(superuser, FAILURES))
    }
    counts = failures | {f"duplicates_{name}": int(value) for name, value in duplicates.items()}
    counts["duplicate_requests"] = counts["duplicates_by_lease"] + counts["duplicates_by_lost_answer"]
    return counts | {name: int(value) for name, value in found.items()}


def observed_effects(bed: Bed) -> dict[str, int]:
    """Count effects seen by the proxies, the publisher, the watch and the instances."""
    wires = [instance.wire for instance in bed.instances if not bed.needs.standby]
    stale = sum(
        instance.daemon.metric("webhookd_delivery_reports_total", verdict="stale") for instance in bed.running
    )
    restarts = sum(instance.daemon.metric("webhookd_service_restarts_total") for instance in bed.running)
    return {
        "connections_broken": sum(wire.broken for wire in wires),
        "acknowledgements_lost": sum(wire.answers_lost for wire in wires),
        "failed_publishes": sum(bed.publisher.rejections.values()),
        "recognised_publishes": bed.publisher.duplicates,
        "unready_probes": sum(observed.unready for observed in bed.watch.observed.values()),
        "repeated_requests": bed.support.repeats,
        "requests_after_move": sum(
            receipt.request.path in bed.support.new_paths for receipt in bed.receiver.receipts
        ),
        "services_restarted": int(restarts),
        "stale_reports": int(stale),
    }


async def not_ready(bed: Bed) -> list[str]:
    """Name each instance that does not become ready within the recovery limit of the database."""

    async def is_ready(instance: Instance) -> bool:
        try:
            async with asyncio.timeout(RECOVERY_SECONDS):
                await instance.until_ready()
        except (TimeoutError, AssertionError):
            return False
        return True

    ready = await asyncio.gather(*(is_ready(instance) for instance in bed.instances))
    return [f"instance {number} is not ready at the end" for number, done in enumerate(ready) if not done]


async def failed_shutdowns(bed: Bed) -> list[str]:
    """Stop every instance with SIGTERM; name each one with an exit code other than 0."""
    codes = await asyncio.gather(*(instance.stop_gracefully() for instance in bed.instances))
    return [f"instance {number}: exit code {code} after SIGTERM" for number, code in enumerate(codes) if code]


def bad_receipts(bed: Bed) -> list[tuple[object, ...]]:
    """Return the requests to bad endpoints, if the scenario has any."""
    rows: list[tuple[object, ...]] = bed.state.get("bad_receipts", [])
    return rows


def requests_at_old_addresses(bed: Bed) -> list[str]:
    """List requests that came to an address after every lease from the time before the move."""
    left = bed.support.moved_paths
    return [
        f"{request.path}: a request {request.received_at - left[request.path]:.1f} s after the move"
        for request in (receipt.request for receipt in bed.receiver.receipts)
        if request.received_at > left.get(request.path, math.inf) + LEASE_SECONDS
    ]


def logged_errors(bed: Bed, scenario: Scenario) -> list[str]:
    """List errors in the logs. A lost database and a failing endpoint are not logged as errors."""
    found: Counter[str] = Counter()
    for instance in bed.instances:
        for text in instance.log_lines():
            try:
                line: dict[str, Any] = json.loads(text)
                level = line["level"]
            except (ValueError, TypeError, KeyError):
                found[f"instance {instance.number} wrote a line that is not JSON: {text[:200]}"] += 1
                continue
            if level == "error" and not any(piece in text for piece in scenario.may_log):
                last = str(line.get("exception", "")).strip().splitlines()[-1:]
                found[" ".join([f"instance {instance.number} logged:", line["message"], *last])] += 1
    return [f"{error} ({count} times)" for error, count in found.items()]
