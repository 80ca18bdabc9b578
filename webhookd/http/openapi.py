"""The OpenAPI 3.1 document. It is generated from the routes and from the types that handlers use. Pure."""

from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import Any, TypeAlias, get_type_hints

import msgspec

from webhookd import __version__
from webhookd.core.settings import ApiSettings
from webhookd.http import responses
from webhookd.http.requests import BODY_TIMEOUT_SECONDS, MAX_DEPTH
from webhookd.http.responses import PROBLEM_JSON, Problem
from webhookd.http.routes import HTML, JSON, Route
from webhookd.http.server import HEADERS_TIMEOUT_SECONDS

Schema: TypeAlias = dict[str, Any]

_PREFIX = "#/components/schemas/"
# The example of a field whose type has none of its own.
_TYPE_EXAMPLES: Schema = {"string": "…", "integer": 1, "number": 1.0, "boolean": True, "null": None}
# A page route returns these errors as a page.
_SHOWN_AS_PAGE = (401, 403)

DESCRIPTION = f"""\
Durable webhook delivery on PostgreSQL: events in, signed HTTPS requests out.

- Requests and responses are JSON in UTF-8, without a Content-Encoding. `Accept` has no effect.
- Errors are `application/problem+json` (RFC 9457). Programs should check `code`, which is stable.
- Lists are sorted newest first. `limit` is the page size; `next_cursor` is the `cursor` of the next page.
- Times are RFC 3339 in UTC. Ids are 64-bit integers; ids of jobs and workflows are UUIDs.
- A request has {HEADERS_TIMEOUT_SECONDS:g} s for its headers and {BODY_TIMEOUT_SECONDS:g} s for its body. \
The body may have {ApiSettings().max_payload_bytes:,} bytes, unless `api.max_payload_bytes` sets another \
limit, and {MAX_DEPTH} levels of nesting.
- 503 comes with `Retry-After`; the same request may succeed then. With an idempotency key it is safe to \
send an event again.
- Methods that are not listed here, including HEAD, OPTIONS and TRACE, return 405. CORS is not supported."""

BEARER = (
    "A token from `api.tokens`, sent in the header, never in a query. It needs the scope named with "
    "each route. Without tokens webhookd listens on loopback addresses only and requires none."
)


class Schemas:
    """JSON Schemas of types. Named types become components, and are referred to."""

    def __init__(self, routes: Iterable[Route]) -> None:
        types = list(dict.fromkeys(_types(routes)))
        generated = msgspec.json.schema_components(types, ref_template=f"{_PREFIX}{{name}}")
        # Python's patterns become JSON Schema's, where `$` is the very end and surrogates do not exist.
        text = msgspec.json.encode(generated).replace(rb"\\Z", b"$").replace(rb"\\ud800-\\udfff", b"")
        made, self.components = msgspec.json.decode(text, type=tuple[list[Schema], dict[str, Schema]])
        self._made: dict[Any, Schema] = dict(zip(types, made, strict=True))
        for kind in types:
            self._restore_order(kind)

    def of(self, kind: Any) -> Schema:
        """Return the schema of a type, or a reference to it."""
        return self._made[kind]

    def resolved(self, schema: Schema) -> Schema:
        """Return the schema that a reference points to."""
        name = schema.get("$ref", "").removeprefix(_PREFIX)
        return self.components[name] if name else schema

    def example(self, schema: Schema) -> Any:
        """Return an example value, built from the examples of its fields."""
        if "examples" in schema:
            return schema["examples"][0]
        schema = self.resolved(schema)
        if "enum" in schema:
            return schema["enum"][0]
        if "anyOf" in schema:
            return self.example(schema["anyOf"][0])
        match schema.get("type"):
            case "array":
                return [self.example(schema["items"])]
            case "object":
                return {name: self.example(field) for name, field in schema["properties"].items()}
            case kind:
                return _TYPE_EXAMPLES.get(str(kind), {})

    def _restore_order(self, kind: Any) -> None:
        """Put fields back into the order of the source. Msgspec sorts those of a typed dictionary by name."""
        if not hasattr(kind, "__required_keys__"):
            return
        hints = get_type_hints(kind)
        schema = self.components[kind.__name__]
        schema["properties"] = {name: schema["properties"][name] for name in hints}
        schema["required"] = [name for name in hints if name in kind.__required_keys__]
        for hint in hints.values():
            for part in (hint, *getattr(hint, "__args__", ())):
                self._restore_order(part)


def document(routes: Sequence[Route], schemas: Schemas) -> Schema:
    """Return the document for all routes."""
    paths: dict[str, Schema] = {}
    for route in routes:
        paths.setdefault(route.template, {})[route.method.lower()] = _operation(route, schemas)
    queries = {route.query.__name__ for route in routes if route.query}  # their fields are parameters
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "webhookd",
            "version": __version__,
            "summary": "Durable webhook delivery on PostgreSQL",
            "description": DESCRIPTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": {name: part for name, part in schemas.components.items() if name not in queries},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer", "description": BEARER}},
        },
    }


def _types(routes: Iterable[Route]) -> Iterable[Any]:
    yield responses.ProblemDocument
    for route in routes:
        yield route.id_type
        yield from (kind for kind in (route.query, route.body, route.response) if kind is not None)
        yield from route.headers.values()


def _operation(route: Route, schemas: Schemas) -> Schema:
    operation: Schema = {
        "operationId": operation_id(route),
        "tags": [tag(route)],
        "summary": route.summary,
        "description": route.description,
        "parameters": list(parameters_of(route, schemas)),
        "responses": responses_of(route, schemas) | _problems(route, schemas),
        # The empty entry stands for a loopback address without tokens.
        "security": [{"token": [route.scope]}, {}] if route.scope else [],
    }
    if route.body:
        operation["requestBody"] = {
            "required": not route.body_optional,
            "content": {JSON: _content(schemas.of(route.body), schemas)},
        }
    return {name: part for name, part in operation.items() if part not in ("", []) or name == "security"}


def operation_id(route: Route) -> str:
    """Return the name of the route's handler, which generators of clients use."""
    return route.handler.__qualname__.replace("._", ".").replace(".", "_").lower()


def tag(route: Route) -> str:
    """Return the group of a route."""
    parts = route.path.split("/")
    return parts[2] if parts[1] == "v1" else "instance"


def parameters_of(route: Route, schemas: Schemas) -> Iterable[Schema]:
    """Yield the parameters in the path, the query and the headers."""
    if route.has_id:
        yield {"name": "id", "in": "path", "required": True, "schema": schemas.of(route.id_type)}
    if route.query:
        for name, field in schemas.resolved(schemas.of(route.query))["properties"].items():
            yield {"name": name, "in": "query", "schema": field}
    for name, kind in route.headers.items():
        yield {"name": name, "in": "header", "schema": schemas.of(kind)}


def responses_of(route: Route, schemas: Schemas) -> Schema:
    """Return the responses that are not problems, by status."""
    if route.response is None:
        return {str(route.status): {"description": HTTPStatus(route.status).phrase}}
    content = _content(schemas.of(route.response), schemas)
    default = {"description": HTTPStatus(route.status).phrase, "content": {route.media_type: content}}
    others = {
        str(status): {
            "description": other.description,
            "content": {route.media_type: content | {"example": content["example"] | other.example}},
        }
        for status, other in route.other_responses.items()
    }
    return {str(route.status): default, **others} | {
        str(status): {"description": description} for status, description in route.empty_responses.items()
    }


def _problems(route: Route, schemas: Schemas) -> Schema:
    return {
        str(status): _problem(route, status, codes, schemas)
        for status, codes in route.problems.items()
        if status not in route.other_responses
    }


def _problem(route: Route, status: int, codes: list[str], schemas: Schemas) -> Schema:
    as_page = route.media_type == HTML and status in _SHOWN_AS_PAGE
    exact: Schema = {"properties": {"status": {"const": status}, "code": {"enum": codes}}}
    content = {
        "schema": {"allOf": [schemas.of(responses.ProblemDocument), exact]},
        "example": Problem(status, codes[0], "what is wrong, in words").document,
    }
    response: Schema = {
        "description": f"{HTTPStatus(status).phrase}: {', '.join(codes)}",
        "content": {HTML: {"schema": {"type": "string"}}} if as_page else {PROBLEM_JSON: content},
    }
    header = {401: "WWW-Authenticate", 503: "Retry-After"}.get(status)
    if header:
        response["headers"] = {header: {"required": True, "schema": {"type": "string"}}}
    return response


def _content(schema: Schema, schemas: Schemas) -> Schema:
    return {"schema": schema, "example": schemas.example(schema)}
