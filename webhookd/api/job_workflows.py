"""/v1/job-workflows: jobs that belong together, and how they are together."""

from collections.abc import Callable

import msgspec
from aiohttp import web

from webhookd.api import job_requests, job_responses
from webhookd.api.answers import answer
from webhookd.api.auth import ACTOR
from webhookd.api.bodies import path_uuid, read_json
from webhookd.api.database import Database
from webhookd.api.job_problems import DISABLED, done
from webhookd.api.problems import not_found
from webhookd.api.routes import AGAIN, UUID_ID, Route
from webhookd.config.settings import Settings
from webhookd.store import job_reads, job_substrate

CREATED = 201
DUPLICATE = 200


class JobWorkflows:
    """The workflow resource: its status follows from its jobs, so it is only opened and looked at."""

    def __init__(self, database: Database, settings: Callable[[], Settings]) -> None:
        self._database = database
        self._settings = settings

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
                other_answers={DUPLICATE: AGAIN},
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
        opened = await self._database.ask(
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
        return answer(msgspec.structs.asdict(told), DUPLICATE if told.duplicate else CREATED)

    async def _get(self, request: web.Request) -> web.Response:
        workflow_id = path_uuid(request, "workflow")
        found = await self._database.ask(lambda connection: job_reads.workflow(connection, workflow_id))
        if found is None:
            raise not_found("workflow", workflow_id)
        return answer(found)
