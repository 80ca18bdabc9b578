"""The OpenAPI 3.1 document, made of the routes and of the very types that they read and answer. Pure."""

from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import Any

from webhookd import __version__
from webhookd.core.settings import ApiSettings
from webhookd.http import responses
from webhookd.http.bodies import BODY_TIMEOUT_SECONDS, MAX_DEPTH
from webhookd.http.fields import Id, Uuid
from webhookd.http.problems import PROBLEM_JSON, Problem
from webhookd.http.routes import HTML, JSON, Route
from webhookd.http.schemas import Schema, Schemas
from webhookd.http.server import HEADERS_TIMEOUT_SECONDS

# Who opens a page in a browser is told so on a page.
_OF_PAGES = (401, 403)

_DESCRIPTION = f"""\
Durable webhook delivery on PostgreSQL: events in, signed HTTPS requests out.

- JSON in and out, in UTF-8 and not encoded; an answer's type does not depend on `Accept`.
- An error is `application/problem+json` (RFC 9457): `code` is stable, and is what a program should look at.
- Lists are newest first. `limit` is the size of a page; `next_cursor` of one page is `cursor` of the next.
- Times are RFC 3339 in UTC. Ids are 64-bit integers, of jobs and workflows UUIDs.
- A request has {HEADERS_TIMEOUT_SECONDS:g} s for its headers and {BODY_TIMEOUT_SECONDS:g} s for its body, \
of {ApiSettings().max_payload_bytes:,} bytes unless `api.max_payload_bytes` says otherwise. JSON may be \
nested {MAX_DEPTH} deep.
- 503 has `Retry-After`: the same request may succeed then. Send events with an idempotency key, and sending \
again is safe.
- Other methods than these get 405, also HEAD, OPTIONS and TRACE; there is no CORS."""

_BEARER = (
    "A token of `api.tokens`, in the header alone: never in a query. It needs the scope named with each "
    "route. Without any tokens webhookd listens on loopback only, and there asks for none."
)


def document(routes: Sequence[Route]) -> Schema:
    """All of it."""
    schemas = Schemas(_types(routes))
    paths: dict[str, Schema] = {}
    for route in routes:
        paths.setdefault(route.template, {})[route.method.lower()] = _operation(route, schemas)
    for query in dict.fromkeys(route.query for route in routes if route.query):
        schemas.take_apart(query)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "webhookd",
            "version": __version__,
            "summary": "Durable webhook delivery on PostgreSQL",
            "description": _DESCRIPTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer", "description": _BEARER}},
        },
    }


def _types(routes: Iterable[Route]) -> Iterable[Any]:
    yield Id
    yield Uuid
    yield responses.Problem
    for route in routes:
        yield from (kind for kind in (route.query, route.body, route.answer) if kind is not None)
        yield from route.headers.values()


def _operation(route: Route, schemas: Schemas) -> Schema:
    operation: Schema = {
        "operationId": route.handler.__qualname__.replace("._", ".").replace(".", "_").lower(),
        "tags": [_tag(route)],
        "summary": route.summary,
        "description": route.description,
        "parameters": list(_parameters(route, schemas)),
        "responses": _answers(route, schemas) | _problems(route, schemas),
        # The empty one: on a loopback address without tokens.
        "security": [{"token": [route.scope]}, {}] if route.scope else [],
    }
    if route.body:
        operation["requestBody"] = {
            "required": not route.body_optional,
            "content": {JSON: _content(schemas.of(route.body), schemas)},
        }
    return {name: part for name, part in operation.items() if part not in ("", []) or name == "security"}


def _tag(route: Route) -> str:
    parts = route.path.split("/")
    return parts[2] if parts[1] == "v1" else "instance"


def _parameters(route: Route, schemas: Schemas) -> Iterable[Schema]:
    if route.has_id:
        yield {
            "name": "id",
            "in": "path",
            "required": True,
            "schema": schemas.of(Uuid if route.has_uuid else Id),
        }
    if route.query:
        for name, field in schemas.resolved(schemas.of(route.query))["properties"].items():
            yield {"name": name, "in": "query", "schema": field}
    for name, kind in route.headers.items():
        yield {"name": name, "in": "header", "schema": schemas.of(kind)}


def _answers(route: Route, schemas: Schemas) -> Schema:
    content = _content(schemas.of(route.answer), schemas)
    usual = {"description": HTTPStatus(route.status).phrase, "content": {route.media_type: content}}
    others = {
        str(status): {
            "description": other.description,
            "content": {route.media_type: content | {"example": content["example"] | other.example}},
        }
        for status, other in route.other_answers.items()
    }
    return {str(route.status): usual, **others} | {
        str(status): {"description": said} for status, said in route.empty_answers.items()
    }


def _problems(route: Route, schemas: Schemas) -> Schema:
    of_pages = _OF_PAGES if route.media_type == HTML else ()
    return {
        str(status): _problem(status, codes, schemas, as_page=status in of_pages)
        for status, codes in route.problems.items()
        if status not in route.other_answers
    }


def _problem(status: int, codes: list[str], schemas: Schemas, *, as_page: bool) -> Schema:
    exact: Schema = {"properties": {"status": {"const": status}, "code": {"enum": codes}}}
    content = {
        "schema": {"allOf": [schemas.of(responses.Problem), exact]},
        "example": Problem(status, codes[0], "what is wrong, for a person").document,
    }
    answer: Schema = {
        "description": f"{HTTPStatus(status).phrase}: {', '.join(codes)}",
        "content": {HTML: {"schema": {"type": "string"}}} if as_page else {PROBLEM_JSON: content},
    }
    header = {401: "WWW-Authenticate", 503: "Retry-After"}.get(status)
    if header:
        answer["headers"] = {header: {"required": True, "schema": {"type": "string"}}}
    return answer


def _content(schema: Schema, schemas: Schemas) -> Schema:
    return {"schema": schema, "example": schemas.example(schema)}
