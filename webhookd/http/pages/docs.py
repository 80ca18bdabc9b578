"""The page at /docs: the OpenAPI document, to read. Pure: the document in, a page out."""

import json
import re
import shlex
from collections.abc import Iterator
from typing import Any

from webhookd.http.pages.fields import described, fields_of, resolved
from webhookd.http.pages.html import Markup, Part, element, joined, table
from webhookd.http.pages.layout import links, page
from webhookd.http.problems import PROBLEM_JSON, not_found

_CODE = re.compile(r"`([^`]+)`")
# In the page until it is asked for, and where nobody knows a better one.
_ADDRESS = "http://127.0.0.1:8470"
_HOST = re.compile(r"[A-Za-z0-9._:\[\]-]{1,255}\Z")


class Operation:
    """A method on a path."""

    def __init__(self, method: str, path: str, said: dict[str, Any], document: dict[str, Any]) -> None:
        self.method = method.upper()
        self.path = path
        self.said = said
        self.document = document

    @property
    def anchor(self) -> str:
        return str(self.said["operationId"])

    @property
    def scope(self) -> str | None:
        return next((scopes[0] for one in self.said["security"] for scopes in one.values()), None)

    @property
    def body(self) -> dict[str, Any] | None:
        """The content that it takes, unless that is nothing."""
        content = self.said.get("requestBody", {}).get("content", {}).get("application/json")
        return content if content and content["example"] else None

    @property
    def example_id(self) -> str:
        """One that could be in the path."""
        ids = [one["schema"]["examples"] for one in self.said.get("parameters", []) if one["in"] == "path"]
        return str(ids[0][0]) if ids else ""

    @property
    def answers(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Status, media type and content of those that are what was asked for."""
        for status, answer in self.said["responses"].items():
            for media_type, content in answer.get("content", {}).items():
                if media_type != PROBLEM_JSON and "example" in content:
                    yield status, media_type, content


def render(document: dict[str, Any]) -> str:
    """The whole of it."""
    operations = [
        Operation(method, path, said, document)
        for path, methods in document["paths"].items()
        for method, said in methods.items()
    ]
    groups: dict[str, list[Operation]] = {}
    for operation in operations:
        groups.setdefault(operation.said["tags"][0], []).append(operation)
    info = document["info"]
    brand = element("span", "webhookd", element("small", info["version"]), class_="brand")
    content = element(
        "div",
        element("h1", "The API"),
        _words(info["description"]),
        element("h2", "A problem"),
        element("pre", _json(not_found("event", 42).document)),
        element("h2", "Who may ask"),
        _words(document["components"]["securitySchemes"]["token"]["description"]),
        element(
            "p",
            "The same for programs, as OpenAPI 3.1: ",
            element("a", "/openapi.json", href="/openapi.json"),
        ),
        *(
            joined(element("h2", name.replace("-", " "), class_="group", id=name), *map(_operation, group))
            for name, group in groups.items()
        ),
    )
    return page(
        "webhookd: the API",
        element("header", brand, links("/docs")),
        element("main", _contents(groups), content),
        kind="docs",
    )


def served_from(rendered: str, scheme: str, host: str) -> str:
    """The page with commands that ask where it was asked for: the host is the client's word."""
    return rendered.replace(_ADDRESS, f"{scheme}://{host}") if _HOST.match(host) else rendered


def _contents(groups: dict[str, list[Operation]]) -> Markup:
    parts = []
    for name, group in groups.items():
        items = [
            element(
                "li", element("a", _method(one), element("span", one.said["summary"]), href=f"#{one.anchor}")
            )
            for one in group
        ]
        parts += [element("h2", name.replace("-", " ")), element("ul", *items)]
    return element("nav", *parts, class_="contents", aria_label="Routes")


def _operation(operation: Operation) -> Markup:
    said = operation.said
    scope = joined("scope ", element("code", operation.scope)) if operation.scope else Markup("open to all")
    heading = element(
        "h3",
        _method(operation),
        element("a", operation.path, href=f"#{operation.anchor}", class_="path"),
        element("span", scope, class_="scope"),
    )
    return element(
        "article",
        heading,
        element("p", _line(f"{said['summary']}. {said.get('description', '')}".strip())),
        _takes(operation),
        element("h4", "Ask"),
        element("pre", _curl(operation)),
        *(_answer(operation, *answer) for answer in operation.answers),
        element("h4", "Or a problem"),
        _problems(operation),
        class_="operation",
        id=operation.anchor,
    )


def _takes(operation: Operation) -> Markup | None:
    rows: list[tuple[Part, ...]] = []
    for parameter in operation.said.get("parameters", []):
        name = _name(parameter["name"], must=parameter.get("required", False))
        rows.append((name, parameter["in"], *described(parameter["schema"], operation.document)))
    if operation.body:
        schema = resolved(operation.body["schema"], operation.document)
        for field, must, (kind, meaning) in fields_of(schema, operation.document):
            rows.append((_name(field, must=must), "body", kind, meaning))
    if not rows:
        return None
    return joined(element("h4", "Takes"), table(("Name", "In", "Type", "Meaning"), rows))


def _answer(operation: Operation, status: str, media_type: str, content: dict[str, Any]) -> Markup:
    example = content["example"]
    text = example if isinstance(example, str) else _json(example)
    rows: list[tuple[Part, ...]] = [
        (_name(field), kind, meaning)
        for field, _, (kind, meaning) in fields_of(
            resolved(content["schema"], operation.document), operation.document
        )
    ]
    fields = (
        element("details", element("summary", "Field by field"), table(("Name", "Type", "Meaning"), rows))
        if rows
        else None
    )
    return joined(
        element("h4", f"Answer {status} ", element("span", media_type, class_="type")),
        element("pre", text),
        fields,
    )


def _problems(operation: Operation) -> Markup:
    items = []
    for status, answer in operation.said["responses"].items():
        codes = answer["description"].partition(": ")[2]
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


def _name(name: str, *, must: bool = False) -> Markup:
    return joined(element("code", name), element("span", "required", class_="must") if must else None)


def _words(text: str) -> Markup:
    """Paragraphs and lists of our own description."""
    parts = []
    for block in text.split("\n\n"):
        if block.startswith("- "):
            items = [element("li", _line(item)) for item in block.removeprefix("- ").split("\n- ")]
            parts.append(element("ul", *items))
        else:
            parts.append(element("p", _line(block)))
    return joined(*parts)


def _line(text: str) -> Markup:
    """What stands between backticks is code."""
    return joined(*(element("code", part) if odd % 2 else part for odd, part in enumerate(_CODE.split(text))))
