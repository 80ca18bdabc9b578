"""/openapi.json and the page /docs, which shows the same to people. Both are rendered once, at start.

Both are open without a token: they reveal only the version, which every delivery also carries, and generators
of clients have no token yet.
"""

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from aiohttp import web

from webhookd.http import openapi, responses
from webhookd.http.openapi import resolve
from webhookd.http.pages import Markup, Part, element, joined, links, page, page_response, table
from webhookd.http.problems import PROBLEM_JSON, not_found
from webhookd.http.responses import HEADERS, encoded
from webhookd.http.routes import HTML, JSON, Resource, Route, route

_CODE = re.compile(r"`([^`]+)`")
# Replaced by the requested address when the page is served, if that address is plausible.
_ADDRESS = "http://127.0.0.1:8470"
_HOST = re.compile(r"[A-Za-z0-9._:\[\]-]{1,255}\Z")
_FORMAT_NAMES = {"date-time": "time", "uri": "URL"}


class Documents(Resource):
    """The routes /openapi.json and /docs."""

    def __init__(self, routes: Sequence[Route]) -> None:
        document = openapi.document([*routes, *self.routes()])
        self._document = encoded(document)
        self._page = render(document)

    @route("GET /openapi.json", None, "Get this document", responses.Document, uses_database=False)
    async def _openapi(self, _: web.Request) -> web.Response:
        return web.Response(body=self._document, content_type=JSON, headers=HEADERS)

    @route(
        "GET /docs", None, "Show the API documentation", responses.Html, media_type=HTML, uses_database=False
    )
    async def _docs(self, request: web.Request) -> web.Response:
        # A proxy in front may end TLS. No command on the page should send a token without TLS then.
        scheme = "https" if request.headers.get("X-Forwarded-Proto") == "https" else request.scheme
        return page_response(served_from(self._page, scheme, request.host))


class Operation:
    """A method on a path, with its part of the OpenAPI document."""

    def __init__(self, method: str, path: str, details: dict[str, Any], document: dict[str, Any]) -> None:
        self.method = method.upper()
        self.path = path
        self.details = details
        self.document = document

    @property
    def anchor(self) -> str:
        return str(self.details["operationId"])

    @property
    def scope(self) -> str | None:
        return next((scopes[0] for scheme in self.details["security"] for scopes in scheme.values()), None)

    @property
    def body(self) -> dict[str, Any] | None:
        """The JSON request body, unless it is empty."""
        content = self.details.get("requestBody", {}).get("content", {}).get("application/json")
        return content if content and content["example"] else None

    @property
    def example_id(self) -> str:
        """An example id for the path."""
        parameters = self.details.get("parameters", [])
        ids = [found["schema"]["examples"] for found in parameters if found["in"] == "path"]
        return str(ids[0][0]) if ids else ""

    @property
    def successes(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Status, media type and content of each successful response."""
        for status, response in self.details["responses"].items():
            for media_type, content in response.get("content", {}).items():
                if media_type != PROBLEM_JSON and "example" in content:
                    yield status, media_type, content


def render(document: dict[str, Any]) -> str:
    """Return the page for an OpenAPI document."""
    operations = [
        Operation(method, path, details, document)
        for path, methods in document["paths"].items()
        for method, details in methods.items()
    ]
    groups: dict[str, list[Operation]] = {}
    for operation in operations:
        groups.setdefault(operation.details["tags"][0], []).append(operation)
    info = document["info"]
    brand = element("span", "webhookd", element("small", info["version"]), class_="brand")
    content = element(
        "div",
        element("h1", "API reference"),
        _paragraphs(info["description"]),
        element("h2", "Errors"),
        element("pre", _json(not_found("event", 42).document)),
        element("h2", "Authentication"),
        _paragraphs(document["components"]["securitySchemes"]["token"]["description"]),
        element(
            "p",
            "The same document as OpenAPI 3.1, for programs: ",
            element("a", "/openapi.json", href="/openapi.json"),
        ),
        *(
            joined(element("h2", name.replace("-", " "), class_="group", id=name), *map(_operation, group))
            for name, group in groups.items()
        ),
    )
    return page(
        "webhookd: API reference",
        element("header", brand, links("/docs")),
        element("main", _contents(groups), content),
        kind="docs",
    )


def served_from(rendered: str, scheme: str, host: str) -> str:
    """Return the page with commands for the requested address. The host comes from the client: check it."""
    return rendered.replace(_ADDRESS, f"{scheme}://{host}") if _HOST.match(host) else rendered


def _contents(groups: dict[str, list[Operation]]) -> Markup:
    parts = []
    for name, group in groups.items():
        items = [
            element(
                "li",
                element(
                    "a",
                    _method(operation),
                    element("span", operation.details["summary"]),
                    href=f"#{operation.anchor}",
                ),
            )
            for operation in group
        ]
        parts += [element("h2", name.replace("-", " ")), element("ul", *items)]
    return element("nav", *parts, class_="contents", aria_label="Routes")


def _operation(operation: Operation) -> Markup:
    details = operation.details
    scope = joined("scope ", element("code", operation.scope)) if operation.scope else Markup("no token")
    heading = element(
        "h3",
        _method(operation),
        element("a", operation.path, href=f"#{operation.anchor}", class_="path"),
        element("span", scope, class_="scope"),
    )
    return element(
        "article",
        heading,
        element("p", _line(f"{details['summary']}. {details.get('description', '')}".strip())),
        _parameters(operation),
        element("h4", "Example"),
        element("pre", _curl(operation)),
        *(_response(operation, *success) for success in operation.successes),
        element("h4", "Errors"),
        _problems(operation),
        class_="operation",
        id=operation.anchor,
    )


def _parameters(operation: Operation) -> Markup | None:
    rows: list[tuple[Part, ...]] = []
    for parameter in operation.details.get("parameters", []):
        name = _name(parameter["name"], required=parameter.get("required", False))
        rows.append((name, parameter["in"], *described(parameter["schema"], operation.document)))
    if operation.body:
        schema = resolve(operation.body["schema"], operation.document)
        for field, required, (kind, meaning) in fields_of(schema, operation.document):
            rows.append((_name(field, required=required), "body", kind, meaning))
    if not rows:
        return None
    return joined(element("h4", "Parameters"), table(("Name", "In", "Type", "Meaning"), rows))


def _response(operation: Operation, status: str, media_type: str, content: dict[str, Any]) -> Markup:
    example = content["example"]
    text = example if isinstance(example, str) else _json(example)
    rows: list[tuple[Part, ...]] = [
        (_name(field), kind, meaning)
        for field, _, (kind, meaning) in fields_of(
            resolve(content["schema"], operation.document), operation.document
        )
    ]
    fields = (
        element("details", element("summary", "Fields"), table(("Name", "Type", "Meaning"), rows))
        if rows
        else None
    )
    return joined(
        element("h4", f"Response {status} ", element("span", media_type, class_="type")),
        element("pre", text),
        fields,
    )


def _problems(operation: Operation) -> Markup:
    items = []
    for status, response in operation.details["responses"].items():
        codes = response["description"].partition(": ")[2]
        if codes:
            parts = (joined(element("code", code), " ") for code in codes.split(", "))
            items.append(element("li", element("b", status), *parts))
    return element("ul", *items, class_="problems")


def _curl(operation: Operation) -> str:
    path = operation.path.replace("{id}", operation.example_id)
    lines = ["curl" + (f" -X {operation.method}" if operation.method != "GET" else "") + f" {_ADDRESS}{path}"]
    if operation.scope:
        lines.append('-H "Authorization: Bearer $TOKEN"')
    if operation.body:
        lines.append("-H 'Content-Type: application/json'")
        lines.append(f"-d {shlex.quote(json.dumps(operation.body['example']))}")
    return " \\\n  ".join(lines)


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


def _method(operation: Operation) -> Markup:
    return element("span", operation.method, class_=f"method {operation.method}")


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


def fields_of(
    schema: dict[str, Any], document: dict[str, Any], prefix: str = ""
) -> Iterator[tuple[str, bool, tuple[Markup, Markup]]]:
    """Yield each field's name, whether it is required, and its type and meaning; inner objects included."""
    for name, field in schema.get("properties", {}).items():
        required = name in schema.get("required", [])
        yield f"{prefix}{name}", required, described(field, document)
        for suffix, inner in _inner(field, document):
            yield from fields_of(inner, document, f"{prefix}{name}{suffix}.")


def described(schema: dict[str, Any], document: dict[str, Any]) -> tuple[Markup, Markup]:
    """Return a field's type and meaning."""
    options = [schema, *schema.get("anyOf", [])]
    meanings: list[Part] = [
        next((option["description"] for option in options if "description" in option), None)
    ]
    if schema.get("default") is not None:
        meanings.append(joined("default ", element("code", json.dumps(schema["default"]))))
    meanings += [
        joined("pattern ", element("code", option["pattern"])) for option in options if "pattern" in option
    ]
    meaning = joined(*(element("div", part) for part in meanings if part))
    return element("span", _type(schema, document), class_="type"), meaning


def _inner(schema: dict[str, Any], document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for option in schema.get("anyOf", [schema]):
        found = resolve(option, document)
        if found.get("type") == "array":
            for suffix, inner in _inner(found["items"], document):
                yield f"[]{suffix}", inner
        elif "properties" in found:
            yield "", found


def _type(schema: dict[str, Any], document: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_type(option, document) for option in schema["anyOf"])
    schema = resolve(schema, document)
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    kind = schema.get("type")
    if kind == "array":
        limit = f" of at most {schema['maxItems']}" if "maxItems" in schema else ""
        return f"list{limit}: {_type(schema['items'], document)}"
    if kind is None:
        return "any JSON"
    name = _FORMAT_NAMES.get(schema.get("format", ""), str(kind))
    return ", ".join([name, *_bounds(schema)])


def _bounds(schema: dict[str, Any]) -> Iterator[str]:
    low, high = schema.get("minimum"), schema.get("maximum")
    if high is not None and high < 2**53:
        yield f"{low} to {high}"
    elif low is not None:
        yield f"at least {low}"
    if "maxLength" in schema:
        yield f"{schema.get('minLength', 0) or 'up'} to {schema['maxLength']} characters"
    if "maxProperties" in schema:
        yield f"at most {schema['maxProperties']}"
