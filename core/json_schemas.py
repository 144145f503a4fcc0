"""JSON schemas as data: the schemas within a schema, and which of them no finite value satisfies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

# Keywords whose value maps names to schemas.
BY_NAME = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")
# Keywords whose value is a list.
LISTS = ("required", "prefixItems", "allOf", "anyOf", "oneOf")
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

# Keywords that combine schemas, and those of objects: a part with both is satisfied only where its branches allow what
# the part itself names.
COMBINING = ("anyOf", "oneOf", "$ref", "$dynamicRef", "$recursiveRef")
ALWAYS_COMBINING = ("allOf", "if", "dependentSchemas", "dependencies", "unevaluatedProperties")
COUNTING_OTHERS = ("additionalProperties", "patternProperties", "minProperties", "maxProperties")
OF_OBJECTS = (
    *COUNTING_OTHERS,
    *("properties", "required", "propertyNames", "dependentRequired"),
)

Place = tuple[str | int, ...]  # Path of a part within a schema: object keys and list indices.
Schema = Mapping[str, Any]


def parts(schema: Schema) -> Iterator[tuple[Place, Schema]]:
    """Yield the schemas directly within a schema with their places; definitions first.

    Unknown keywords may contain schemas, too, because references may point there.
    """
    for key in sorted((key for key in schema if key not in VALUES), key=lambda key: key not in BY_NAME[:2]):
        value, inner_parts = schema[key], list[tuple[Place, Any]]()
        if key in BY_NAME and isinstance(value, Mapping):
            inner_parts = [((key, name), part) for name, part in value.items()]
        elif isinstance(value, list):
            inner_parts = [((key, index), part) for index, part in enumerate(value)]
        else:
            inner_parts = [((key,), value)]
        yield from ((place, part) for place, part in inner_parts if isinstance(part, Mapping))


def walk(schema: Schema, place: Place = ()) -> Iterator[tuple[Place, Schema]]:
    """Yield a schema and all within it, by their places."""
    yield place, schema
    for inner, part in parts(schema):
        yield from walk(part, (*place, *inner))


def find_misshapen(root: Schema) -> tuple[Place, Any, str] | None:
    """Return the place and the value of the first keyword whose value has a wrong type, and the expected type."""
    for place, part in walk(root):
        for key, value in part.items():
            expected = "an object" if key in BY_NAME else "a list" if key in LISTS else ""
            if expected and value is not None and not isinstance(value, Mapping if key in BY_NAME else list):
                return (*place, key), value, expected
        for index, name in enumerate(part.get("required") or ()):
            if not isinstance(name, str):
                return (*place, "required", index), name, "a text"
    return None


def rewrite(schema: Schema, change: Callable[[Schema, dict[str, Any]], Any]) -> Any:
    """Return a schema rewritten bottom-up: `change` gets each original schema and its copy with rewritten parts."""

    def rewrite_inner(key: str, value: Any) -> Any:
        if key in VALUES:
            return value
        if isinstance(value, list):
            return [rewrite_inner("", part) for part in value]
        if key in BY_NAME and isinstance(value, Mapping):
            return {name: rewrite_inner("", part) for name, part in value.items()}
        return rewrite(value, change) if isinstance(value, Mapping) else value

    return change(schema, {key: rewrite_inner(key, value) for key, value in schema.items()})


def limits(schema: Schema) -> dict[str, Any]:
    """Return a schema without keywords whose value is listed in NO_LIMIT."""
    return {key: value for key, value in schema.items() if value not in NO_LIMIT.get(key, ())}


def list_not_enforced(schema: Schema) -> list[Place]:
    """Return the places of the keywords that no grammar can enforce and that do restrict something."""
    return [(*place, key) for place, part in walk(schema) for key in limits(part) if key in NOT_ENFORCED]


def relax(schema: Schema) -> Any:
    """Return a schema without the keywords in NOT_ENFORCED."""
    return rewrite(schema, lambda _, part: {key: part[key] for key in part if key not in NOT_ENFORCED})


def has_arguments(parameters: Schema | None) -> bool:
    """Return whether a function's parameters name an argument, or allow others."""
    if not parameters:
        return False
    if parameters.get("type", "object") != "object":
        return True
    allows_others = (key in parameters and parameters[key] not in (None, False) for key in ANY_ARGUMENTS)
    return bool(parameters.get("properties") or parameters.get("required")) or any(allows_others)


def can_close(root: Schema) -> bool:
    """Return whether no object in a schema is described by several of its parts together."""
    return not any(
        any(key in part for key in ALWAYS_COMBINING)
        or (any(key in part for key in COMBINING) and any(key in part for key in OF_OBJECTS))
        for _, part in walk(root)
    )


def is_described(part: Schema) -> bool:
    """Return whether a part names properties of an object, requires no others, and does not mention others."""
    names = part.get("properties")
    if not isinstance(names, Mapping) or not names or any(key in part for key in COUNTING_OTHERS):
        return False
    return all(name in names for name in part.get("required") or ())


def target(root: Schema, reference: Any) -> Any:
    """Return the part of a schema that a `$ref` within it points to by a JSON pointer; None if there is none."""
    part: Any = root
    pointer_root, *pointer_keys = unquote(str(reference)).split("/")
    if pointer_root != "#":
        return None
    for pointer_key in pointer_keys:
        key = pointer_key.replace("~1", "/").replace("~0", "~")
        try:
            part = part[int(key)] if isinstance(part, list) else part[key]
        except (KeyError, IndexError, ValueError, TypeError):
            return None
    return part


def find_endless(root: Schema) -> frozenset[int]:
    """Return the `id()` of every part that requires itself recursively, so that no finite value satisfies it."""
    nodes = {id(part): part for _, part in walk(root)}
    finite_ids, n_before = set[int](), -1
    if any("$id" in part for part in nodes.values() if part is not root):
        # With an inner `$id`, references may be relative to that part, which `target` cannot resolve.
        return frozenset()

    def is_finite(value: Any) -> bool:
        return not isinstance(value, Mapping) or id(value) in finite_ids or id(value) not in nodes

    def is_finite_kind(part: Schema, kind: Any) -> bool:
        if kind == "object":
            properties = part.get("properties") or {}
            other_properties = None if part.get("patternProperties") else part.get("additionalProperties")
            return all(is_finite(properties.get(name, other_properties)) for name in part.get("required") or ())
        if kind == "array":
            item_schemas = [*(part.get("prefixItems") or ()), part.get("items")]
            min_items = part.get("minItems")
            return all(map(is_finite, item_schemas[:min_items])) if isinstance(min_items, int) else True
        return True

    def has_end(part: Schema) -> bool:
        kinds = part.get("type")
        kinds = kinds if isinstance(kinds, list) else [kinds]
        return (
            ("$ref" not in part or is_finite(target(root, part["$ref"])))
            and all(map(is_finite, part.get("allOf") or ()))
            and all(any(map(is_finite, part[key])) for key in ("anyOf", "oneOf") if part.get(key))
            and ("const" in part or "enum" in part or any(is_finite_kind(part, kind) for kind in kinds))
        )

    while len(finite_ids) > n_before:
        n_before = len(finite_ids)
        finite_ids |= {key for key in reversed(nodes) if key not in finite_ids and has_end(nodes[key])}
    return frozenset(nodes.keys() - finite_ids)
