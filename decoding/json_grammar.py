"""The grammar of a JSON schema's values, as llguidance reads it.

llguidance compiles a schema. What it takes otherwise than JSON Schema says, or in a way that need not end, is rewritten
before: see `_changed`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from ..core.errors import SchemaError
from ..core.json_schemas import Place, Schema, endless, limits, parts, rewritten, target

# These limits keep compilation under 0.5 s and a mask under 0.1 s; other requests wait meanwhile.
LIMITS = LLParserLimits(max_grammar_size=10_000, initial_lexer_fuel=100_000)
MOST_CHARACTERS = 1 << 18  # Maximum length of a grammar.
MOST_GRAMMARS = 64  # Maximum grammars whose compile errors are cached.
MOST_SEARCHED = 1 << 17  # Maximum characters of sub-schemas compiled one by one to locate an error.
MOST_NAMES = 64  # Maximum names that a pattern may expand to.
MOST_STEPS = 2048  # Maximum prefixes tried while expanding a pattern to names.
EXCERPT = re.compile(r"^ *\d+ \|.*", re.MULTILINE | re.DOTALL)
CONTROL = re.compile(r"\\u00(?:[01]|7f)")  # Matches control characters, which JSON can write only as \uXXXX.
WORDS = {  # llguidance's error message -> ours.
    r"Unimplemented keys: \[(.*)\]": r"\1 cannot be enforced: leave it out, or set strict to false",
    r"oneOf constraints are not supported\..*": "oneOf of schemas that may share a value is not supported: use anyOf",
    r"(Resource '.*') is not present in a registry.*": r"\1 is not in the schema: add it to $defs",
}


def json_grammar(schema: Schema) -> dict[str, Any]:
    """Return a schema as llguidance reads it, for JSON on one line in the form of Python's `json.dumps`.

    There is one way to write what a schema leaves no choice about, so it costs no pass of the model, and no blanks can
    go on for ever. Chat templates show tools in this form.

    Raises: SchemaError: it cannot be compiled, or takes too much work; the message names the part.
    """
    changed = _rewritten(schema)
    if problem := problem_of(_source(changed)):
        raise SchemaError(f"the JSON schema cannot be used, at {_place(schema, problem)}: {problem}")
    return changed


def problem_of(source: str) -> str:
    """Return the reason why a grammar cannot be compiled; "" if it can."""
    return f"more than {MOST_CHARACTERS} characters" if len(source) > MOST_CHARACTERS else _compiling(source)


def line(message: str) -> str:
    """Return llguidance's message on one line, without its excerpt of the grammar and its state."""
    words = " ".join(EXCERPT.sub("", message).partition("<state>")[0].split())
    for pattern, ours in WORDS.items():
        words = re.sub(pattern, ours, words)
    return words


def _rewritten(schema: Schema) -> dict[str, Any]:
    try:
        root = {**schema, "x-guidance": None}
        changed = rewritten(root, partial(_changed, root=root, without_end=endless(root)))
        written = json.dumps(schema)
    except RecursionError:
        raise SchemaError("the JSON schema cannot be used: it is nested too deeply") from None
    if changed is False:
        raise SchemaError("the JSON schema cannot be used: no finite JSON satisfies it, give its recursion an end")
    # Without the \u escape a name has one spelling only, so it cannot be repeated under another spelling.
    escapes = 'nrbtf\\"u' if CONTROL.search(written) else 'nrbtf\\"'
    form = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return {**changed, "x-guidance": {**form, "json_allowed_escapes": escapes}}


def _source(changed: Mapping[str, Any]) -> str:
    try:
        return LLMatcher.grammar_from_json_schema(dict(changed))
    except ValueError:
        raise SchemaError("the JSON schema cannot be used: an integer in it is not below 2^64") from None


def _place(schema: Schema, problem: str) -> str:
    """Return a JSON pointer to the innermost sub-schema that has `problem` when compiled alone.

    In a large schema it may be an enclosing sub-schema, as `MOST_SEARCHED` bounds the search.
    """
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    place, inner, left = "#", parts(schema), MOST_SEARCHED
    while left > 0 and (character := next(inner, None)) is not None:
        where, part = character
        source = _source(_rewritten({**definitions, **part}))
        left -= len(source)
        if problem_of(source) == problem:
            place, inner = f"{place}/{_pointer(where)}", parts(part)
    return place


def _changed(schema: Schema, limited: dict[str, Any], root: Schema, without_end: frozenset[int]) -> Any:
    """Return a part of a schema, `own` with its inner parts changed, as llguidance is to read it."""
    if id(schema) in without_end:
        return False
    limited = limits(limited)
    if isinstance(name := limited.get("format"), str) and not _is_known(name):
        del limited["format"]  # JSON Schema treats an unknown format as an annotation.
    _check_exact([limited.get("enum"), limited.get("const")])
    if isinstance(limited.get("patternProperties"), dict):
        limited |= _listed(limited)
    if isinstance(limited.get("oneOf"), list):
        limited["oneOf"] = [_typed(option, root) for option in limited["oneOf"]]
    return limited


def _check_exact(value: Any) -> None:
    if isinstance(value, int) and abs(value) < 2**64 and float(value) != value:
        raise SchemaError(
            f"the JSON schema cannot be used: {value} is not exact as a 64-bit float, use a string for it"
        )
    for part in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        _check_exact(part)


def _listed(schema: Schema) -> dict[str, Any]:
    """Return `properties` with the names of those patterns that match few, and `patternProperties` without these.

    llguidance lets a name of a pattern come any number of times, and writes a comma before names that are used up.
    """
    properties, patterns = dict(schema.get("properties") or {}), dict(schema["patternProperties"])
    for pattern in list(patterns):
        if (names := names_of(pattern)) is not None:
            limit = patterns.pop(pattern)
            for name in names:
                properties[name] = {"allOf": [properties[name], limit]} if name in properties else limit
    return {"properties": properties, "patternProperties": patterns}


def _typed(option: Any, root: Schema) -> Any:
    """Return a schema of `oneOf`; a reference with the type that it leads to, so that llguidance looks behind it."""
    resolved = target(root, option["$ref"]) if isinstance(option, dict) and "$ref" in option else None
    return {"type": resolved["type"], **option} if isinstance(resolved, Mapping) and "type" in resolved else option


@lru_cache(maxsize=MOST_GRAMMARS)
def names_of(pattern: str) -> tuple[str, ...] | None:
    """Return all names that a `patternProperties` pattern matches, shortest first; None if more than `MOST_NAMES`."""
    source = _source(_rewritten({"type": "string", "pattern": pattern}))
    start = LLMatcher(_bytes(), source, log_level=0, limits=LIMITS)
    if start.is_error():
        return () if "Unsatisfiable" in start.get_error() else None
    names, open_names = list[str](), [(b"", start)]
    for _ in range(MOST_STEPS):
        if not open_names:
            return tuple(names)
        text, matcher = open_names.pop(0)
        if matcher.is_accepting():
            names.append(json.loads(text))
            continue
        following = _following(matcher)
        if len(names) + len(open_names) + len(following) > MOST_NAMES:
            return None
        for byte in following:
            longer = matcher.deep_copy()
            longer.consume_token(byte)
            open_names.append((text + bytes([byte]), longer))
    return None


def _following(matcher: LLMatcher) -> list[int]:
    return [byte for byte, bias in enumerate(matcher.compute_logit_bias()[:256]) if bias]


@lru_cache(maxsize=1)
def _bytes() -> LLTokenizer:
    return LLTokenizer("byte")


@lru_cache(maxsize=MOST_GRAMMARS)
def _is_known(name: str) -> bool:
    """Return whether llguidance enforces a `format` of that name."""
    return not problem_of(LLMatcher.grammar_from_json_schema({"type": "string", "format": name}))


@lru_cache(maxsize=MOST_GRAMMARS)
def _compiling(source: str) -> str:
    is_error, messages = LLMatcher.validate_grammar_with_warnings(source, limits=LIMITS)
    return line(messages[0]) if is_error else ""


def _pointer(place: Place) -> str:
    return "/".join(str(key).replace("~", "~0").replace("/", "~1") for key in place)
