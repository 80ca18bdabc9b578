"""JSON Schemas of our types, as OpenAPI holds them; and an example of each, made of its fields' own."""

from collections.abc import Iterable
from typing import Any, TypeAlias, get_type_hints

import msgspec

Schema: TypeAlias = dict[str, Any]

_PREFIX = "#/components/schemas/"
# Shown for a field whose type has no example of its own.
_OF_TYPES: Schema = {"string": "…", "integer": 1, "number": 1.0, "boolean": True, "null": None}


class Schemas:
    """Types in, schemas out. What has a name is among the components, and referred to."""

    def __init__(self, types: Iterable[Any]) -> None:
        distinct = list(dict.fromkeys(types))
        made, components = msgspec.json.schema_components(distinct, ref_template=f"{_PREFIX}{{name}}")
        self.components: dict[str, Schema] = components
        self._made: dict[Any, Schema] = dict(zip(distinct, made, strict=True))
        for schema in (*made, *components.values()):
            _make_portable(schema)
        for kind in distinct:
            self._put_in_order(kind)

    def of(self, kind: Any) -> Schema:
        """The schema of one of the types, or where it is."""
        return self._made[kind]

    def resolved(self, schema: Schema) -> Schema:
        """The schema itself, where this one only refers to it."""
        name = schema.get("$ref", "").removeprefix(_PREFIX)
        return self.components[name] if name else schema

    def take_apart(self, kind: Any) -> dict[str, Schema]:
        """The fields of a type that is not to be a component: a query is parameters."""
        name = self._made[kind]["$ref"].removeprefix(_PREFIX)
        fields: dict[str, Schema] = self.components.pop(name)["properties"]
        return fields

    def example(self, schema: Schema) -> Any:
        """A value that fits."""
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
                return _OF_TYPES.get(str(kind), {})

    def _put_in_order(self, kind: Any) -> None:
        """Msgspec sorts a typed dictionary's fields by name; as they are written they are easier to read."""
        if not hasattr(kind, "__required_keys__"):
            return
        hints = get_type_hints(kind)
        schema = self.components[kind.__name__]
        schema["properties"] = {name: schema["properties"][name] for name in hints}
        schema["required"] = [name for name in hints if name in kind.__required_keys__]
        for hint in hints.values():
            for part in (hint, *getattr(hint, "__args__", ())):
                self._put_in_order(part)


def _make_portable(schema: Any) -> None:
    """Python's patterns to those of JSON Schema, where `$` is the very end, and no text has half a pair."""
    if isinstance(schema, list):
        for part in schema:
            _make_portable(part)
    if not isinstance(schema, dict):
        return
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        schema["pattern"] = pattern.replace(r"\Z", "$").replace(r"\ud800-\udfff", "")
    for name, part in schema.items():
        if name not in ("examples", "default", "enum"):
            _make_portable(part)
