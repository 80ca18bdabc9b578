"""Calls the gated functions of the job queue, and creates jobs in any of the nine states.

Uses the daemon's login, which may call what workflow_admin may, and a superuser to simulate time.
"""

import itertools
import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from tests.support.database import Connection, Database

Answer: TypeAlias = dict[str, Any]

KIND = "report.build"
EXECUTOR = "DOT"
ACTOR = "tests"
TTL_SECONDS = 60


class Status(StrEnum):
    """The nine states, in the order of DP2."""

    QUEUED = "queued"
    LEASED = "leased"
    IN_PROGRESS = "in_progress"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    RETRY_WAITING = "retry_waiting"
    DEAD_LETTER = "dead_letter"
    CANCELLED = "cancelled"
    CLEANED = "cleaned"


@dataclass
class JobQueue:
    """One client that enqueues and executes jobs."""

    daemon: "Connection"
    superuser: "Connection"
    _keys: "itertools.count[int]" = field(default_factory=itertools.count)

    @classmethod
    async def open(cls, database: "Database", *, enabled: bool = True) -> "JobQueue":
        """Connect and enable the job queue."""
        queue = cls(await database.connect("daemon"), await database.connect("superuser"))
        if enabled:
            await queue.call("fn_job_enable", p_enabled=True, p_actor=ACTOR)
        return queue

    async def call(self, function: str, **arguments: object) -> Answer:
        """Call a gated function; returns its decoded answer."""
        given = ", ".join(f"{name} => ${place}" for place, name in enumerate(arguments, 1))
        answer: str = await self.daemon.fetchval(f"select webhookd.{function}({given})", *arguments.values())
        decoded: Answer = json.loads(answer)
        return decoded

    # Enqueue and operate -----------------------------------------------------------------------------------

    async def try_enqueue(self, key: str | None = None, **more: object) -> Answer:
        """Enqueue a job, with a new key unless given."""
        arguments = {"p_kind": KIND, "p_executor": EXECUTOR, "p_actor": ACTOR} | more
        arguments["p_idempotency_key"] = key or f"key-{next(self._keys)}"
        return await self.call("fn_job_enqueue", **arguments)

    async def enqueue(self, key: str | None = None, **more: object) -> str:
        """Enqueue a new job; returns its id."""
        answer = await self.try_enqueue(key, **more)
        assert (answer["refused"], answer["duplicate"]) == (False, False), answer
        return str(answer["job_id"])

    async def cancel(self, job_id: str, reason: str = "not needed") -> Answer:
        """Cancel a job."""
        return await self.call("fn_job_cancel", p_job_id=job_id, p_reason=reason, p_actor=ACTOR)

    async def requeue(self, job_id: str) -> Answer:
        """Requeue a dead letter."""
        return await self.call("fn_job_requeue", p_job_id=job_id, p_actor=ACTOR)

    async def configure(self, kind: str | None = None, **numbers: float | None) -> Answer:
        """Change the default policy, or the policy of one kind."""
        return await self.call("fn_job_configure", p_settings=json.dumps(numbers), p_actor=ACTOR, p_kind=kind)

    async def open_workflow(self) -> str:
        """Open a workflow; returns its id."""
        answer = await self.call(
            "fn_job_workflow_open", p_workflow_kind="pipeline", p_generator="MOT:template", p_actor=ACTOR
        )
        return str(answer["workflow_id"])

    # Execute -----------------------------------------------------------------------------------------------

    async def try_claim(
        self,
        kind: str = KIND,
        executor: str = EXECUTOR,
        holder: str = "holder",
        ttl: float = TTL_SECONDS,
        actor: str | None = None,
    ) -> Answer:
        """Claim the next job; the answer may be a refusal."""
        return await self.call(
            "fn_job_claim",
            p_kind=kind,
            p_executor=executor,
            p_lease_name="lease",
            p_lease_holder=holder,
            p_lease_ttl_seconds=ttl,
            p_actor=actor,
        )

    async def claim(self, **options: Any) -> Answer:
        """Claim the next job; there must be one."""
        answer = await self.try_claim(**options)
        assert answer["refused"] is False, answer
        return answer

    async def progress(self, lease: Answer, signal: str | None = None) -> Answer:
        """Report progress."""
        return await self.call(
            "fn_job_progress",
            p_job_id=lease["job_id"],
            p_status_signal_only=signal,
            p_lease_token=lease["lease_token"],
            p_actor=ACTOR,
        )

    async def succeed(self, lease: Answer, result_ref: str | None = None) -> Answer:
        """Report success."""
        return await self.call(
            "fn_job_succeed",
            p_job_id=lease["job_id"],
            p_lease_token=lease["lease_token"],
            p_result_ref=result_ref,
            p_actor=ACTOR,
        )

    async def fail(
        self,
        lease: Answer,
        code: str | None = "BROKEN",
        *,
        permanent: bool = False,
        message: str = "it broke",
    ) -> Answer:
        """Report a failure."""
        return await self.call(
            "fn_job_fail_permanent" if permanent else "fn_job_fail_transient",
            p_job_id=lease["job_id"],
            p_lease_token=lease["lease_token"],
            p_error_code=code,
            p_error_message=message,
            p_actor=ACTOR,
        )

    # Time --------------------------------------------------------------------------------------------------

    async def reap(self, batch_size: int = 1000) -> Answer:
        """Run the reaper."""
        return await self.call("fn_job_lease_reaper", p_batch_size=batch_size)

    async def sweep(self) -> Answer:
        """Run the retention sweep."""
        return await self.call("fn_job_cleanup_sweep")

    async def expire(self, job_id: str) -> None:
        """Move the end of a lease into the past."""
        await self.superuser.execute(
            "update webhookd.job_queue set leased_until = now() - interval '1 second' where job_id = $1",
            job_id,
        )

    async def make_retries_due(self) -> None:
        """Make all retries due now."""
        await self.superuser.execute(
            "update webhookd.job_queue set process_after = now() where status = 'retry_waiting'"
        )

    async def let_deadline_pass(self, job_id: str) -> None:
        """Move a deadline into the past, without the trigger that forbids it."""
        async with self.superuser.transaction():
            await self.superuser.execute("set local session_replication_role = replica")
            await self.superuser.execute(
                "update webhookd.job_queue set deadline_at = now() - interval '1 second' where job_id = $1",
                job_id,
            )

    # Inspect -----------------------------------------------------------------------------------------------

    async def row(self, job_id: str) -> Answer:
        """The stored row, with the lease token, which only a superuser can read."""
        row = await self.superuser.fetchrow("select * from webhookd.job_queue where job_id = $1", job_id)
        assert row is not None
        return dict(row)

    async def status(self, job_id: str) -> Status:
        """The status of a job."""
        return Status((await self.row(job_id))["status"])

    async def job_in(self, status: Status, **more: Any) -> str:
        """A new job, brought to this status by the functions; not `failed`, which no commit leaves."""
        kind = f"{KIND}.{next(self._keys)}"  # a kind of its own, so that no other job is claimed
        job_id = await self.enqueue(p_kind=kind, **more)
        if status is Status.QUEUED:
            return job_id
        if status in {Status.CANCELLED, Status.CLEANED}:
            await self.cancel(job_id)
        else:
            lease = await self.claim(kind=kind)
            match status:
                case Status.IN_PROGRESS:
                    await self.progress(lease)
                case Status.SUCCEEDED:
                    await self.succeed(lease)
                case Status.RETRY_WAITING:
                    await self.fail(lease)
                case Status.DEAD_LETTER:
                    await self.fail(lease, permanent=True)
        if status is Status.CLEANED:
            await self.configure(kind, retention_seconds=0)
            assert (await self.sweep())["cleaned"] >= 1
        assert await self.status(job_id) is status
        return job_id

    async def events(self, job_id: str) -> list[str]:
        """The types of the events about a job, in order, without the prefix dot.job."""
        rows = await self.daemon.fetch(
            "select event_type from webhookd.events where payload ->> 'job_id' = $1 order by id", job_id
        )
        return [row["event_type"].removeprefix("dot.job.") for row in rows]

    async def ledger(self, job_id: str) -> list[tuple[str, str | None, str]]:
        """Command, old and new status of each ledger row of a job."""
        rows = await self.daemon.fetch(
            "select command, from_status, to_status from webhookd.job_command_run "
            "where job_id = $1 order by run_id",
            job_id,
        )
        return [tuple(row) for row in rows]

    async def workflow_status(self, workflow_id: str) -> str:
        """The status of a workflow."""
        status: str = await self.daemon.fetchval(
            "select status from webhookd.job_workflow where workflow_id = $1", workflow_id
        )
        return status
