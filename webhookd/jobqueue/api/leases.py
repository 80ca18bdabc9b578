"""/v1/jobs/claim and what a holder reports: an executor's part, by HTTP."""

from typing import TypeVar

import msgspec
from aiohttp import web

from webhookd.context import Context
from webhookd.http.auth import ACTOR
from webhookd.http.query_runner import QueryRunner
from webhookd.http.requests import path_uuid, read_json
from webhookd.http.responses import json_response, no_content, raw_json
from webhookd.http.routes import UUID_ID, Route
from webhookd.jobqueue import queries as job_substrate
from webhookd.jobqueue.api import requests as job_requests
from webhookd.jobqueue.api import responses as job_responses
from webhookd.jobqueue.api.claims import Claims
from webhookd.jobqueue.api.problems import ALREADY_REPORTED, DISABLED, STALE_LEASE, done
from webhookd.wakeups import Work

Body = TypeVar("Body", bound=msgspec.Struct)


class JobLeases:
    """Claimed, renewed, reported."""

    def __init__(self, context: Context, database: QueryRunner, claims: Claims) -> None:
        self._database = database
        self._claims = claims
        self._wakeups = context.wakeups
        self._settings = context.settings

    def routes(self) -> list[Route]:
        return [
            Route(
                "POST",
                "/v1/jobs/claim",
                "jobs",
                self._claim,
                "Take a job, or wait for one",
                job_responses.ClaimedJob,
                description="The first of a kind for an executor, by priority, then by age. With "
                "`wait_seconds` the answer comes with the job; 204 if none came. Keep the lease by "
                "`progress`, and end it by `succeed` or `fail`; else others get the job when it runs out.",
                body=job_requests.ClaimJob,
                empty_responses={204: "No job came"},
                own_problems=(DISABLED,),
            ),
            Route(
                "POST",
                f"/v1/jobs/{UUID_ID}/progress",
                "jobs",
                self._progress,
                "Say that it goes on, and renew the lease",
                job_responses.JobRenewed,
                description="The first time it becomes `in_progress`.",
                body=job_requests.ReportProgress,
                own_problems=(STALE_LEASE,),
            ),
            Route(
                "POST",
                f"/v1/jobs/{UUID_ID}/succeed",
                "jobs",
                self._succeed,
                "Report success",
                job_responses.JobReported,
                description="Safe to ask again; with another `result_ref` it is refused.",
                body=job_requests.ReportSuccess,
                own_problems=(STALE_LEASE, ALREADY_REPORTED),
            ),
            Route(
                "POST",
                f"/v1/jobs/{UUID_ID}/fail",
                "jobs",
                self._fail,
                "Report a failure",
                job_responses.JobReported,
                description="Tried again later, up to its attempts; `permanent` goes straight to the dead "
                "letters. Safe to ask again; with another `permanent` it is refused.",
                body=job_requests.ReportFailure,
                own_problems=(STALE_LEASE, ALREADY_REPORTED),
            ),
        ]

    async def _claim(self, request: web.Request) -> web.Response:
        asked = await self._read(request, job_requests.ClaimJob)
        claimed = await self._claims.claim(
            asked.kind,
            asked.executor,
            lambda connection: job_substrate.claim(
                connection,
                asked.kind,
                asked.executor,
                asked.lease_name or asked.kind,
                asked.lease_holder,
                asked.lease_seconds,
                request[ACTOR],
            ),
            asked.wait_seconds,
            lambda: request.transport is None or request.transport.is_closing(),
        )
        if claimed is None:
            return no_content()
        job = done(claimed)
        self._wakeups.wake(Work.EVENTS)  # every move of a job is an event
        fields = msgspec.structs.asdict(job)
        return json_response(fields | {"safe_payload": raw_json(bytes(job.safe_payload).decode())})

    async def _progress(self, request: web.Request) -> web.Response:
        job_id = path_uuid(request, "job")
        asked = await self._read(request, job_requests.ReportProgress)
        renewed = await self._database.run(
            lambda connection: job_substrate.progress(
                connection, job_id, asked.status_signal, asked.lease_token, request[ACTOR]
            )
        )
        told = done(renewed)
        if told.started:  # the others are no events
            self._wakeups.wake(Work.EVENTS)  # every move of a job is an event
        return json_response(msgspec.structs.asdict(told))

    async def _succeed(self, request: web.Request) -> web.Response:
        job_id = path_uuid(request, "job")
        asked = await self._read(request, job_requests.ReportSuccess)
        reported = await self._database.run(
            lambda connection: job_substrate.succeed(
                connection, job_id, asked.lease_token, asked.result_ref, request[ACTOR]
            )
        )
        return self._told(done(reported))

    async def _fail(self, request: web.Request) -> web.Response:
        job_id = path_uuid(request, "job")
        asked = await self._read(request, job_requests.ReportFailure)
        reported = await self._database.run(
            lambda connection: job_substrate.fail(
                connection,
                job_id,
                asked.lease_token,
                asked.error_code,
                asked.error_message,
                request[ACTOR],
                permanent=asked.permanent,
            )
        )
        return self._told(done(reported))

    async def _read(self, request: web.Request, kind: type[Body]) -> Body:
        return await read_json(request, kind, self._settings().api.max_payload_bytes)

    def _told(self, result: msgspec.Struct) -> web.Response:
        self._wakeups.wake(Work.EVENTS)  # every move of a job is an event
        return json_response(msgspec.structs.asdict(result))
