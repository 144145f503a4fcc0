"""The grammar of a JSON schema's values, in llguidance's form.

llguidance compiles a schema. Parts that it reads differently from JSON Schema, or that could continue without end, are
rewritten first: see `_adapt_part`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from ..core.errors import SchemaError
from ..core.json_schemas import (
    Place,
    Schema,
    can_close,
    find_endless,
    find_misshapen,
    is_described,
    limits,
    parts,
    rewrite,
    target,
)
from ..core.serialization import shorten

# These limits keep compilation under 0.5 s and a mask under 0.1 s; other requests wait meanwhile.
LIMITS = LLParserLimits(max_grammar_size=10_000, initial_lexer_fuel=100_000)
MAX_CHARACTERS = 1 << 18  # Maximum length of a grammar.
MAX_GRAMMARS = 64  # Maximum grammars whose compile errors are cached.
MAX_SEARCHED = 1 << 17  # Maximum characters of sub-schemas compiled one by one to locate an error.
MAX_NAMES = 64  # Maximum names that a pattern may expand to.
MAX_STEPS = 2048  # Maximum prefixes tried while expanding a pattern to names.
EXCERPT = re.compile(r"^ *\d+ \|.*", re.MULTILINE | re.DOTALL)
CONTROL = re.compile(r"\\u00(?:[01]|7f)")  # Matches control characters, which JSON can write only as \uXXXX.
WORDS = {  # llguidance's error message -> ours, which has its own advice.
    r"Unimplemented keys: \[(.*)\]": r"\1 cannot be enforced: remove it, or set strict to false",
    r"oneOf constraints are not supported\..*": "oneOf of schemas that may share a value is not supported: use anyOf",
    r"(Resource '.*') is not present in a registry.*": r"\1 is not in the schema: add it to $defs",
}
ADVICE = "change or simplify this part"  # For any other message about a schema.


def json_grammar(schema: Schema) -> dict[str, Any]:
    """Return a schema in llguidance's form, for JSON on one line as Python's `json.dumps` writes it.

    Parts without a choice in the schema have exactly one spelling, so they cost no pass of the model, and blanks cannot
    continue for ever. Chat templates show tools in this form.

    Raises: SchemaError: it cannot be compiled, or needs too much work; the message names the part.
    """
    adapted = _rewrite(schema)
    if problem := problem_of(_to_grammar(adapted), ADVICE):
        raise SchemaError(f"the JSON schema cannot be used, at {_find_problem_path(schema, problem)}: {problem}")
    return adapted


def problem_of(source: str, advice: str) -> str:
    """Return what to do about a grammar that cannot be compiled, and why it cannot; "" if it can."""
    if len(source) > MAX_CHARACTERS:
        return f"{advice} (as a grammar it has more than {MAX_CHARACTERS} characters)"
    return advised(message, advice) if (message := _compile_error(source)) else ""


def advised(message: str, advice: str) -> str:
    """Return our words for llguidance's message, or the advice with the message in parentheses.

    The message is cut to one line, without its excerpt of the grammar and its state.
    """
    text = " ".join(EXCERPT.sub("", message).partition("<state>")[0].split())
    for pattern, words in WORDS.items():
        worded, n_changes = re.subn(pattern, words, text)
        if n_changes:
            return worded
    return f"{advice} (llguidance: {text})"


def _rewrite(schema: Schema) -> dict[str, Any]:
    try:
        if (misshapen := find_misshapen(schema)) is not None:
            place, value, expected = misshapen
            path = _json_pointer(place)
            raise SchemaError(f"the JSON schema cannot be used, at #/{path}: {shorten(value)} is not {expected}")
        root = {**schema, "x-guidance": None}
        adapt = partial(_adapt_part, root=root, endless_ids=find_endless(root), closes=can_close(root))
        adapted = rewrite(root, adapt)
        schema_json = json.dumps(schema)
    except RecursionError:
        raise SchemaError("the JSON schema cannot be used: it is nested too deeply") from None
    if adapted is False:
        raise SchemaError(
            "the JSON schema cannot be used: no finite JSON satisfies it, because its recursion has no end"
        )
    # Without the \u escape a name has one spelling only, so it cannot be repeated under another spelling.
    escapes = 'nrbtf\\"u' if CONTROL.search(schema_json) else 'nrbtf\\"'
    separators = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return {**adapted, "x-guidance": {**separators, "json_allowed_escapes": escapes}}


def _to_grammar(adapted: Mapping[str, Any]) -> str:
    try:
        return LLMatcher.grammar_from_json_schema(dict(adapted))
    except ValueError:
        raise SchemaError("the JSON schema cannot be used: an integer in it is not below 2^64") from None


def _find_problem_path(schema: Schema, problem: str) -> str:
    """Return a JSON pointer to the innermost sub-schema that has `problem` when compiled alone.

    In a large schema it may be an enclosing sub-schema, because `MAX_SEARCHED` bounds the search.
    """
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    path, inner_parts, n_left = "#", parts(schema), MAX_SEARCHED
    while n_left > 0 and (next_part := next(inner_parts, None)) is not None:
        part_path, part = next_part
        source = _to_grammar(_rewrite({**definitions, **part}))
        n_left -= len(source)
        if problem_of(source, ADVICE) == problem:
            path, inner_parts = f"{path}/{_json_pointer(part_path)}", parts(part)
    return path


def _adapt_part(
    schema: Schema, adapted: dict[str, Any], root: Schema, endless_ids: frozenset[int], closes: bool
) -> Any:
    """Return a part of a schema in llguidance's form; its inner parts are already adapted.

    If the schema `closes`, an object has exactly the named properties unless others are mentioned: the model cannot
    know which others are meant, and small models would invent properties without end.
    """
    if id(schema) in endless_ids:
        return False
    adapted = limits(adapted)
    if isinstance(format_name := adapted.get("format"), str) and not _is_enforced_format(format_name):
        del adapted["format"]  # JSON Schema treats an unknown format as an annotation.
    if closes and is_described(schema):
        adapted["additionalProperties"] = False
    _check_exact([adapted.get("enum"), adapted.get("const")])
    if isinstance(adapted.get("patternProperties"), dict):
        adapted |= _list_pattern_names(adapted)
    if isinstance(adapted.get("oneOf"), list):
        adapted["oneOf"] = [_add_type(option, root) for option in adapted["oneOf"]]
    return adapted


def _check_exact(value: Any) -> None:
    if isinstance(value, int) and abs(value) < 2**64 and float(value) != value:
        raise SchemaError(
            f"the JSON schema cannot be used: {value} is not exact as a 64-bit float, use a string for it"
        )
    for inner in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        _check_exact(inner)


def _list_pattern_names(schema: Schema) -> dict[str, Any]:
    """Return `properties` extended by the names of patterns that match few, and `patternProperties` without these.

    llguidance allows a name of a pattern any number of times, and writes a comma before exhausted names.
    """
    properties, patterns = dict(schema.get("properties") or {}), dict(schema["patternProperties"])
    for pattern in list(patterns):
        if (names := names_of(pattern)) is not None:
            name_schema = patterns.pop(pattern)
            for name in names:
                properties[name] = {"allOf": [properties[name], name_schema]} if name in properties else name_schema
    return {"properties": properties, "patternProperties": patterns}


def _add_type(option: Any, root: Schema) -> Any:
    """Return a schema of `oneOf`; a reference gets the type of its target, so that llguidance follows it."""
    referenced_schema = target(root, option["$ref"]) if isinstance(option, dict) and "$ref" in option else None
    return (
        {"type": referenced_schema["type"], **option}
        if isinstance(referenced_schema, Mapping) and "type" in referenced_schema
        else option
    )


@lru_cache(maxsize=MAX_GRAMMARS)
def names_of(pattern: str) -> tuple[str, ...] | None:
    """Return all names that a `patternProperties` pattern matches, shortest first; None if more than `MAX_NAMES`."""
    source = _to_grammar(_rewrite({"type": "string", "pattern": pattern}))
    start_matcher = LLMatcher(_byte_tokenizer(), source, log_level=0, limits=LIMITS)
    if start_matcher.is_error():
        return () if "Unsatisfiable" in start_matcher.get_error() else None
    names, open_names = list[str](), [(b"", start_matcher)]
    for _ in range(MAX_STEPS):
        if not open_names:
            return tuple(names)
        prefix, matcher = open_names.pop(0)
        if matcher.is_accepting():
            names.append(json.loads(prefix))
            continue
        next_bytes = _next_bytes(matcher)
        if len(names) + len(open_names) + len(next_bytes) > MAX_NAMES:
            return None
        for byte in next_bytes:
            longer_matcher = matcher.deep_copy()
            longer_matcher.consume_token(byte)
            open_names.append((prefix + bytes([byte]), longer_matcher))
    return None


def _next_bytes(matcher: LLMatcher) -> list[int]:
    return [byte for byte, bias in enumerate(matcher.compute_logit_bias()[:256]) if bias]


@lru_cache(maxsize=1)
def _byte_tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")


@lru_cache(maxsize=MAX_GRAMMARS)
def _is_enforced_format(name: str) -> bool:
    """Return whether llguidance enforces a `format` of that name."""
    return not _compile_error(LLMatcher.grammar_from_json_schema({"type": "string", "format": name}))


@lru_cache(maxsize=MAX_GRAMMARS)
def _compile_error(source: str) -> str:
    """Return llguidance's message about a grammar that cannot be compiled; "" if it can."""
    is_error, messages = LLMatcher.validate_grammar_with_warnings(source, limits=LIMITS)
    return messages[0] if is_error else ""


def _json_pointer(place: Place) -> str:
    return "/".join(str(key).replace("~", "~0").replace("/", "~1") for key in place)
