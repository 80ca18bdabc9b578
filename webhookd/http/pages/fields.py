"""What a field takes, in words: its type, its bounds and its default. Pure: a schema in, markup out."""

import json
from collections.abc import Iterator
from typing import Any

from webhookd.http.pages.html import Markup, Part, element, joined

_NAMES = {"date-time": "time", "uri": "URL"}
_PREFIX = "#/components/schemas/"


def resolved(schema: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    """The schema itself, where this one only refers to it."""
    name = schema.get("$ref", "").removeprefix(_PREFIX)
    found: dict[str, Any] = document["components"]["schemas"][name] if name else schema
    return found


def fields_of(
    schema: dict[str, Any], document: dict[str, Any], prefix: str = ""
) -> Iterator[tuple[str, bool, tuple[Markup, Markup]]]:
    """Each field's name, whether it must be there, and its type and meaning; those of inner objects too."""
    for name, field in schema.get("properties", {}).items():
        must = name in schema.get("required", [])
        yield f"{prefix}{name}", must, described(field, document)
        for mark, inner in _inner(field, document):
            yield from fields_of(inner, document, f"{prefix}{name}{mark}.")


def described(schema: dict[str, Any], document: dict[str, Any]) -> tuple[Markup, Markup]:
    """A field's type and its meaning."""
    options = [schema, *schema.get("anyOf", [])]
    said: list[Part] = [next((one["description"] for one in options if "description" in one), None)]
    if schema.get("default") is not None:
        said.append(joined("default ", element("code", json.dumps(schema["default"]))))
    said += [joined("as ", element("code", one["pattern"])) for one in options if "pattern" in one]
    meaning = joined(*(element("div", part) for part in said if part))
    return element("span", _type(schema, document), class_="type"), meaning


def _inner(schema: dict[str, Any], document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for option in schema.get("anyOf", [schema]):
        found = resolved(option, document)
        if found.get("type") == "array":
            for mark, inner in _inner(found["items"], document):
                yield f"[]{mark}", inner
        elif "properties" in found:
            yield "", found


def _type(schema: dict[str, Any], document: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_type(option, document) for option in schema["anyOf"])
    schema = resolved(schema, document)
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    kind = schema.get("type")
    if kind == "array":
        most = f" of at most {schema['maxItems']}" if "maxItems" in schema else ""
        return f"list{most}: {_type(schema['items'], document)}"
    if kind is None:
        return "any JSON"
    name = _NAMES.get(schema.get("format", ""), str(kind))
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
