"""JSON schemas as data: the schemas within a schema, and which of them no finite value satisfies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

# Keywords whose value maps names to schemas.
BY_NAME = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")
# Keywords whose value is plain JSON data. It is not searched for schemas, even if it looks like one.
VALUES = ("const", "enum", "default", "example", "examples")
# Keywords that a grammar for constrained decoding cannot enforce.
NOT_ENFORCED = frozenset(
    [
        *("uniqueItems", "contains", "minContains", "maxContains", "propertyNames", "not", "if", "then", "else"),
        *("dependencies", "dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties"),
        *("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"),
    ]
)
# Values with which a keyword of NOT_ENFORCED restricts nothing.
NO_LIMIT: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties"), (True, {})),
    **{"uniqueItems": (False,), "not": (False,), "propertyNames": (True, {}, {"type": "string"})},
    **dict.fromkeys(("dependencies", "dependentRequired", "dependentSchemas"), ({},)),
}
# Keywords that can allow arguments which `properties` does not list.
ANY_ARGUMENTS = (
    *("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames", "minProperties"),
    *("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "const", "enum", "if", "dependentSchemas"),
)

Place = tuple[str | int, ...]  # Path of a part within a schema: object keys and list indices.
Schema = Mapping[str, Any]


def parts(schema: Schema) -> Iterator[tuple[Place, Schema]]:
    """Yield the schemas directly within a schema, by their places; definitions first.

    Unknown keywords may hold schemas too, for references to them.
    """
    for key in sorted((key for key in schema if key not in VALUES), key=lambda key: key not in BY_NAME[:2]):
        value, within = schema[key], list[tuple[Place, Any]]()
        if key in BY_NAME and isinstance(value, Mapping):
            within = [((key, name), part) for name, part in value.items()]
        elif isinstance(value, list):
            within = [((key, number), part) for number, part in enumerate(value)]
        else:
            within = [((key,), value)]
        yield from ((place, part) for place, part in within if isinstance(part, Mapping))


def walk(schema: Schema, place: Place = ()) -> Iterator[tuple[Place, Schema]]:
    """Yield a schema and all within it, by their places."""
    yield place, schema
    for inner, part in parts(schema):
        yield from walk(part, (*place, *inner))


def rewritten(schema: Schema, change: Callable[[Schema, dict[str, Any]], Any]) -> Any:
    """Return a schema rewritten bottom-up: `change` gets each original schema and its copy with rewritten parts."""

    def within(key: str, value: Any) -> Any:
        if key in VALUES:
            return value
        if isinstance(value, list):
            return [within("", part) for part in value]
        if key in BY_NAME and isinstance(value, Mapping):
            return {name: within("", part) for name, part in value.items()}
        return rewritten(value, change) if isinstance(value, Mapping) else value

    return change(schema, {key: within(key, value) for key, value in schema.items()})


def limits(schema: Schema) -> dict[str, Any]:
    """Return a schema without keywords whose value is listed in NO_LIMIT."""
    return {key: value for key, value in schema.items() if value not in NO_LIMIT.get(key, ())}


def not_enforced(schema: Schema) -> list[Place]:
    """Return the places of the keywords that no grammar can enforce and that do restrict something."""
    return [(*place, key) for place, part in walk(schema) for key in limits(part) if key in NOT_ENFORCED]


def relaxed(schema: Schema) -> Any:
    """Return a schema without the keywords in NOT_ENFORCED."""
    return rewritten(schema, lambda _, part: {key: part[key] for key in part if key not in NOT_ENFORCED})


def has_arguments(parameters: Schema | None) -> bool:
    """Return whether a function's parameters name an argument, or say that there may be others."""
    if not parameters:
        return False
    if parameters.get("type", "object") != "object":
        return True
    opened = (key in parameters and parameters[key] not in (None, False) for key in ANY_ARGUMENTS)
    return bool(parameters.get("properties") or parameters.get("required")) or any(opened)


def target(root: Schema, reference: Any) -> Any:
    """Return the part of a schema that a `$ref` within it leads to by a JSON pointer; None: it leads to none."""
    value: Any = root
    start, *words = unquote(str(reference)).split("/")
    if start != "#":
        return None
    for word in words:
        key = word.replace("~1", "/").replace("~0", "~")
        try:
            value = value[int(key)] if isinstance(value, list) else value[key]
        except (KeyError, IndexError, ValueError, TypeError):
            return None
    return value


def endless(root: Schema) -> frozenset[int]:
    """Return the `id()` of every part that requires itself recursively, so that no finite value satisfies it."""
    nodes = {id(part): part for _, part in walk(root)}
    ended, n_before = set[int](), -1
    if any("$id" in part for part in nodes.values() if part is not root):
        # With an inner `$id`, references may be relative to that part, which `target` cannot resolve.
        return frozenset()

    def ends(value: Any) -> bool:
        return not isinstance(value, Mapping) or id(value) in ended or id(value) not in nodes

    def of_kind(part: Schema, kind: Any) -> bool:
        if kind == "object":
            properties = part.get("properties") or {}
            others = None if part.get("patternProperties") else part.get("additionalProperties")
            return all(ends(properties.get(name, others)) for name in part.get("required") or ())
        if kind == "array":
            first = [*(part.get("prefixItems") or ()), part.get("items")]
            least = part.get("minItems")
            return all(map(ends, first[:least])) if isinstance(least, int) else True
        return True

    def has_end(part: Schema) -> bool:
        kinds = part.get("type")
        kinds = kinds if isinstance(kinds, list) else [kinds]
        return (
            ("$ref" not in part or ends(target(root, part["$ref"])))
            and all(map(ends, part.get("allOf") or ()))
            and all(any(map(ends, part[key])) for key in ("anyOf", "oneOf") if part.get(key))
            and ("const" in part or "enum" in part or any(of_kind(part, kind) for kind in kinds))
        )

    while len(ended) > n_before:
        n_before = len(ended)
        ended |= {key for key in reversed(nodes) if key not in ended and has_end(nodes[key])}
    return frozenset(nodes.keys() - ended)
