"""What a route is: a method, a path, the scope it needs, who answers; and what it takes and may answer.

The handler reads and answers by the same types; /openapi.json is made of what is said here.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from aiohttp import web

from webhookd.core.settings import Scope

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]
# A problem's status and its code.
Told: TypeAlias = tuple[int, str]

JSON = "application/json"
HTML = "text/html"

_ID = "{id:[0-9]+}"
# Of a job or a workflow, as `path_uuid` reads it.
UUID_ID = "{id:[0-9a-fA-F-]{36}}"

# What every route may answer that does the thing on the left.
_OF_ALL: tuple[Told, ...] = ((400, "bad_request"),)
_OF_SCOPES: tuple[Told, ...] = ((401, "unauthorized"), (403, "forbidden"))
_OF_IDS: tuple[Told, ...] = ((404, "not_found"),)
_OF_QUERIES: tuple[Told, ...] = ((422, "invalid_parameter"),)
_OF_BODIES: tuple[Told, ...] = (
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
_OF_THE_DATABASE: tuple[Told, ...] = ((503, "unavailable"),)


class OtherAnswer(NamedTuple):
    """Another status for an answer of the same type, and how its example differs."""

    description: str
    example: Mapping[str, object]


# Of what may be asked for twice.
AGAIN = OtherAnswer("It was there already", {"duplicate": True})


@dataclass(frozen=True, slots=True)
class Route:
    """No scope: open to all."""

    method: str
    path: str
    scope: Scope | None
    handler: Handler
    summary: str
    answer: Any  # a type
    status: int = 200
    description: str = ""
    media_type: str = JSON
    query: Any = None  # a type, as are the next ones
    body: Any = None
    body_optional: bool = False
    headers: Mapping[str, Any] = field(default_factory=dict)
    other_answers: Mapping[int, OtherAnswer] = field(default_factory=dict)
    empty_answers: Mapping[int, str] = field(default_factory=dict)  # without a body
    own_problems: tuple[Told, ...] = ()
    asks_database: bool = True

    @property
    def template(self) -> str:
        """The path as OpenAPI writes it."""
        return self.path.replace(_ID, "{id}").replace(UUID_ID, "{id}")

    @property
    def has_id(self) -> bool:
        return "{id}" in self.template

    @property
    def has_uuid(self) -> bool:
        """Whether its id is one of the substrate's."""
        return UUID_ID in self.path

    @property
    def refuses_queries(self) -> bool:
        """A parameter that nobody reads was meant for something; a probe's or a browser's may be idle."""
        return self.query is None and self.path.startswith("/v1/")

    @property
    def problems(self) -> dict[int, list[str]]:
        """Each status with its codes, in order."""
        found: dict[int, list[str]] = {}
        for status, code in sorted(self._told(), key=lambda told: told[0]):
            found.setdefault(status, []).append(code)
        return found

    def _told(self) -> Iterable[Told]:
        yield from _OF_ALL
        yield from _OF_SCOPES if self.scope else ()
        yield from _OF_IDS if self.has_id else ()
        yield from _OF_QUERIES if self.query or self.refuses_queries else ()
        yield from _OF_BODIES if self.body else ()
        yield from self.own_problems
        yield from _OF_THE_DATABASE if self.asks_database else ()
