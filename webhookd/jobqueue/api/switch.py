"""/v1/job-substrate and /v1/job-registrations: the switch, the numbers, and which events give jobs.

To change them needs the scope `operate`: tokens with `jobs` are what executors have.
"""

import msgspec
from aiohttp import web
from msgspec import UNSET

from webhookd.context import Context
from webhookd.db.connection import Connection
from webhookd.db.paging import Row
from webhookd.http.auth import ACTOR
from webhookd.http.query_runner import QueryRunner
from webhookd.http.requests import read_json
from webhookd.http.responses import json_response, raw_json
from webhookd.http.routes import Route
from webhookd.jobqueue import queries as job_substrate
from webhookd.jobqueue import reads as job_reads
from webhookd.jobqueue.api import requests as job_requests
from webhookd.jobqueue.api import responses as job_responses
from webhookd.jobqueue.api.problems import done
from webhookd.jobqueue.types import NewRegistration
from webhookd.wakeups import Work


class JobSubstrate:
    """What an operator decides."""

    def __init__(self, context: Context, database: QueryRunner) -> None:
        self._database = database
        self._wakeups = context.wakeups
        self._settings = context.settings

    def routes(self) -> list[Route]:
        return [
            Route(
                "GET",
                "/v1/job-substrate",
                "jobs",
                self._get,
                "Whether jobs are on, by what numbers, and how they are",
                job_responses.Substrate,
            ),
            Route(
                "PATCH",
                "/v1/job-substrate",
                "operate",
                self._change,
                "Switch jobs on or off, or set numbers",
                job_responses.Substrate,
                description="Off, nothing is enqueued or claimed; what runs may end. A number that an "
                "instance's configuration has in `[jobs]` is written again when that starts.",
                body=job_requests.SubstrateChange,
            ),
            Route(
                "POST",
                "/v1/job-registrations",
                "operate",
                self._register,
                "Let events of a type give jobs of a kind",
                job_responses.Registration,
                description="From the next event on, one job each. Asked again, it is changed, to the "
                "executor and the priority that are given then. With `active: false` it is switched off and "
                "otherwise left as it is: the answer has the executor and the priority that it has.",
                body=job_requests.NewRegistration,
                own_problems=((404, "not_found"),),
            ),
        ]

    async def _get(self, _: web.Request) -> web.Response:
        return json_response(await self._database.run(_described))

    async def _change(self, request: web.Request) -> web.Response:
        asked = await read_json(request, job_requests.SubstrateChange, self._settings().api.max_payload_bytes)
        described = await self._database.run(
            lambda connection: _changed(connection, asked, str(request[ACTOR]))
        )
        # Every instance: while the job queue is off, its keeper checks rarely.
        self._wakeups.wake(Work.EVENTS, cluster=True)
        return json_response(described)

    async def _register(self, request: web.Request) -> web.Response:
        asked = await read_json(request, job_requests.NewRegistration, self._settings().api.max_payload_bytes)
        wanted = NewRegistration(**msgspec.structs.asdict(asked))
        registered = await self._database.run(
            lambda connection: job_substrate.register_event(connection, wanted, request[ACTOR])
        )
        return json_response(msgspec.structs.asdict(done(registered)))


async def _changed(connection: Connection, asked: job_requests.SubstrateChange, actor: str) -> Row:
    """All of it or nothing."""
    async with connection.transaction():
        if asked.policy is not UNSET:
            done(await job_substrate.configure(connection, msgspec.to_builtins(asked.policy), actor))
        if asked.kind_policy is not UNSET:
            numbers = msgspec.to_builtins(asked.kind_policy)
            kind = numbers.pop("job_kind")
            done(await job_substrate.configure(connection, numbers, actor, kind))
        if asked.enabled is not UNSET:
            await job_substrate.enable(connection, actor, enabled=asked.enabled)
    return await _described(connection)


async def _described(connection: Connection) -> Row:
    configuration = await job_reads.configuration(connection)
    health = await job_substrate.health(connection)
    numbers = msgspec.json.decode(configuration["numbers"])
    return {
        "enabled": numbers.pop("enabled"),
        "policy": numbers,
        "kind_policies": configuration["kinds"],
        "registrations": configuration["registrations"],
        "decisions": [one | {"detail": raw_json(one["detail"])} for one in configuration["decisions"]],
        "queue": msgspec.structs.asdict(health),
    }
