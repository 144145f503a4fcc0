"""Parsers of the bodies of tool calls, one per `core.answer_forms.Body`.

A reader gets a text, the position where a body begins, the form, and the tools by name with the schemas of their
arguments. It returns the calls, as names and arguments, and the position after the body. It raises `Incomplete` if
more text may complete the body, and ValueError otherwise.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, NoReturn

from ..core.answer_forms import NAME, AnswerForm, Body

Schemas = Mapping[str, Any]  # Tool's name -> JSON schema of its arguments; None: it has none.
Call = tuple[Any, Any]  # Name and arguments as the model wrote them; the name may be unknown.
Reader = Callable[[str, int, AnswerForm, Schemas], tuple[list[Call], int]]

ARGUMENT_KEYS = ("arguments", "parameters", "input")  # Keys of a call's arguments, as families name them.
_BETWEEN = re.compile(r"[\s,;]*")  # Between two calls of one body.
_BLANKS = re.compile(r"\s*")


def _finite(number: str) -> float:
    """Read a number; values beyond the largest float become that float, because JSON has no infinity."""
    return max(-sys.float_info.max, min(sys.float_info.max, float(number)))


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


# Accept literal line breaks within texts, although JSON forbids them.
JSON = json.JSONDecoder(parse_float=_finite, parse_constant=_refuse_constant, strict=False)
_CUT = re.compile(r"[\w.+\\-]*")  # Half of a number, a constant or an escape.


class Incomplete(ValueError):
    """A body ends where more of it is expected."""


def decoded(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON value at a position, and the position after it.

    Raises: Incomplete: more text may complete it. ValueError: it is not JSON.
    """
    try:
        return JSON.raw_decode(text, start)
    except json.JSONDecodeError as error:
        if "Unterminated" in error.msg or _CUT.fullmatch(text, error.pos):
            raise Incomplete(error.msg) from error
        raise


# --- JSON


def calls_of(value: Any) -> list[Call]:
    """Return the calls in a JSON value: an object or a list of objects, with the keys that model families use.

    Raises: ValueError: a part of it is not a call.
    """
    calls = list[Call]()
    for entry in value if isinstance(value, list) else [value]:
        if not isinstance(entry, Mapping):
            raise ValueError("a call is no object")
        function = entry.get("function")
        call = function if isinstance(function, Mapping) else entry
        name = call.get("name", call.get("tool_name", function))
        calls.append((name, next((call[key] for key in ARGUMENT_KEYS if key in call), {})))
    return calls


def _read_json(text: str, start: int, form: AnswerForm, tools: Schemas) -> tuple[list[Call], int]:
    """Read objects or lists of them until something else comes."""
    calls, end = list[Call](), _skip(_BLANKS, text, start)
    position = end
    while text.startswith(("{", "["), position):
        value, end = decoded(text, position)
        calls += calls_of(value)
        if not form.calls_end:
            break
        position = _skip(_BETWEEN, text, end)
    return _some(calls), end


def _read_keyed(text: str, start: int, form: AnswerForm, tools: Schemas) -> tuple[list[Call], int]:
    entries, end = decoded(text, _skip(_BLANKS, text, start))
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) and len(entry) == 1 for entry in entries):
        raise ValueError("not a list of objects with one key")
    return _some([call for entry in entries for call in entry.items()]), end


def _read_named(text: str, start: int, form: AnswerForm, tools: Schemas) -> tuple[list[Call], int]:
    """Read items such as `name[ARGS]{…}` until something else comes; a body that is JSON is read as such."""
    calls, end = list[Call](), start
    patterns = _item_patterns(form.items, tuple(tools))
    while (head_and_tail := next(_heads(patterns, text, end), None)) is not None:
        head, tail = head_and_tail
        arguments, end = _unquoted(text, head.end(), form.quote) if form.quote else decoded(text, head.end())
        ending = tail.match(text, end)
        if ending is None:
            raise ValueError("the call has no end")
        calls.append((head["name"], arguments))
        end = ending.end()
    return (calls, end) if calls else _read_json(text, start, form, tools)


def _heads(
    patterns: Sequence[tuple[re.Pattern[str], re.Pattern[str]]], text: str, start: int
) -> Iterator[tuple[re.Match[str], re.Pattern[str]]]:
    for head_pattern, tail in patterns:
        if (head := head_pattern.match(text, start)) is not None:
            yield head, tail


@lru_cache(64)
def _item_patterns(
    items: tuple[str, ...], names: tuple[str, ...]
) -> tuple[tuple[re.Pattern[str], re.Pattern[str]], ...]:
    """Return patterns of the text before and after the arguments of each item; spaces may differ."""
    groups = {NAME: f"(?P<name>{any_name(names)})", "{id}": r"[\w.:-]*"}

    def pattern(written: str) -> re.Pattern[str]:
        parts = re.split(r"(\{name\}|\{id\}|\s+)", written)
        literals = (r"\s*" if part.isspace() else re.escape(part) for part in parts)
        return re.compile(r"\s*" + "".join(map(groups.get, parts, literals)))

    halves = (item.split("{arguments}") for item in items)
    return tuple((re.compile(pattern(head).pattern + r"\s*(?=\{)"), pattern(tail)) for head, tail in halves)


def any_name(names: Sequence[str]) -> str:
    """Return a pattern of any of these names, preferring longer ones."""
    return "|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)"


# --- tags


_FUNCTION = re.compile(r'\s*<(?:function=|invoke name=")([^">]+)"?>')
_FUNCTION_END = re.compile(r"\s*</(?:function|invoke)>")
_PARAMETER = re.compile(
    r'\s*<parameter(?:=| name=")([^">]+)"?>(.*?)</parameter>(?=\s*(?:<parameter[= ]|</(?:function|invoke)>))', re.DOTALL
)
_END = r"(?::[\w-]+)?>"  # The end of a mark, which a checkpoint may have given a suffix.
_ARGUMENT = re.compile(rf"\s*<arg_key{_END}(.*?)</arg_key{_END}\s*<arg_value{_END}(.*?)</arg_value{_END}", re.DOTALL)
_ARGUMENTS_OF = re.compile(rf"\s*([^\s<]+)\s*(?=<|$)(?:<tool_sep{_END})?")
_CALL, _CALL_END = re.compile(rf"\s*<tool_call{_END}"), re.compile(rf"\s*</tool_call{_END}|\s*$")


def _read_tags(text: str, start: int, form: AnswerForm, tools: Schemas) -> tuple[list[Call], int]:
    calls, end = list[Call](), start
    while (head := _FUNCTION.match(text, end)) is not None:
        arguments, end = _pairs(_PARAMETER, text, head.end(), tools.get(head[1]))
        ending = _FUNCTION_END.match(text, end)
        if ending is None:
            raise Incomplete("the function has no end")
        calls.append((head[1], arguments))
        end = ending.end()
    return _some(calls), end


def _read_arguments(text: str, start: int, form: AnswerForm, tools: Schemas) -> tuple[list[Call], int]:
    """Read one call with the form's markers, or several calls, each within its own markers."""
    calls, end = list[Call](), start
    while (opening := _CALL.match(text, end)) is not None or not calls:
        head = _ARGUMENTS_OF.match(text, end if opening is None else opening.end())
        if head is None:
            raise ValueError("no name")
        arguments, end = _pairs(_ARGUMENT, text, head.end(), tools.get(head[1]))
        if text.startswith("<arg_key", _skip(_BLANKS, text, end)):
            raise Incomplete("the argument has no end")
        calls.append((head[1], arguments))
        if opening is not None:
            ending = _CALL_END.match(text, end)
            if ending is None:
                raise ValueError("the call has no end")
            end = ending.end()
    return calls, end


def _pairs(pattern: re.Pattern[str], text: str, start: int, schema: Any) -> tuple[dict[str, Any], int]:
    arguments = dict[str, Any]()
    while (pair := pattern.match(text, start)) is not None:
        key = pair[1].strip()
        arguments[key], start = _typed(_unwrapped(pair[2]), _types(schema, key)), pair.end()
    return arguments, start


def _unwrapped(value: str) -> str:
    """Return a value without the line breaks around it, which templates write on both sides or not at all."""
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] == "\n" else value


_KINDS: Mapping[type, tuple[str, ...]] = {
    str: ("string",),
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    type(None): ("null",),
    list: ("array",),
    dict: ("object",),
}


def _types(schema: Any, key: str) -> frozenset[str]:
    """Return the JSON types that a schema gives to a property; none: any."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return frozenset(_types_of(properties.get(key)) if isinstance(properties, Mapping) else ())


def _types_of(schema: Any) -> Iterator[str]:
    if not isinstance(schema, Mapping):
        return
    types = schema.get("type", ())
    yield from (types,) if isinstance(types, str) else (name for name in types if isinstance(name, str))
    for value in (*schema.get("enum", ()), *((schema["const"],) if "const" in schema else ())):
        yield from _KINDS.get(type(value), ())
    for name in ("anyOf", "oneOf", "allOf"):
        for part in schema.get(name) or ():
            yield from _types_of(part)


def _typed(text: str, types: frozenset[str]) -> Any:
    """Return the value that a text represents, of one of these types (none: any); otherwise the text itself."""
    if types == {"string"}:
        return text
    for read in (JSON.decode, python_value):
        with suppress(ValueError, RecursionError):
            value = read(text)
            return value if not types or not types.isdisjoint(_KINDS[type(value)]) or "string" not in types else text
    return text


# --- Python


class _Python:
    """Reads calls in Python notation, also from templates that do not escape quotes within a text."""

    _WORD = re.compile(r"[\w.\-]+")
    _NUMBER = re.compile(r"-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?!\w)")
    _ESCAPES: Mapping[str, str] = {
        **{"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"},
        **{"\\": "\\", "'": "'", '"': '"', "\n": ""},
    }
    _HEX: Mapping[str, int] = {"x": 2, "u": 4, "U": 8}
    _PLAIN = re.compile(r"[^'\"\\]*")
    _QUOTE_ENDS = re.compile(r"\s*(?:[,)\]}:]|$)")
    _VALUES: Mapping[str, Any] = {
        **{"true": True, "false": False, "null": None},
        **{"True": True, "False": False, "None": None},
    }

    def __init__(self, text: str, position: int) -> None:
        self.text, self.position = text, position

    def calls(self) -> list[Call]:
        is_list, calls = self._take("["), list[Call]()
        while not (is_list and self._take("]")):
            word = self._match(self._WORD)
            if word is None:
                if is_list or not calls:
                    raise ValueError("a call is expected")
                break
            self._expect("(")
            calls.append((word, self._arguments()))
            self._take(",")
        return calls

    def _arguments(self) -> dict[str, Any]:
        arguments = dict[str, Any]()
        while not self._take(")"):
            if (key := self._match(self._WORD)) is None:
                raise ValueError("an argument has no name")
            self._expect("=")
            arguments[key] = self.value()
            self._expect_or_peek(")")
        return arguments

    def value(self) -> Any:
        self._skip()
        first = self.text[self.position : self.position + 1]
        if first in ("'", '"'):
            return self._string(first)
        if self._take("["):
            return self._items("]")
        if self._take("("):
            return self._items(")")
        if self._take("{"):
            return self._object()
        if (number := self._match(self._NUMBER)) is not None:
            return int(number) if number.lstrip("-").isdigit() and len(number) < 1000 else _finite(number)
        word = self._match(self._WORD)
        if word is None or word not in self._VALUES:
            raise self._unexpected(f"{word!r} is no value")
        return self._VALUES[word]

    def _items(self, end: str) -> list[Any]:
        items = list[Any]()
        while not self._take(end):
            items.append(self.value())
            self._expect_or_peek(end)
        return items

    def _object(self) -> dict[str, Any]:
        values = dict[str, Any]()
        while not self._take("}"):
            key = self._key()
            self._expect(":")
            values[key if isinstance(key, str) else json.dumps(key)] = self.value()
            self._expect_or_peek("}")
        return values

    def _key(self) -> Any:
        return self.value()

    def _string(self, quote: str) -> str:
        """Read a text. A quote is part of the text if what follows it could not follow a text."""
        start, parts = self.position + 1, list[str]()
        position = start
        while position < len(self.text):
            letter = self.text[position]
            if letter == quote and self._QUOTE_ENDS.match(self.text, position + 1):
                self.position = position + 1
                return "".join(parts)
            if letter == "\\":
                part, position = self._escape(position + 1)
                parts.append(part)
                continue
            plain = self._PLAIN.match(self.text, position + 1)
            next_position = position + 1 if plain is None else plain.end()
            parts.append(self.text[position:next_position])
            position = next_position
        raise Incomplete("a text has no end")

    def _escape(self, position: int) -> tuple[str, int]:
        letter = self.text[position : position + 1]
        if (width := self._HEX.get(letter)) is not None:
            digits = self.text[position + 1 : position + 1 + width]
            if len(digits) == width and all(digit in "0123456789abcdefABCDEF" for digit in digits):
                return chr(min(int(digits, 16), sys.maxunicode)), position + 1 + width
        return self._ESCAPES.get(letter, "\\" + letter), position + 1

    def _skip(self) -> None:
        self.position = _skip(_BLANKS, self.text, self.position)

    def _match(self, pattern: re.Pattern[str]) -> str | None:
        self._skip()
        if (match := pattern.match(self.text, self.position)) is None:
            return None
        self.position = match.end()
        return match[0]

    def _take(self, letter: str) -> bool:
        self._skip()
        is_there = self.text.startswith(letter, self.position)
        self.position += is_there
        return is_there

    def _unexpected(self, words: str) -> ValueError:
        """Return the error for unexpected text: `Incomplete` at the end of the text, otherwise ValueError."""
        return (ValueError if self.text[self.position :].strip() else Incomplete)(words)

    def _expect(self, letter: str) -> None:
        if not self._take(letter):
            raise self._unexpected(f"{letter} is expected")

    def _expect_or_peek(self, end: str) -> None:
        """Read the comma after a part; the last part may have none."""
        if not self._take(",") and not self.text.startswith(end, self.position):
            raise self._unexpected(f"a comma or {end} is expected")


class _Unquoted(_Python):
    """Reads objects with unquoted keys, whose texts stand unescaped between two equal markers."""

    _BARE_KEY = re.compile(r"[^:,{}\[\]]+")

    def __init__(self, text: str, position: int, quote: str) -> None:
        super().__init__(text, position)
        self.quote = quote

    def value(self) -> Any:
        self._skip()
        if not self.text.startswith(self.quote, self.position):
            if self.quote.startswith(self.text[self.position :]):
                raise Incomplete("a text may begin")
            return super().value()
        start = self.position + len(self.quote)
        end = self.text.find(self.quote, start)
        if end < 0:
            raise Incomplete("a text has no end")
        self.position = end + len(self.quote)
        return self.text[start:end]

    def _key(self) -> Any:
        self._skip()
        is_bare = not self.text.startswith((self.quote, '"', "'"), self.position)
        key = self._match(self._BARE_KEY) if is_bare else self.value()
        return key.strip() if isinstance(key, str) else key


def _unquoted(text: str, start: int, quote: str) -> tuple[Any, int]:
    """Return the object at a place, and the place after it; see `_Unquoted`."""
    reader = _Unquoted(text, start, quote)
    return reader.value(), reader.position


def python_value(text: str) -> Any:
    """Return the value of a Python literal, because some templates write values that way.

    Raises: ValueError: the text is not a literal.
    """
    reader = _Python(text, 0)
    value = reader.value()
    if text[reader.position :].strip():
        raise ValueError("more than a value")
    return value


def _read_pythonic(text: str, start: int, form: AnswerForm, tools: Schemas) -> tuple[list[Call], int]:
    start = _skip(_BLANKS, text, start)
    if text.startswith(("[{", "{"), start):  # Some templates let the model choose JSON.
        return _read_json(text, start, form, tools)
    reader = _Python(text, start)
    return _some(reader.calls()), reader.position


def _some(calls: list[Call]) -> list[Call]:
    if not calls:
        raise ValueError("there is no call")
    return calls


def _skip(pattern: re.Pattern[str], text: str, position: int) -> int:
    match = pattern.match(text, position)
    return position if match is None else match.end()


READERS: Mapping[Body, Reader] = {
    "json": _read_json,
    "named": _read_named,
    "keyed": _read_keyed,
    "tags": _read_tags,
    "arguments": _read_arguments,
    "pythonic": _read_pythonic,
}
