"""/openapi.json and the page /docs, which shows the same to people. Rendered once, when first needed.

Rendering takes as much CPU time as the rest of a start, and most instances are never asked for these pages.
Both are open without a token: they reveal only the version, which every delivery also carries, and generators
of clients have no token yet.
"""

import asyncio
import json
import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from aiohttp import web

from webhookd import __version__
from webhookd.http import openapi, responses
from webhookd.http.openapi import Schema, Schemas
from webhookd.http.pages import Markup, Part, element, joined, links, page, page_response, table
from webhookd.http.responses import HEADERS, encoded, not_found
from webhookd.http.routes import HTML, JSON, Resource, Route, route

_CODE = re.compile(r"`([^`]+)`")
# Replaced by the requested address when the page is served, if that address is plausible.
_ADDRESS = "http://127.0.0.1:8470"
_HOST = re.compile(r"[A-Za-z0-9._:\[\]-]{1,255}\Z")
_FORMAT_NAMES = {"date-time": "time", "uri": "URL"}


class Rendered(NamedTuple):
    """The document for programs, and the page."""

    document: bytes
    page: str


class Documents(Resource):
    """The routes /openapi.json and /docs."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._all_routes = [*routes, *self.routes()]
        self._rendering: asyncio.Task[Rendered] | None = None

    async def _rendered(self) -> Rendered:
        """Render in a thread, so that deliveries go on meanwhile, and only once for all requests."""
        if self._rendering is None:
            work = asyncio.to_thread(rendered, self._all_routes)
            self._rendering = asyncio.get_running_loop().create_task(work)
        # A client that goes away must not cancel it for the others.
        return await asyncio.shield(self._rendering)

    @route("GET /openapi.json", None, "Get this document", responses.Document, uses_database=False)
    async def _openapi(self, _: web.Request) -> web.Response:
        document = (await self._rendered()).document
        return web.Response(body=document, content_type=JSON, headers=HEADERS)

    @route(
        "GET /docs", None, "Show the API documentation", responses.Html, media_type=HTML, uses_database=False
    )
    async def _docs(self, request: web.Request) -> web.Response:
        # A proxy in front may end TLS. No command on the page should send a token without TLS then.
        scheme = "https" if request.headers.get("X-Forwarded-Proto") == "https" else request.scheme
        # The host comes from the client: check it.
        host = request.host
        text = (await self._rendered()).page
        return page_response(text.replace(_ADDRESS, f"{scheme}://{host}") if _HOST.match(host) else text)


def rendered(routes: Sequence[Route]) -> Rendered:
    """Return the documents of all routes. Pure."""
    schemas = Schemas(routes)
    return Rendered(encoded(openapi.document(routes, schemas)), render(routes, schemas))


def render(routes: Sequence[Route], schemas: Schemas) -> str:
    """Return the page for all routes."""
    groups: dict[str, list[Route]] = {}
    for found in routes:
        groups.setdefault(openapi.tag(found), []).append(found)
    brand = element("span", "webhookd", element("small", __version__), class_="brand")
    openapi_link = element("a", "/openapi.json", href="/openapi.json")
    contents, operations = [], []
    for name, group in groups.items():
        title = name.replace("-", " ")
        contents += [element("h2", title), element("ul", *map(_link, group))]
        operations += [element("h2", title, class_="group", id=name)]
        operations += [_operation(found, schemas) for found in group]
    main = element(
        "div",
        element("h1", "API reference"),
        _paragraphs(openapi.DESCRIPTION),
        element("h2", "Errors"),
        element("pre", _json(not_found("event", 42).document)),
        element("h2", "Authentication"),
        _paragraphs(openapi.BEARER),
        element("p", "The same document as OpenAPI 3.1, for programs: ", openapi_link),
        *operations,
    )
    return page(
        "webhookd: API reference",
        element("header", brand, links("/docs")),
        element("main", element("nav", *contents, class_="contents", aria_label="Routes"), main),
        kind="docs",
    )


def _link(found: Route) -> Markup:
    summary = element("span", found.summary)
    return element("li", element("a", _method(found), summary, href=f"#{openapi.operation_id(found)}"))


def _operation(found: Route, schemas: Schemas) -> Markup:
    anchor = openapi.operation_id(found)
    scope = joined("scope ", element("code", found.scope)) if found.scope else Markup("no token")
    heading = element(
        "h3",
        _method(found),
        element("a", found.template, href=f"#{anchor}", class_="path"),
        element("span", scope, class_="scope"),
    )
    return element(
        "article",
        heading,
        element("p", _line(f"{found.summary}. {found.description}".strip())),
        _parameters(found, schemas),
        element("h4", "Example"),
        element("pre", _curl(found, schemas)),
        *_responses(found, schemas),
        element("h4", "Errors"),
        _problems(found),
        class_="operation",
        id=anchor,
    )


def _parameters(found: Route, schemas: Schemas) -> Markup | None:
    rows: list[tuple[Part, ...]] = []
    for parameter in openapi.parameters_of(found, schemas):
        name = _name(parameter["name"], required=parameter.get("required", False))
        rows.append((name, parameter["in"], *_described(parameter["schema"], schemas)))
    if found.body:
        for field, required, kind, meaning in _fields_of(schemas.of(found.body), schemas):
            rows.append((_name(field, required=required), "body", kind, meaning))
    if not rows:
        return None
    return joined(element("h4", "Parameters"), table(("Name", "In", "Type", "Meaning"), rows))


def _responses(found: Route, schemas: Schemas) -> Iterator[Markup]:
    for status, response in openapi.responses_of(found, schemas).items():
        for media_type, content in response.get("content", {}).items():
            example = content["example"]
            yield element("h4", f"Response {status} ", element("span", media_type, class_="type"))
            yield element("pre", example if isinstance(example, str) else _json(example))
            rows: list[tuple[Part, ...]] = [
                (_name(field), kind, meaning)
                for field, _, kind, meaning in _fields_of(content["schema"], schemas)
            ]
            if rows:
                fields = table(("Name", "Type", "Meaning"), rows)
                yield element("details", element("summary", "Fields"), fields)


def _problems(found: Route) -> Markup:
    items = [
        element("li", element("b", status), *(joined(element("code", code), " ") for code in codes))
        for status, codes in found.problems.items()
        if status not in found.other_responses
    ]
    return element("ul", *items, class_="problems")


def _curl(found: Route, schemas: Schemas) -> str:
    path = found.template.replace("{id}", str(schemas.example(schemas.of(found.id_type))))
    lines = ["curl" + (f" -X {found.method}" if found.method != "GET" else "") + f" {_ADDRESS}{path}"]
    if found.scope:
        lines.append('-H "Authorization: Bearer $TOKEN"')
    example = schemas.example(schemas.of(found.body)) if found.body else None
    if example:
        lines.append("-H 'Content-Type: application/json'")
        lines.append(f"-d {shlex.quote(json.dumps(example))}")
    return " \\\n  ".join(lines)


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


def _method(route: Route) -> Markup:
    return element("span", route.method, class_=f"method {route.method}")


def _name(name: str, *, required: bool = False) -> Markup:
    return joined(element("code", name), element("span", "required", class_="must") if required else None)


def _paragraphs(text: str) -> Markup:
    """Return the document's own text as paragraphs and lists."""
    parts = []
    for block in text.split("\n\n"):
        if block.startswith("- "):
            items = [element("li", _line(item)) for item in block.removeprefix("- ").split("\n- ")]
            parts.append(element("ul", *items))
        else:
            parts.append(element("p", _line(block)))
    return joined(*parts)


def _line(text: str) -> Markup:
    """Show text between backticks as code."""
    return joined(*(element("code", part) if odd % 2 else part for odd, part in enumerate(_CODE.split(text))))


def _fields_of(
    schema: Schema, schemas: Schemas, prefix: str = ""
) -> Iterator[tuple[str, bool, Markup, Markup]]:
    """Yield each field's name, whether it is required, its type and its meaning; inner objects included."""
    schema = schemas.resolved(schema)
    for name, field in schema.get("properties", {}).items():
        yield f"{prefix}{name}", name in schema.get("required", []), *_described(field, schemas)
        for suffix, inner in _inner(field, schemas):
            yield from _fields_of(inner, schemas, f"{prefix}{name}{suffix}.")


def _described(schema: Schema, schemas: Schemas) -> tuple[Markup, Markup]:
    """Return a field's type and meaning."""
    options = [schema, *schema.get("anyOf", [])]
    meanings: list[Part] = [option["description"] for option in options if "description" in option][:1]
    if schema.get("default") is not None:
        meanings.append(joined("default ", element("code", json.dumps(schema["default"]))))
    meanings += [
        joined("pattern ", element("code", option["pattern"])) for option in options if "pattern" in option
    ]
    meaning = joined(*(element("div", part) for part in meanings))
    return element("span", _type(schema, schemas), class_="type"), meaning


def _inner(schema: Schema, schemas: Schemas) -> Iterator[tuple[str, Schema]]:
    for option in schema.get("anyOf", [schema]):
        found = schemas.resolved(option)
        if found.get("type") == "array":
            for suffix, inner in _inner(found["items"], schemas):
                yield f"[]{suffix}", inner
        elif "properties" in found:
            yield "", found


def _type(schema: Schema, schemas: Schemas) -> str:
    if "anyOf" in schema:
        return " or ".join(_type(option, schemas) for option in schema["anyOf"])
    schema = schemas.resolved(schema)
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    kind = schema.get("type")
    if kind == "array":
        limit = f" of at most {schema['maxItems']}" if "maxItems" in schema else ""
        return f"list{limit}: {_type(schema['items'], schemas)}"
    if kind is None:
        return "any JSON"
    name = _FORMAT_NAMES.get(schema.get("format", ""), str(kind))
    return ", ".join([name, *_bounds(schema)])


def _bounds(schema: Schema) -> Iterator[str]:
    low, high = schema.get("minimum"), schema.get("maximum")
    if high is not None and high < 2**53:
        yield f"{low} to {high}"
    elif low is not None:
        yield f"at least {low}"
    if "maxLength" in schema:
        yield f"{schema.get('minLength', 0) or 'up'} to {schema['maxLength']} characters"
    if "maxProperties" in schema:
        yield f"at most {schema['maxProperties']}"
