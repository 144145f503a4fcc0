"""Grammars of JSON schemas: texts drawn byte by byte end and satisfy the schema."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer

from swiftopt.core.errors import InvalidInput
from swiftopt.core.json_schemas import find_endless, has_arguments, list_not_enforced, relax, target, walk
from swiftopt.decoding.grammar import Grammar
from swiftopt.decoding.json_grammar import LIMITS, MAX_NAMES, names_of

BYTES = LLTokenizer("byte")
MOST_BYTES = 1200


def matcher_of(grammar: Grammar, prefix: str = "") -> LLMatcher:
    matcher = LLMatcher(BYTES, grammar.source, log_level=0, limits=LIMITS)
    assert not matcher.is_error(), matcher.get_error()
    assert matcher.try_consume_tokens(list(prefix.encode())) == len(prefix.encode())
    return matcher


def following(matcher: LLMatcher) -> list[int]:
    """Return the bytes that may come next; none after a complete text."""
    if matcher.is_stopped():
        return []
    return [byte for byte, bias in enumerate(matcher.compute_logit_bias()[:256]) if bias]


def drawn(grammar: Grammar, seed: int = 0, prefix: str = "") -> str | None:
    """Draw a text of the grammar byte by byte; None if it is too long."""
    matcher, text, draws = matcher_of(grammar, prefix), list(prefix.encode()), random.Random(seed)
    while choices := following(matcher):
        if len(text) > MOST_BYTES:
            return None
        text.append(draws.choice(choices))
        assert matcher.consume_token(text[-1])
    assert matcher.is_accepting(), f"a dead end behind {bytes(text)!r}: {matcher.get_error()}"
    return bytes(text).decode()


def only_text(grammar: Grammar) -> str:
    """Return the only text of a grammar."""
    matcher, text = matcher_of(grammar), list[int]()
    while choices := following(matcher):
        [byte] = choices
        text.append(byte)
        assert matcher.consume_token(byte)
    return bytes(text).decode()


def closed(**properties: Any) -> dict[str, Any]:
    """Return the schema of an object with exactly these properties."""
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


names = st.sampled_from(["a", "b", "ab", "x"])
patterns = st.sampled_from(["^a$", "^(a|b)$", "^[ab]$", "^b", "a", "^[a-c]{1,2}$", "^$", "^[^a]*$"])
values = st.recursive(
    st.sampled_from([None, True, False, 0, -3, 12, 0.5, "", "a", 'b"\n', "é😀"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(names, inner, max_size=2),
    max_leaves=3,
)
small = st.integers(0, 3)
leaves = st.one_of(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["integer", "number"])},
        optional={
            "minimum": st.integers(-3, 3),
            "maximum": st.integers(-3, 9),
            "multipleOf": st.sampled_from([1, 2, 3]),
        },
    ),
    st.fixed_dictionaries(
        {"type": st.just("string"), "maxLength": small},
        optional={"minLength": small, "pattern": patterns, "format": st.sampled_from(["password", "path", "date"])},
    ),
    st.fixed_dictionaries({"const": values}),
    st.fixed_dictionaries({"enum": st.lists(values, min_size=1, max_size=3)}),
    st.fixed_dictionaries({"$ref": st.sampled_from(["#", "#/$defs/leaf", "#/$defs/tree"])}),
    st.sampled_from([{"type": "null"}, {"type": "boolean"}, True, False]),
)


def holding(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.fixed_dictionaries(
        {"type": st.just("array"), "items": inner, "maxItems": small},
        optional={"minItems": small, "prefixItems": st.lists(inner, max_size=2), "uniqueItems": st.just(False)},
    )
    objects = st.fixed_dictionaries(
        {"type": st.just("object"), "properties": st.dictionaries(names, inner, max_size=3)},
        optional={
            "required": st.lists(names, max_size=2, unique=True),
            "additionalProperties": st.just(False) | inner,
            "patternProperties": st.dictionaries(patterns, inner, max_size=2),
            "minProperties": small,
            "maxProperties": small,
        },
    )
    several = st.sampled_from(["anyOf", "oneOf", "allOf"]).flatmap(
        lambda key: st.fixed_dictionaries({key: st.lists(inner, min_size=1, max_size=2)})
    )
    return objects | objects | lists | several


schemas = st.builds(
    lambda schema, leaf, tree: {**schema, "$defs": {"leaf": leaf, "tree": tree}},
    st.recursive(leaves, holding, max_leaves=5).filter(lambda schema: isinstance(schema, dict)),
    leaves,
    holding(leaves),
)


@settings(max_examples=150)
@given(schemas, st.integers(0, 9))
def test_text_drawn_from_a_schema_ends_and_satisfies_it(schema: dict[str, Any], seed: int) -> None:
    """Unsupported schemas are refused. A drawn text may become too long, but it never reaches a dead end."""
    try:
        text = drawn(Grammar.json_schema(schema), seed)
    except InvalidInput:
        return
    if text is not None:
        assert "\n" not in text
        with suppress(RecursionError):  # The validator does not end on references in a circle.
            Draft202012Validator(schema).validate(json.loads(text))


@pytest.mark.parametrize(
    "value",
    [
        True,
        None,
        0,
        -3,
        1.5,
        1e20,
        "",
        'a"\\\n',
        "é😀",
        "\x01\x7f",
        [],
        {},
        [1, [2.5, None]],
        {"b": [], "a": {"c": False}},
    ],
)
def test_constant_parts_of_a_schema_have_one_spelling(value: Any) -> None:
    for fixed in ({"const": value}, {"enum": [value]}):
        assert json.loads(drawn(Grammar.json_schema(fixed)) or "") == value
        text = drawn(Grammar.json_schema(closed(c=fixed, d={"type": "null"}))) or ""
        assert json.loads(text) == {"c": value, "d": None}
    if not isinstance(value, float) and value != "\x01\x7f":  # \u007f and \u007F are the same
        text = only_text(Grammar.json_schema(closed(c={"const": value}, d={"const": 1})))
        assert text == json.dumps({"c": value, "d": 1}, ensure_ascii=False)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"score": {"type": "integer"}}, "patternProperties": {"^score$": {}}},
        {"type": "object", "properties": {"a": {}}, "patternProperties": {"^[ab]$": {"maximum": 3, "type": "integer"}}},
        {"type": "object", "patternProperties": {"^(red|green)$": {"type": "boolean"}}},
        {"type": "object", "patternProperties": {"^x$": False, "^a": False}},
    ],
)
def test_names_of_a_pattern_occur_once_without_a_trailing_comma(schema: dict[str, Any]) -> None:
    schema |= {"additionalProperties": False}
    for seed in range(20):
        text = drawn(Grammar.json_schema(schema), seed)
        pairs = json.loads(text or "", object_pairs_hook=list)
        assert len({name for name, _ in pairs}) == len(pairs)
        Draft202012Validator(schema).validate(dict(pairs))


def test_few_names_of_a_pattern_are_enumerated() -> None:
    assert names_of("^score$") == ("score",) and set(names_of("^(a|bc)$") or ()) == {"a", "bc"}
    assert len(names_of("^[a-z]$") or ()) == 26 and names_of("^[0-9]{2}$") is None and MAX_NAMES < 100
    assert all(names_of(pattern) is None for pattern in ("", "^a", "a+", "^[a-z_]+$", "(?=a)"))


def test_property_is_not_repeated_with_escaped_characters() -> None:
    grammar = Grammar.json_schema(
        {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"], "additionalProperties": True}
    )
    assert ord("u") not in following(matcher_of(grammar, '{"a": null, "\\'))


@pytest.mark.parametrize("name", ["password", "path", "binary", "int64", "uri-reference", "made-up", ""])
def test_unsupported_format_allows_any_text(name: str) -> None:
    """Strings that look like other formats are allowed as well."""
    schema = closed(c={"type": "string", "format": name, "const": "x"}, format={"const": {"format": name}})
    assert json.loads(only_text(Grammar.json_schema(schema))) == {"c": "x", "format": {"format": name}}


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [("date", "2026-11-27", "2026-13"), ("ipv4", "1.2.3.4", "1.2.3.x"), ("uuid", "0" * 8 + "-0000-0000-0000-", "g")],
)
def test_supported_format_is_enforced(name: str, good: str, bad: str) -> None:
    grammar = Grammar.json_schema({"type": "string", "format": name})
    matcher_of(grammar, f'"{good}')
    with pytest.raises(AssertionError):
        matcher_of(grammar, f'"{bad}"')


LIST = {"type": "array", "items": {"$ref": "#/$defs/list"}, "minItems": 1}


@pytest.mark.parametrize(
    "schema",
    [
        closed(k={"$ref": "#"}),
        closed(v={"type": "null"}, k={"anyOf": [{"$ref": "#"}, {"$ref": "#/properties/k"}]}),
        {"$ref": "#/$defs/list", "$defs": {"list": LIST}},
        {"type": "object", "required": ["a"], "additionalProperties": {"$ref": "#"}},
        {"allOf": [{"type": "object"}, {"$ref": "#"}]},
    ],
)
def test_schema_that_no_finite_value_satisfies_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="no finite JSON satisfies it"):
        Grammar.json_schema(schema)


def test_part_without_a_finite_value_is_never_started() -> None:
    schema = {**closed(v={"const": 1}), "$defs": {"list": LIST}}
    schema["properties"] = {**schema["properties"], "k": {"$ref": "#"}, "l": {"$ref": "#/$defs/list"}}
    assert "k" in json.loads(drawn(Grammar.json_schema(schema), prefix='{"v": 1, "k') or "")
    with pytest.raises(AssertionError):
        matcher_of(Grammar.json_schema(schema), '{"v": 1, "l')
    assert len(find_endless(schema)) == 3  # the list, its items, and the property
    assert not find_endless({"type": "object", "properties": {"k": {"$id": "x", "$ref": "#"}}, "required": ["k"]})


ENUM = {"enum": ["p", "q"]}
REFERENCES: dict[str, dict[str, Any]] = {
    "$defs": {**closed(e={"$ref": "#/$defs/E"}), "$defs": {"E": ENUM}},
    "definitions": {**closed(e={"$ref": "#/definitions/E"}), "definitions": {"E": ENUM}},
    "nested": closed(e={"$defs": {"E": ENUM}, "$ref": "#/properties/e/$defs/E"}),
    "property": closed(e={"$ref": "#/properties/f"}, f=ENUM),
    "escaped": {**closed(e={"$ref": "#/$defs/a~1b~0c%20d"}), "$defs": {"a/b~c d": ENUM}},
    "anchor": {**closed(e={"$ref": "#E"}), "$defs": {"E": {"$anchor": "E", **ENUM}}},
    "id": {**closed(e={"$ref": "e.json"}), "$id": "https://example.org/f", "$defs": {"E": {"$id": "e.json", **ENUM}}},
    "urn": {**closed(e={"$ref": "urn:example:e"}), "$defs": {"E": {"$id": "urn:example:e", **ENUM}}},
    "root": closed(e=ENUM, k={"anyOf": [{"$ref": "#"}, {"type": "null"}]}),
    "unknown keyword": {**closed(e={"$ref": "#/components/E"}), "components": {"E": ENUM}},
    "whole": {"$ref": "#/$defs/F", "$defs": {"F": closed(e={"$ref": "#/$defs/E"}), "E": ENUM}},
}


@pytest.mark.parametrize("kind", REFERENCES)
def test_references_of_a_tool_resolve_within_its_parameters(kind: str) -> None:
    """Two tools have different definitions of the same names."""
    others = json.loads(json.dumps(REFERENCES[kind]).replace('["p", "q"]', '["r"]'))
    functions = {"0": {"name": "f", "parameters": REFERENCES[kind]}, "1": {"name": "g", "parameters": others}}
    for seed in range(12):
        call = json.loads(drawn(Grammar.call(functions), seed) or "")
        own = REFERENCES[kind] if call["name"] == "f" else others
        Draft202012Validator(own).validate(call["arguments"])
        assert call["arguments"]["e"] in (ENUM["enum"] if call["name"] == "f" else ["r"])


@pytest.mark.parametrize(
    "reference", ["#/$defs/nowhere", "#nowhere", "https://example.org/nowhere", "nowhere.json", "#/properties/e/0"]
)
def test_broken_reference_of_a_tool_is_refused_with_its_path(reference: str) -> None:
    place = "tools[1].function.parameters"
    functions = {"tools[0].function.parameters": {"name": "f"}, place: {"name": "g", "parameters": {}}}
    functions[place]["parameters"] = closed(e={"$ref": reference})
    with pytest.raises(InvalidInput, match=r"at #/properties/e: ") as caught:
        Grammar.call(functions)
    assert caught.value.param == place and "\n" not in str(caught.value)


NO_ARGUMENTS: tuple[Mapping[str, Any] | None, ...] = (
    *(None, {}, {"type": "object"}, {"type": "object", "properties": {}}, {"properties": {}, "required": []}),
    *({"type": "object", "additionalProperties": False}, {"type": "object", "title": "F", "description": "no more"}),
)


@pytest.mark.parametrize("parameters", NO_ARGUMENTS)
def test_tool_without_named_arguments_gets_an_empty_object(parameters: Mapping[str, Any] | None) -> None:
    assert (
        only_text(Grammar.call({"0": {"name": 'p"é', "parameters": parameters}}))
        == '{"name": "p\\"é", "arguments": {}}'
    )
    assert not has_arguments(parameters)


def test_tool_with_free_arguments_may_get_some() -> None:
    for parameters in ({"additionalProperties": True}, {"additionalProperties": {}}, {"minProperties": 1}):
        grammar = Grammar.call({"0": {"name": "f", "parameters": parameters}})
        assert matcher_of(grammar, '{"name": "f", "arguments": {"a": 1}}').is_accepting()


def test_arguments_are_always_an_object() -> None:
    a = {"properties": {"a": {"type": "null"}}}
    for parameters in (a, {"type": ["object", "null"], **a}, {"$ref": "#/$defs/a", "$defs": {"a": a}}):
        grammar = Grammar.call({"0": {"name": "f", "parameters": parameters}})
        assert following(matcher_of(grammar, '{"name": "f", "arguments": ')) == [ord("{")]
    for kind in ("array", ["string", "null"], 5):
        with pytest.raises(InvalidInput, match="arguments of a call are an object, not"):
            Grammar.call({"0": {"name": "f", "parameters": {"type": kind}}})


def test_tools_with_a_common_prefix_are_distinguished() -> None:
    functions = {name: {"name": name, "parameters": closed(own={"const": name})} for name in ("get", "get_all", "g")}
    calls = [json.loads(drawn(Grammar.call(functions), seed) or "") for seed in range(30)]
    assert {call["name"] for call in calls} == {*functions}
    assert all(call["arguments"] == {"own": call["name"]} for call in calls)


def test_unsupported_keywords_are_reported_and_ignored() -> None:
    sizes = {"type": "array", "uniqueItems": True, "items": {"not": {"const": 1}}, "default": {"not": 1}}
    schema = closed(sizes=sizes, uniqueItems={"uniqueItems": False}, **{"if": {"const": 1}})
    assert list_not_enforced(schema) == [
        ("properties", "sizes", "uniqueItems"),
        ("properties", "sizes", "items", "not"),
    ]
    without = {"type": "array", "items": {}, "default": {"not": 1}}
    assert relax(schema)["properties"]["sizes"] == without
    with pytest.raises(InvalidInput, match=r'at #/properties/sizes: .*"uniqueItems".*strict to false'):
        Grammar.json_schema(schema)
    Grammar.json_schema(relax(schema))
    Grammar.call({"0": {"name": "f", "strict": False, "parameters": schema}})


def test_pointers_resolve_to_schemas_and_not_to_values() -> None:
    schema = {"anyOf": [{"a/b": 1}], "$defs": {"~": {"const": {"type": "string"}}}, "const": {"items": {}}}
    assert target(schema, "#/anyOf/0/a~1b") == 1 and target(schema, "#") is schema
    assert target(schema, "#/$defs/~0") == {"const": {"type": "string"}}
    assert all(target(schema, wrong) is None for wrong in ("#/anyOf/1", "#/anyOf/x", "#a", "x#/anyOf", "", 5))
    assert [place for place, _ in walk(schema)] == [(), ("$defs", "~"), ("anyOf", 0)]


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"const": 2**53 + 1}, "9007199254740993 is not exact as a 64-bit float"),
        ({"enum": [{"a": [2**63 - 1]}]}, "9223372036854775807 is not exact"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf of schemas that may share a value .* use anyOf"),
        (closed(a={"type": "integer", "minimum": 1, "maximum": 2, "multipleOf": 5}), "required property 'a'"),
        ({"type": "object", "required": ["a"], "additionalProperties": False}, "required property 'a'"),
        # Keywords with values of another type.
        ({"type": "object", "properties": -1}, "at #/properties: -1 is not an object"),
        (closed(a={"$defs": "x"}), "at #/properties/a/.defs: 'x' is not an object"),
        ({"type": "object", "required": {"a": 1}}, 'at #/required: {"a": 1} is not a list'),
        ({"type": "object", "required": ["b", [1]]}, r"at #/required/1: \[1\] is not a text"),
        ({"items": {"anyOf": True}}, "at #/items/anyOf: true is not a list"),
        ({"type": "array", "prefixItems": 1.5, "minItems": 1}, "at #/prefixItems: 1.5 is not a list"),
    ],
)
def test_unsupported_schema_is_refused_in_a_sentence(schema: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=f"^the JSON schema cannot be used.*{words}") as caught:
        Grammar.json_schema(schema)
    assert not re.search(r"\n|coerce|Unimplemented|lenient", str(caught.value))


def test_union_is_discriminated_by_a_constant() -> None:
    """pydantic writes unions with a discriminator in this form."""
    kinds = {name: closed(kind={"const": name}, **{name: {"type": "null"}}) for name in ("cat", "dog")}
    schema = {"oneOf": [{"$ref": f"#/$defs/{name}"} for name in kinds], "$defs": kinds}
    assert {drawn(Grammar.json_schema(schema), seed) for seed in range(9)} == {
        f'{{"kind": "{name}", "{name}": null}}' for name in kinds
    }


NAMED = {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("schema", "is_closed"),
    [
        (NAMED, True),
        ({**NAMED, "properties": {"a": {"$ref": "#/$defs/N"}}, "$defs": {"N": {"type": "null"}}}, True),
        ({"anyOf": [NAMED, {"type": "null"}]}, True),
        ({**NAMED, "additionalProperties": {"type": "null"}}, False),
        ({**NAMED, "patternProperties": {"^b": {"type": "null"}}}, False),
        ({**NAMED, "required": ["a", "b"]}, False),
        ({**NAMED, "minProperties": 2}, False),
        ({"allOf": [NAMED, {"type": "object", "properties": {"b": {"type": "null"}}}]}, False),
        ({**NAMED, "anyOf": [{"required": ["b"]}, {"required": ["a"]}]}, False),
    ],
)  # fmt: skip
def test_objects_have_no_further_properties_by_default(schema: dict[str, Any], is_closed: bool) -> None:
    matcher = matcher_of(Grammar.json_schema(schema), '{"a": null')
    assert (ord(",") not in following(matcher)) is is_closed
