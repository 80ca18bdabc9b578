"""/v1/jobs and /v1/job-workflows: enqueue, list, show, cancel and requeue jobs; open and show workflows."""

import msgspec
from aiohttp import web

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
from webhookd.http.responses import invalid, json_response, list_response, not_found, raw_json
from webhookd.http.routes import ALREADY_EXISTS, UUID_ID, DatabaseResource, route
from webhookd.jobqueue import queries, reads
from webhookd.jobqueue.api.problems import DISABLED, accepted
from webhookd.jobqueue.fields import JobKeyHeader
from webhookd.jobqueue.requests import CancelJob, JobsQuery, JobToEnqueue, NewJob, NewWorkflow, RequeueJob
from webhookd.jobqueue.results import (
    CancelledJob,
    EnqueuedJob,
    JobPage,
    JobWithRuns,
    OpenedWorkflow,
    RequeuedJob,
    Workflow,
)
from webhookd.wakeups import Work

CREATED = 201
DUPLICATE = 200


class Jobs(DatabaseResource):
    """The job resource, without the routes for executors (leases.py)."""

    @route(
        "POST /v1/jobs",
        "jobs",
        "Enqueue a job",
        EnqueuedJob,
        CREATED,
        description="Answered after the commit. A key is required, in the body or in the header; if "
        "given in both, it must be the same. The same kind and key with the same content returns the "
        "existing job in its current state, with 200; with different content, 409. The content is "
        "executor, source_ref, target_ref, payload_ref, safe_payload, workflow_id and parent_job_id. "
        "Other fields of a repeated request are ignored.",
        body=JobToEnqueue,
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
        job = await read_json(request, NewJob, self._max_bytes)
        key = agreed_key(in_header, job.idempotency_key)
        if key is None:
            raise invalid("idempotency_key is required, in the body or as the header Idempotency-Key")
        enqueued = accepted(
            await self._database.run(lambda connection: queries.enqueue(connection, job, key, request[ACTOR]))
        )
        self._wakeups.wake(Work.EVENTS)
        return json_response(msgspec.structs.asdict(enqueued), DUPLICATE if enqueued.duplicate else CREATED)

    @route("GET /v1/jobs", "jobs", "List jobs", JobPage, query=JobsQuery)
    async def _list(self, request: web.Request) -> web.Response:
        query = read_query(request, JobsQuery)
        # One row more than the page shows whether there is a next page.
        rows = await self._database.run(
            lambda connection: reads.jobs(
                connection, query.limit + 1, given(query.cursor), given(query.status), given(query.kind)
            )
        )
        return list_response(rows, query.limit, key="job_id")

    @route(f"GET /v1/jobs/{UUID_ID}", "jobs", "Get a job and its transitions", JobWithRuns)
    async def _get(self, request: web.Request) -> web.Response:
        job_id = path_uuid(request, "job")
        found = await self._database.run(lambda connection: reads.job(connection, job_id))
        if found is None:
            raise not_found("job", job_id)
        return json_response(
            found
            | {
                "safe_payload": raw_json(found["safe_payload"]),
                "runs": [run | {"detail": raw_json(run["detail"])} for run in found["runs"]],
            }
        )

    @route(
        f"POST /v1/jobs/{UUID_ID}/cancel",
        "jobs",
        "Cancel a job that no executor holds",
        CancelledJob,
        description="Cancels a waiting job, or resolves a dead letter.",
        body=CancelJob,
        own_problems=((409, "job_running"), (409, "job_finished"), (409, "already_requeued")),
    )
    async def _cancel(self, request: web.Request) -> web.Response:
        job_id = path_uuid(request, "job")
        body = await read_json(request, CancelJob, self._max_bytes)
        cancelled = accepted(
            await self._database.run(
                lambda connection: queries.cancel(connection, job_id, body.reason, request[ACTOR])
            )
        )
        self._wakeups.wake(Work.EVENTS)
        return json_response(msgspec.structs.asdict(cancelled))

    @route(
        f"POST /v1/jobs/{UUID_ID}/requeue",
        "jobs",
        "Requeue a dead letter",
        RequeuedJob,
        CREATED,
        description="Creates a new job whose parent is the dead letter. Possible once: a repeated "
        "request gets 409 with the id of the new job.",
        body=RequeueJob,
        body_optional=True,
        own_problems=((409, "already_requeued"), (409, "not_dead_letter"), DISABLED),
    )
    async def _requeue(self, request: web.Request) -> web.Response:
        job_id = path_uuid(request, "job")
        body = await read_optional_json(request, RequeueJob, self._max_bytes)
        requeued = accepted(
            await self._database.run(
                lambda connection: queries.requeue(connection, job_id, request[ACTOR], body.deadline_at)
            )
        )
        self._wakeups.wake(Work.EVENTS)
        return json_response(msgspec.structs.asdict(requeued), CREATED)


class JobWorkflows(DatabaseResource):
    """The workflow resource. A workflow's status follows from its jobs, so it is only opened and shown."""

    @route(
        "POST /v1/job-workflows",
        "jobs",
        "Open a workflow",
        OpenedWorkflow,
        CREATED,
        description="Its jobs refer to it by `workflow_id`. Choose the id yourself to make a "
        "repeated request safe.",
        body=NewWorkflow,
        other_responses={DUPLICATE: ALREADY_EXISTS},
        own_problems=((409, "workflow_conflict"), DISABLED),
    )
    async def _open(self, request: web.Request) -> web.Response:
        workflow = await read_json(request, NewWorkflow, self._max_bytes)
        opened = accepted(
            await self._database.run(
                lambda connection: queries.open_workflow(connection, workflow, request[ACTOR])
            )
        )
        return json_response(msgspec.structs.asdict(opened), DUPLICATE if opened.duplicate else CREATED)

    @route(f"GET /v1/job-workflows/{UUID_ID}", "jobs", "Get a workflow and its jobs", Workflow)
    async def _get(self, request: web.Request) -> web.Response:
        workflow_id = path_uuid(request, "workflow")
        found = await self._database.run(lambda connection: reads.workflow(connection, workflow_id))
        if found is None:
            raise not_found("workflow", workflow_id)
        return json_response(found)
