"""/v1/job-substrate and /v1/job-registrations: the switch, the policies, and the events that create jobs.

Changes need the scope `operate`; executors have tokens with the scope `jobs`.
"""

import msgspec
from aiohttp import web
from msgspec import UNSET

from webhookd.db.connection import Connection
from webhookd.db.paging import Row
from webhookd.http.auth import ACTOR
from webhookd.http.requests import read_json
from webhookd.http.responses import json_response, raw_json
from webhookd.http.routes import DatabaseResource, route
from webhookd.jobqueue import queries, reads
from webhookd.jobqueue.api.problems import accepted
from webhookd.jobqueue.requests import JobQueueChange, NewRegistration
from webhookd.jobqueue.results import JobQueueConfiguration, JobRegistration
from webhookd.wakeups import Work


class JobQueueSwitch(DatabaseResource):
    """The routes of the operator."""

    @route(
        "GET /v1/job-substrate",
        "jobs",
        "Get the configuration and the counts of the job queue",
        JobQueueConfiguration,
    )
    async def _get(self, _: web.Request) -> web.Response:
        return json_response(await self._database.run(_configuration))

    @route(
        "PATCH /v1/job-substrate",
        "operate",
        "Enable or disable the job queue, or change its policies",
        JobQueueConfiguration,
        description="While it is disabled, no job is enqueued or claimed; running jobs can still "
        "finish. Settings in `[jobs]` of an instance's configuration file are written again when "
        "that instance starts.",
        body=JobQueueChange,
    )
    async def _change(self, request: web.Request) -> web.Response:
        change = await read_json(request, JobQueueChange, self._max_bytes)
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
        JobRegistration,
        description="Applies to events published from now on. A repeated request replaces the "
        "executor and the priority. With `active: false` the registration is deactivated and "
        "otherwise unchanged; the answer shows its executor and priority.",
        body=NewRegistration,
        own_problems=((404, "not_found"),),
    )
    async def _register(self, request: web.Request) -> web.Response:
        wanted = await read_json(request, NewRegistration, self._max_bytes)
        registered = await self._database.run(
            lambda connection: queries.register_event(connection, wanted, request[ACTOR])
        )
        return json_response(msgspec.structs.asdict(accepted(registered)))


async def _changed(connection: Connection, change: JobQueueChange, actor: str) -> Row:
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
    health = await queries.health(connection)
    numbers = msgspec.json.decode(configuration["numbers"])
    return {
        "enabled": numbers.pop("enabled"),
        "policy": numbers,
        "kind_policies": configuration["kinds"],
        "registrations": configuration["registrations"],
        "decisions": [
            decision | {"detail": raw_json(decision["detail"])} for decision in configuration["decisions"]
        ],
        "queue": health,
    }
