"""/v1/job-workflows: jobs that belong together, and how they are together."""

import msgspec
from aiohttp import web

from webhookd.context import Context
from webhookd.http.auth import ACTOR
from webhookd.http.problems import not_found
from webhookd.http.query_runner import QueryRunner
from webhookd.http.requests import path_uuid, read_json
from webhookd.http.responses import json_response
from webhookd.http.routes import ALREADY_EXISTS, UUID_ID, Route
from webhookd.jobqueue import queries as job_substrate
from webhookd.jobqueue import reads as job_reads
from webhookd.jobqueue.api import requests as job_requests
from webhookd.jobqueue.api import responses as job_responses
from webhookd.jobqueue.api.problems import DISABLED, done

CREATED = 201
DUPLICATE = 200


class JobWorkflows:
    """The workflow resource: its status follows from its jobs, so it is only opened and looked at."""

    def __init__(self, context: Context, database: QueryRunner) -> None:
        self._database = database
        self._settings = context.settings

    def routes(self) -> list[Route]:
        return [
            Route(
                "POST",
                "/v1/job-workflows",
                "jobs",
                self._open,
                "Open a workflow",
                job_responses.WorkflowOpened,
                CREATED,
                description="Its jobs name it as `workflow_id`. With an id of your own, safe to ask again.",
                body=job_requests.NewWorkflow,
                other_responses={DUPLICATE: ALREADY_EXISTS},
                own_problems=((409, "workflow_conflict"), DISABLED),
            ),
            Route(
                "GET",
                f"/v1/job-workflows/{UUID_ID}",
                "jobs",
                self._get,
                "One workflow, and its jobs",
                job_responses.Workflow,
            ),
        ]

    async def _open(self, request: web.Request) -> web.Response:
        asked = await read_json(request, job_requests.NewWorkflow, self._settings().api.max_payload_bytes)
        opened = await self._database.run(
            lambda connection: job_substrate.open_workflow(
                connection,
                asked.workflow_kind,
                asked.generator,
                request[ACTOR],
                asked.correlation_id,
                asked.workflow_id,
            )
        )
        told = done(opened)
        return json_response(msgspec.structs.asdict(told), DUPLICATE if told.duplicate else CREATED)

    async def _get(self, request: web.Request) -> web.Response:
        workflow_id = path_uuid(request, "workflow")
        found = await self._database.run(lambda connection: job_reads.workflow(connection, workflow_id))
        if found is None:
            raise not_found("workflow", workflow_id)
        return json_response(found)
