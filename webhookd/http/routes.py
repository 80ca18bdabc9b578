"""A route: method, path, required scope and handler, with its request, response and error types.

Handlers parse and respond with the same types, and /openapi.json is generated from these routes. QueryRunner
runs a handler's queries with a deadline, so that every request gets a response in time.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeAlias, TypeVar

from aiohttp import web

from webhookd.context import Context
from webhookd.core.errors import DatabaseUnavailable
from webhookd.core.settings import Scope
from webhookd.db.connection import Connection
from webhookd.db.pool import Pool
from webhookd.http.fields import Id, Tenant, Uuid

Result = TypeVar("Result")
Inputs = ParamSpec("Inputs")

# A client gets its 503 within two seconds, even with 500 concurrent requests that need a third of a second of
# CPU time. A query takes milliseconds.
QUERY_TIMEOUT_SECONDS = 1.5


class QueryRunner:
    """Runs queries on pooled connections, each with a deadline."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._abandoned: set[asyncio.Task[object]] = set()

    async def run(
        self,
        query: Callable[Concatenate[Connection, Inputs], Awaitable[Result]],
        *inputs: Inputs.args,
        **named_inputs: Inputs.kwargs,
    ) -> Result:
        """Call `query` with a pooled connection and the inputs.

        It runs in its own task: after a cancellation, a connection to a stalled server takes seconds to be
        released, and the request does not wait for that.
        """
        task = asyncio.get_running_loop().create_task(
            self._use(lambda connection: query(connection, *inputs, **named_inputs))
        )
        try:
            done, _ = await asyncio.wait({task}, timeout=QUERY_TIMEOUT_SECONDS)
        except asyncio.CancelledError:
            self._abandon(task)
            raise
        if not done:
            self._abandon(task)
            raise DatabaseUnavailable("the database did not answer in time")
        return task.result()

    async def _use(self, query: Callable[[Connection], Awaitable[Result]]) -> Result:
        async with self._pool.connection() as connection:
            return await query(connection)

    def _abandon(self, task: "asyncio.Task[Result]") -> None:
        task.cancel()
        self._abandoned.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: "asyncio.Task[Result]") -> None:
        self._abandoned.discard(task)
        if not task.cancelled():
            task.exception()  # retrieve it, so that asyncio does not log it


Method = TypeVar("Method", bound=Callable[..., Awaitable[web.StreamResponse]])
Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]
# The status and code of a problem.
ProblemCode: TypeAlias = tuple[int, str]

JSON = "application/json"
HTML = "text/html"

_ID = "{id:[0-9]+}"
# The id of a job or a workflow; `path_uuid` parses it.
UUID_ID = "{id:[0-9a-fA-F-]{36}}"
# The name of a tenant; `path_tenant` returns it.
TENANT_ID = "{id:[A-Za-z0-9._:-]{1,100}}"

# The problems of every route with a body.
_BODY_PROBLEMS: tuple[ProblemCode, ...] = (
    (400, "malformed_json"),
    (400, "too_deep"),
    (400, "incomplete_body"),
    (408, "timeout"),
    (413, "payload_too_large"),
    (415, "unsupported_media_type"),
    (415, "unsupported_encoding"),
    (422, "invalid_request"),
    (422, "unknown_field"),
)


class OtherResponse(NamedTuple):
    """A response of the same type with another status, and how its example differs."""

    description: str
    example: Mapping[str, object]


# The response to a request that was already carried out.
ALREADY_EXISTS = OtherResponse("It exists already", {"duplicate": True})


@dataclass(frozen=True, slots=True)
class Route:
    """A route. Without a scope it needs no token."""

    method: str
    path: str
    scope: Scope | None
    handler: Handler
    summary: str
    response: Any  # a type, or None if it has no body
    status: int = 200
    description: str = ""
    media_type: str = JSON
    query: Any = None  # a type
    body: Any = None  # a type
    body_optional: bool = False
    headers: Mapping[str, Any] = field(default_factory=dict)
    other_responses: Mapping[int, OtherResponse] = field(default_factory=dict)
    empty_responses: Mapping[int, str] = field(default_factory=dict)  # without a body
    own_problems: tuple[ProblemCode, ...] = ()
    uses_database: bool = True
    for_tenants: bool = False  # whether it accepts a token that is bound to a tenant

    @property
    def template(self) -> str:
        """The path in OpenAPI's notation."""
        return self.path.replace(_ID, "{id}").replace(UUID_ID, "{id}").replace(TENANT_ID, "{id}")

    @property
    def has_id(self) -> bool:
        return "{id}" in self.template

    @property
    def id_type(self) -> Any:
        if TENANT_ID in self.path:
            return Tenant
        return Uuid if UUID_ID in self.path else Id

    @property
    def refuses_queries(self) -> bool:
        """Whether any query is an error. Probes and browsers may add parameters to the other routes."""
        return self.query is None and self.path.startswith("/v1/")

    @property
    def problems(self) -> dict[int, list[str]]:
        """Every status with its codes, in ascending order."""
        found: dict[int, list[str]] = {}
        for status, code in sorted(self._problem_codes(), key=itemgetter(0)):
            found.setdefault(status, []).append(code)
        return found

    def _problem_codes(self) -> Iterable[ProblemCode]:
        yield 400, "bad_request"
        yield from ((401, "unauthorized"), (403, "forbidden")) if self.scope else ()
        yield from ((404, "not_found"),) if self.has_id else ()
        yield from ((422, "invalid_parameter"),) if self.query or self.refuses_queries else ()
        yield from _BODY_PROBLEMS if self.body else ()
        yield from self.own_problems
        yield from ((503, "unavailable"),) if self.uses_database else ()


def route(
    method_and_path: str, scope: Scope | None, summary: str, response: Any, status: int = 200, **more: Any
) -> Callable[[Method], Method]:
    """Declare the route of a handler, as in "GET /v1/events"; `more` are further fields of Route."""
    method, path = method_and_path.split(" ", 1)
    fields = {"summary": summary, "response": response, "status": status} | more

    def declare(handler: Method) -> Method:
        handler.route = partial(Route, method, path, scope, **fields)  # type: ignore[attr-defined]
        return handler

    return declare


class Resource:
    """A group of handlers, each declared with `route`."""

    def routes(self) -> list[Route]:
        """Return the routes in the order of their handlers."""
        return [
            method.route(handler=getattr(self, name))
            for name, method in vars(type(self)).items()
            if hasattr(method, "route")
        ]


class DatabaseResource(Resource):
    """A group of handlers that query the database."""

    def __init__(self, context: Context, database: QueryRunner) -> None:
        self._database = database
        self._settings = context.settings
        self._wakeups = context.wakeups

    @property
    def _max_bytes(self) -> int:
        return self._settings().api.max_payload_bytes
