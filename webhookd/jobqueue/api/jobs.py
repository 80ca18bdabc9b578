"""/v1/jobs: work in, looked at, cancelled, and given a second chance. Executors: job_leases.py."""

import msgspec
from aiohttp import web

from webhookd.context import Context
from webhookd.http.auth import ACTOR
from webhookd.http.problems import invalid, not_found
from webhookd.http.query_runner import QueryRunner
from webhookd.http.requests import (
    agreed_key,
    given,
    key_in_header,
    path_uuid,
    read_json,
    read_optional_json,
    read_query,
)
from webhookd.http.responses import json_response, list_response, raw_json
from webhookd.http.routes import ALREADY_EXISTS, UUID_ID, Route
from webhookd.jobqueue import queries as job_substrate
from webhookd.jobqueue import reads as job_reads
from webhookd.jobqueue.api import requests as job_requests
from webhookd.jobqueue.api import responses as job_responses
from webhookd.jobqueue.api.fields import JobKeyHeader
from webhookd.jobqueue.api.problems import DISABLED, done
from webhookd.jobqueue.types import NewJob
from webhookd.wakeups import Work

CREATED = 201
DUPLICATE = 200


class Jobs:
    """The job resource."""

    def __init__(self, context: Context, database: QueryRunner) -> None:
        self._database = database
        self._wakeups = context.wakeups
        self._settings = context.settings

    def routes(self) -> list[Route]:
        return [
            Route(
                "POST",
                "/v1/jobs",
                "jobs",
                self._enqueue,
                "Enqueue a job",
                job_responses.JobEnqueued,
                CREATED,
                description="Answered after the commit. It needs a key, in the body or in the header; in "
                "both it must be the same. The same kind and key with the same content gives the first job, "
                "as it is by now, and 200; with other content 409. The content is executor, source_ref, "
                "target_ref, payload_ref, safe_payload, workflow_id and parent_job_id: the rest stays the "
                "first one's.",
                body=job_requests.JobToEnqueue,
                headers={"Idempotency-Key": JobKeyHeader},
                other_responses={DUPLICATE: ALREADY_EXISTS},
                own_problems=(
                    (404, "not_found"),
                    (409, "idempotency_conflict"),
                    DISABLED,
                    (422, "idempotency_key_mismatch"),
                ),
            ),
            Route(
                "GET",
                "/v1/jobs",
                "jobs",
                self._list,
                "List jobs",
                job_responses.JobPage,
                query=job_requests.JobsQuery,
            ),
            Route(
                "GET",
                f"/v1/jobs/{UUID_ID}",
                "jobs",
                self._get,
                "One job, and all its moves",
                job_responses.JobWithRuns,
            ),
            Route(
                "POST",
                f"/v1/jobs/{UUID_ID}/cancel",
                "jobs",
                self._cancel,
                "Cancel a job that nobody holds",
                job_responses.JobCancelled,
                description="One that waits; or a dead letter, which is resolved thereby.",
                body=job_requests.CancelJob,
                own_problems=((409, "job_running"), (409, "job_finished"), (409, "already_requeued")),
            ),
            Route(
                "POST",
                f"/v1/jobs/{UUID_ID}/requeue",
                "jobs",
                self._requeue,
                "Try a dead letter again",
                job_responses.JobRequeued,
                CREATED,
                description="As a new job that names it as its parent, once: asked again, 409 names the job "
                "that there is.",
                body=job_requests.RequeueJob,
                body_optional=True,
                own_problems=((409, "already_requeued"), (409, "not_dead_letter"), DISABLED),
            ),
        ]

    async def _enqueue(self, request: web.Request) -> web.Response:
        in_header = key_in_header(request)
        asked = await read_json(request, job_requests.NewJob, self._settings().api.max_payload_bytes)
        key = agreed_key(in_header, asked.idempotency_key)
        if key is None:
            raise invalid("idempotency_key is needed, here or as the header Idempotency-Key")
        fields = msgspec.structs.asdict(asked) | {
            "idempotency_key": key,
            "safe_payload": bytes(asked.safe_payload).decode(),
            "actor": request[ACTOR],
        }
        job = NewJob(**fields)
        enqueued = done(await self._database.run(lambda connection: job_substrate.enqueue(connection, job)))
        self._wakeups.wake(Work.EVENTS)  # every move of a job is an event
        return json_response(msgspec.structs.asdict(enqueued), DUPLICATE if enqueued.duplicate else CREATED)

    async def _list(self, request: web.Request) -> web.Response:
        query = read_query(request, job_requests.JobsQuery)
        rows = await self._database.run(
            lambda connection: job_reads.jobs(connection, query.page, given(query.status), given(query.kind))
        )
        return list_response(rows, query.limit, key="job_id")

    async def _get(self, request: web.Request) -> web.Response:
        job_id = path_uuid(request, "job")
        found = await self._database.run(lambda connection: job_reads.job(connection, job_id))
        if found is None:
            raise not_found("job", job_id)
        return json_response(
            found
            | {
                "safe_payload": raw_json(found["safe_payload"]),
                "runs": [run | {"detail": raw_json(run["detail"])} for run in found["runs"]],
            }
        )

    async def _cancel(self, request: web.Request) -> web.Response:
        job_id = path_uuid(request, "job")
        asked = await read_json(request, job_requests.CancelJob, self._settings().api.max_payload_bytes)
        cancelled = await self._database.run(
            lambda connection: job_substrate.cancel(connection, job_id, asked.reason, request[ACTOR])
        )
        told = done(cancelled)
        self._wakeups.wake(Work.EVENTS)  # every move of a job is an event
        return json_response(msgspec.structs.asdict(told))

    async def _requeue(self, request: web.Request) -> web.Response:
        job_id = path_uuid(request, "job")
        asked = await read_optional_json(
            request, job_requests.RequeueJob, self._settings().api.max_payload_bytes
        )
        requeued = await self._database.run(
            lambda connection: job_substrate.requeue(connection, job_id, request[ACTOR], asked.deadline_at)
        )
        told = done(requeued)
        self._wakeups.wake(Work.EVENTS)  # every move of a job is an event
        return json_response(msgspec.structs.asdict(told), CREATED)
