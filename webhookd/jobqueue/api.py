"""The job queue's API for producers and operators: jobs, workflows, the switch, policies and registrations.

Executors use leases.py. Changing the job queue needs the scope `operate`; the other routes need `jobs`. The
code of a problem is the refusal's reason, unless another API has that code.
"""

from typing import Any

import msgspec
from aiohttp import web
from msgspec import UNSET

from webhookd.db.connection import Connection
from webhookd.db.paging import Row
from webhookd.http.auth import ACTOR
from webhookd.http.requests import (
    agreed_key,
    given,
    key_in_header,
    path_uuid,
    read_json,
    read_optional_json,
    read_query,
)
from webhookd.http.responses import Problem, invalid, json_response, list_response, not_found, raw_json
from webhookd.http.routes import ALREADY_EXISTS, UUID_ID, DatabaseResource, route
from webhookd.jobqueue import queries, reads, requests, results
from webhookd.jobqueue.fields import JobKeyHeader
from webhookd.jobqueue.queries import Value
from webhookd.wakeups import Work

CREATED = 201
DUPLICATE = 200
# 409, not 503: an operator disabled the queue, and nothing says that the same request may succeed soon.
DISABLED = (409, "job_substrate_disabled")

_DETAILS = {
    "job_substrate_disabled": "the job queue is disabled: enable it with `webhookd jobs enable`",
    "idempotency_conflict": "another job with different content has this kind and key",
    "stale_lease": "this lease token no longer holds the job: the lease expired, or the job is finished",
    "already_reported": "this lease already reported a different result, which counts",
    "running": "an executor holds the job; wait for its report or for the end of its lease",
    "finished": "the job has succeeded",
    "already_requeued": "the job was already requeued as job {job_id}",
    "not_dead_letter": "only a dead letter can be requeued",
    "workflow_conflict": "this workflow id exists with another kind or generator",
}
_MISSING = {
    "unknown_job": "no such job",
    "not_registered": "there is no registration for this event type and job kind",
}
_CODES = {"running": "job_running", "finished": "job_finished"}


def accepted(result: Value | results.JobRefusal) -> Value:
    """The result itself; raises a Problem for a refusal."""
    if not isinstance(result, results.JobRefusal):
        return result
    if result.reason in _MISSING:
        raise Problem(404, "not_found", _MISSING[result.reason])
    members: dict[str, Any] = {"job_id": result.job_id, "job_status": result.status}
    known = {name: value for name, value in members.items() if value is not None}
    code = _CODES.get(result.reason, result.reason)
    detail = _DETAILS.get(result.reason, result.reason).format(job_id=result.job_id)
    raise Problem(409, code, detail, **known)


class JobQueueResource(DatabaseResource):
    """Handlers that call the gated functions."""

    async def _call(
        self, request: web.Request, function: str, result: type[Value], /, **arguments: object
    ) -> Value:
        """Call a gated function in the name of the request's token; raises a Problem for a refusal."""
        outcome = await self._database.run(
            lambda connection: queries.call(connection, function, result, actor=request[ACTOR], **arguments)
        )
        return accepted(outcome)

    async def _job_arguments(self, request: web.Request, kind: type[Value]) -> dict[str, Any]:
        """The job's id from the path, and the fields of the body."""
        job_id = path_uuid(request, "job")
        body = await read_json(request, kind, self._max_bytes)
        return {"job_id": job_id} | msgspec.structs.asdict(body)

    def _moved(self, result: msgspec.Struct, status: int = 200) -> web.Response:
        """The response for a job that has a new state, which an event announces."""
        self._wakeups.wake(Work.EVENTS)
        return json_response(msgspec.structs.asdict(result), status)


class Jobs(JobQueueResource):
    """The job resource, without the routes for executors (leases.py)."""

    @route(
        "POST /v1/jobs",
        "jobs",
        "Enqueue a job",
        results.EnqueuedJob,
        CREATED,
        description="Answered after the commit. A key is required, in the body or in the header; if "
        "given in both, it must be the same. The same kind and key with the same content returns the "
        "existing job in its current state, with 200; with different content, 409. The content is "
        "executor, source_ref, target_ref, payload_ref, safe_payload, workflow_id and parent_job_id. "
        "Other fields of a repeated request are ignored.",
        body=requests.JobToEnqueue,
        headers={"Idempotency-Key": JobKeyHeader},
        other_responses={DUPLICATE: ALREADY_EXISTS},
        own_problems=(
            (404, "not_found"),
            (409, "idempotency_conflict"),
            DISABLED,
            (422, "idempotency_key_mismatch"),
        ),
    )
    async def _enqueue(self, request: web.Request) -> web.Response:
        in_header = key_in_header(request)
        job = await read_json(request, requests.NewJob, self._max_bytes)
        key = agreed_key(in_header, job.idempotency_key)
        if key is None:
            raise invalid("idempotency_key is required, in the body or as the header Idempotency-Key")
        payload = bytes(job.safe_payload).decode()
        fields = msgspec.structs.asdict(job) | {"idempotency_key": key, "safe_payload": payload}
        enqueued = await self._call(request, "fn_job_enqueue", results.EnqueuedJob, **fields)
        return self._moved(enqueued, DUPLICATE if enqueued.duplicate else CREATED)

    @route("GET /v1/jobs", "jobs", "List jobs", results.JobPage, query=requests.JobsQuery)
    async def _list(self, request: web.Request) -> web.Response:
        query = read_query(request, requests.JobsQuery)
        # One row more than the page shows whether there is a next page.
        rows = await self._database.run(
            lambda connection: reads.jobs(
                connection, query.limit + 1, given(query.cursor), given(query.status), given(query.kind)
            )
        )
        return list_response(rows, query.limit, key="job_id")

    @route(f"GET /v1/jobs/{UUID_ID}", "jobs", "Get a job and its transitions", results.JobWithRuns)
    async def _get(self, request: web.Request) -> web.Response:
        job_id = path_uuid(request, "job")
        found = await self._database.run(lambda connection: reads.job(connection, job_id))
        if found is None:
            raise not_found("job", job_id)
        payload, runs = raw_json(found["safe_payload"]), _with_raw_details(found["runs"])
        return json_response(found | {"safe_payload": payload, "runs": runs})

    @route(
        f"POST /v1/jobs/{UUID_ID}/cancel",
        "jobs",
        "Cancel a job that no executor holds",
        results.CancelledJob,
        description="Cancels a waiting job, or resolves a dead letter.",
        body=requests.CancelJob,
        own_problems=((409, "job_running"), (409, "job_finished"), (409, "already_requeued")),
    )
    async def _cancel(self, request: web.Request) -> web.Response:
        arguments = await self._job_arguments(request, requests.CancelJob)
        return self._moved(await self._call(request, "fn_job_cancel", results.CancelledJob, **arguments))

    @route(
        f"POST /v1/jobs/{UUID_ID}/requeue",
        "jobs",
        "Requeue a dead letter",
        results.RequeuedJob,
        CREATED,
        description="Creates a new job whose parent is the dead letter. Possible once: a repeated "
        "request gets 409 with the id of the new job.",
        body=requests.RequeueJob,
        body_optional=True,
        own_problems=((409, "already_requeued"), (409, "not_dead_letter"), DISABLED),
    )
    async def _requeue(self, request: web.Request) -> web.Response:
        job_id = path_uuid(request, "job")
        body = await read_optional_json(request, requests.RequeueJob, self._max_bytes)
        requeued = await self._call(
            request, "fn_job_requeue", results.RequeuedJob, job_id=job_id, deadline_at=body.deadline_at
        )
        return self._moved(requeued, CREATED)


class JobWorkflows(JobQueueResource):
    """The workflow resource. A workflow's status follows from its jobs, so it is only opened and shown."""

    @route(
        "POST /v1/job-workflows",
        "jobs",
        "Open a workflow",
        results.OpenedWorkflow,
        CREATED,
        description="Its jobs refer to it by `workflow_id`. Choose the id yourself to make a "
        "repeated request safe.",
        body=requests.NewWorkflow,
        other_responses={DUPLICATE: ALREADY_EXISTS},
        own_problems=((409, "workflow_conflict"), DISABLED),
    )
    async def _open(self, request: web.Request) -> web.Response:
        fields = msgspec.structs.asdict(await read_json(request, requests.NewWorkflow, self._max_bytes))
        opened = await self._call(request, "fn_job_workflow_open", results.OpenedWorkflow, **fields)
        return json_response(msgspec.structs.asdict(opened), DUPLICATE if opened.duplicate else CREATED)

    @route(f"GET /v1/job-workflows/{UUID_ID}", "jobs", "Get a workflow and its jobs", results.Workflow)
    async def _get(self, request: web.Request) -> web.Response:
        workflow_id = path_uuid(request, "workflow")
        found = await self._database.run(lambda connection: reads.workflow(connection, workflow_id))
        if found is None:
            raise not_found("workflow", workflow_id)
        return json_response(found)


class JobQueueSwitch(JobQueueResource):
    """The switch, the policies and the registrations."""

    @route(
        "GET /v1/job-substrate",
        "jobs",
        "Get the configuration and the counts of the job queue",
        results.JobQueueConfiguration,
    )
    async def _get(self, _: web.Request) -> web.Response:
        return json_response(await self._database.run(_configuration))

    @route(
        "PATCH /v1/job-substrate",
        "operate",
        "Enable or disable the job queue, or change its policies",
        results.JobQueueConfiguration,
        description="While it is disabled, no job is enqueued or claimed; running jobs can still "
        "finish. Settings in `[jobs]` of an instance's configuration file are written again when "
        "that instance starts.",
        body=requests.JobQueueChange,
    )
    async def _change(self, request: web.Request) -> web.Response:
        change = await read_json(request, requests.JobQueueChange, self._max_bytes)
        configuration = await self._database.run(
            lambda connection: _changed(connection, change, str(request[ACTOR]))
        )
        # Wakes all instances: the service rarely checks the switch while the queue is disabled.
        self._wakeups.wake(Work.EVENTS, notify=True)
        return json_response(configuration)

    @route(
        "POST /v1/job-registrations",
        "operate",
        "Create a job of one kind for each event of one type",
        results.JobRegistration,
        description="Applies to events published from now on. A repeated request replaces the "
        "executor and the priority. With `active: false` the registration is deactivated and "
        "otherwise unchanged; the answer shows its executor and priority.",
        body=requests.NewRegistration,
        own_problems=((404, "not_found"),),
    )
    async def _register(self, request: web.Request) -> web.Response:
        fields = msgspec.structs.asdict(await read_json(request, requests.NewRegistration, self._max_bytes))
        fields["kind"] = fields.pop("job_kind")
        registered = await self._call(request, "fn_job_register_event", results.JobRegistration, **fields)
        return json_response(msgspec.structs.asdict(registered))


async def _changed(connection: Connection, change: requests.JobQueueChange, actor: str) -> Row:
    """Apply all changes in one transaction."""
    async with connection.transaction():
        if change.policy is not UNSET:
            accepted(await queries.configure(connection, msgspec.to_builtins(change.policy), actor))
        if change.kind_policy is not UNSET:
            numbers = msgspec.to_builtins(change.kind_policy)
            kind = numbers.pop("job_kind")
            accepted(await queries.configure(connection, numbers, actor, kind))
        if change.enabled is not UNSET:
            await queries.enable(connection, actor, enabled=change.enabled)
    return await _configuration(connection)


async def _configuration(connection: Connection) -> Row:
    configuration = await reads.configuration(connection)
    decisions = _with_raw_details(configuration["decisions"])
    return configuration | {"decisions": decisions, "queue": await queries.health(connection)}


def _with_raw_details(ledger: list[Row]) -> list[Row]:
    return [row | {"detail": raw_json(row["detail"])} for row in ledger]
