"""Conversion of records to JSON and back by their annotations, with pydantic, which is imported on first use.

A record is a frozen dataclass that inherits from `Record`. What its annotations do not say is in a field's metadata
(`ge`, `le`, `exclude`, `description`: the arguments of `pydantic.Field`), in one of the forms below, or in the class
variables of `Record`.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, cast, get_args, get_origin, get_type_hints

from .errors import InvalidInput, SettingsError, SwiftoptError

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, TypeAdapter, ValidationError
    from pydantic_core import CoreSchema

LARGEST = 2**63 - 1  # Largest integer that every supported database can store.
WORDS = {  # Regular expressions for pydantic's wording, and what error messages say instead.
    ", (unable to|got a) .*": "",  # Drop details of the parser.
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid string": "a text",
    "a valid boolean": "true or false",
    "a valid (list|tuple|set|frozenset)": "a list",
    "a valid dictionary( or (object to|instance of) .*)?|a dictionary or an instance of .*": "an object",
    "(string|list|tuple) should have (at (least|most) \\d+ \\w+).*": r"use \2",
    r"string should match pattern '\^\[\^/.*": "use a text without '/' and control characters",
    r"string should match pattern '\^\[\^.*": "use a text without control characters",
    "use (?=greater|less)": "use a number ",
}
ABOUT_KEYS = ("missing", "unexpected_keyword_argument", "extra_forbidden")
KEY = "[key]"  # Last item of pydantic's error location when a dictionary key is invalid.
SCALARS = ("int", "float", "bool", "str")  # Scalar types in pydantic's core schema, which are validated strictly.


def kinds_by_name(kinds: Iterable[Any], separator: str) -> dict[str, Any]:
    """Return classes by their names in lower case, `separator` between the words."""
    return {re.sub(r"(?<!^)(?=[A-Z])", separator, kind.__name__).lower(): kind for kind in kinds}


class Record:
    """Base of the dataclasses that files, database rows, command line and HTTP exchange as JSON objects.

    Numbers, texts and booleans are read strictly: nothing is converted but a whole number to a float.
    """

    __slots__ = ()
    __pydantic_config__: ClassVar[Any] = {"extra": "ignore", "serialize_by_alias": True}

    # Value of the key "schema" in the JSON; reading requires it. Empty: no such key.
    SCHEMA: ClassVar[str] = ""
    # Name of a field whose keys are merged into the record's own JSON object.
    FLAT: ClassVar[str] = ""
    COMPUTED: ClassVar[tuple[str, ...]] = ()  # Properties that are written to JSON as well.
    # Reading refuses an object that lacks any key, even one whose field has a default.
    COMPLETE: ClassVar[bool] = False
    ERROR: ClassVar[type[SwiftoptError]] = InvalidInput  # Class of the errors that `from_json` raises.
    # What error messages call the object if the caller of `from_json` gives no name.
    NAME: ClassVar[str] = "the object"

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object as plain values."""
        kind: Any = type(self)
        values: dict[str, Any] = adapter(kind).dump_python(self, mode="json", warnings=False)
        return values

    @classmethod
    def from_json(cls, values: Any, where: str = "") -> Self:
        """Return the record of a JSON object; an absent key takes the field's default.

        Raises: `ERROR`: a key is missing or unknown, or a value is of the wrong type or out of range. `where` names the
            object's origin.
        """
        from pydantic import ValidationError

        kind: Any = cls
        try:
            record: Self = adapter(kind).validate_python(values)
            return record
        except ValidationError as error:
            raise cls.ERROR(sentence(error, where or cls.NAME, cls)) from error

    @classmethod
    def adapt(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the object to read in place of `values`; overridden where others may leave more out."""
        return values

    @classmethod
    def _read(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        values = cls.adapt(values)
        if cls.SCHEMA and values.get("schema", cls.SCHEMA) != cls.SCHEMA:
            raise ValueError(f"its schema is {values['schema']!r}, this version reads {cls.SCHEMA!r}")
        required = [*(["schema"] if cls.SCHEMA else []), *(_always_written(cls) if cls.COMPLETE else [])]
        missing = [key for key in required if key not in values]
        if missing:
            raise ValueError(f"it lacks {missing[0]!r}")
        return {**values, cls.FLAT: values} if cls.FLAT else values

    @classmethod
    def _write(cls, record: Record, fields: Callable[[Record], dict[str, Any]]) -> dict[str, Any]:
        values: dict[str, Any] = {"schema": cls.SCHEMA} if cls.SCHEMA else {}
        for name, value in fields(record).items():
            values.update(value if name == cls.FLAT else {name: value})
        return {**values, **{name: getattr(record, name) for name in cls.COMPUTED}}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema

        schema: Any = handler(source)
        arguments = schema["schema"]["fields"]
        # Keyword-only fields come last in JSON, also inherited ones.
        arguments.sort(key=lambda argument: bool(argument.get("kw_only")))
        schema["fields"] = [argument["name"] for argument in arguments]
        # Validate strictly: no conversion of texts to numbers, no infinite numbers, no NaN.
        for part in schemas_in(schema):
            if part.get("type") in SCALARS:
                part["strict"] = True
            if part.get("type") == "float":
                part["allow_inf_nan"] = False
        if not (cls.SCHEMA or cls.FLAT or cls.COMPUTED or cls.COMPLETE):
            return cast("CoreSchema", schema)
        written = core_schema.wrap_serializer_function_ser_schema(cls._write)
        reference = schema.pop("ref", None)
        return core_schema.no_info_before_validator_function(cls._read, schema, ref=reference, serialization=written)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        reference = handler(schema)
        definition = handler.resolve_ref_schema(reference)
        definition["description"] = (cls.__doc__ or "").partition("\n")[0]
        if handler.mode == "serialization":
            flat = handler.resolve_ref_schema(definition["properties"].pop(cls.FLAT, {}))
            added = {name: get_type_hints(getattr(cls, name).fget)["return"] for name in cls.COMPUTED}
            definition["properties"] = {
                **({"schema": {"const": cls.SCHEMA, "type": "string"}} if cls.SCHEMA else {}),
                **flat.get("properties", {}),
                **definition["properties"],
                **{name: adapter(hint).json_schema() for name, hint in added.items()},
            }
            left_out = {_key(field) for field in dataclasses.fields(cast(Any, cls)) if "exclude_if" in field.metadata}
            definition["required"] = [name for name in definition["properties"] if name not in left_out]
        return reference


class Settings(Record):
    """Base of records whose values are checked when they are built: words, and numbers with `ranged` fields.

    Raises: SettingsError: a value is out of its range.
    """

    __slots__ = ()
    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    ERROR: ClassVar[type[SwiftoptError]] = SettingsError
    NAME: ClassVar[str] = "the settings"

    def __post_init__(self) -> None:
        kind: Any = type(self)
        choices = _choices(kind)
        for field in dataclasses.fields(kind):
            value, choices_of_field = getattr(self, field.name), choices.get(field.name)
            fits = value in choices_of_field if choices_of_field else value is None or _in_range(value, field.metadata)
            if not fits:
                words = (
                    " or ".join(map(str, choices_of_field)) if choices_of_field else _range_words(value, field.metadata)
                )
                raise SettingsError(f"{field.name} {value} is out of range: use {words}", field.name)


def ranged(default: Any, **bounds: float) -> Any:
    """Return a field of a `Settings` with bounds `ge`, `gt` and `le`."""
    return dataclasses.field(default=default, metadata=bounds)


def share(default: float | None) -> Any:
    """Return a field for a number from 0 to 1."""
    return ranged(default, ge=0, le=1)


def count(default: int | None, least: int = 1, most: int = LARGEST) -> Any:
    """Return a field for a whole number from `least` to `most`."""
    return ranged(default, ge=least, le=most)


def _in_range(value: Any, bounds: Mapping[str, Any]) -> bool:
    low, above = bounds.get("ge"), bounds.get("gt")
    # A number with a lower bound gets a finite upper one: JSON has no infinity.
    high = bounds.get("le", LARGEST if bounds.keys() & {"ge", "gt"} else None)
    return (low is None or value >= low) and (above is None or value > above) and (high is None or value <= high)


def _range_words(value: Any, bounds: Mapping[str, Any]) -> str:
    high = bounds.get("le", LARGEST)
    has_end = high != LARGEST or value > high
    if "gt" in bounds:
        return f"a number above {bounds['gt']}" + (f", at most {high}" if has_end else "")
    return f"a number from {bounds['ge']} to {high}" if has_end else f"{bounds['ge']} or more"


@cache
def _choices(kind: type[Any]) -> dict[str, tuple[Any, ...]]:
    hints = get_type_hints(kind)
    return {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}


@dataclass(frozen=True)
class Form:
    """A field's form in JSON where it differs from pydantic's; `written` is the type that `write` returns."""

    write: Callable[[Any], Any]
    written: Any
    read: Callable[[Any], Any] | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema

        form = handler.generate_schema(self.written)
        return core_schema.no_info_before_validator_function(
            self.read or (lambda values: values),
            handler(source),
            # Input and output have the same JSON schema.
            json_schema_input_schema=form if self.read else None,
            serialization=core_schema.plain_serializer_function_ser_schema(self.write, return_schema=form),
        )


class _NullWhereNotFinite:
    """Also accepts null when read, as the store writes infinite numbers and NaN as null."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema

        return core_schema.nullable_schema(handler(source))


def _with_text_keys(values: Mapping[int, Any]) -> dict[str, Any]:
    return {str(key): values[key] for key in sorted(values)}


def _with_number_keys(values: Any) -> Any:
    """Return the mapping with its keys as integers, ascending: a database may have reordered the text keys."""
    return {key: values[str(key)] for key in sorted(map(int, values))} if isinstance(values, Mapping) else values


Figure = Annotated[float, _NullWhereNotFinite()]
SORTED = Form(sorted, list[int])
BY_NUMBER = Form(_with_text_keys, dict[str, Any], _with_number_keys)  # Mappings with integer keys.


@cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def sentence(error: ValidationError, where: str, kind: type[Any]) -> str:
    """Return the first of the errors as a sentence: where, what, what to do."""
    first = error.errors(include_url=False)[0]
    place = [str(part) for part in first["loc"] if part != getattr(kind, "FLAT", "")]
    names = [field.name for field in dataclasses.fields(kind)] if len(place) == 1 else []
    return f"{where}: {explained(place, first['type'], first['msg'], first['input'], names)}"


def explained(place: list[str], kind: str, message: str, value: Any, known: Sequence[str] = ()) -> str:
    """Return one pydantic error as a phrase; `known`: the valid keys, to suggest the nearest."""
    at, outer = ".".join(place), ".".join(place[:-1])
    if kind == "missing":
        return f"{outer or 'it'} lacks {place[-1]!r}"
    if kind in ABOUT_KEYS:
        nearest = difflib.get_close_matches(place[-1], known, n=1)
        advice = f"did you mean {nearest[0]!r}?" if nearest else f"known are {', '.join(known)}" if known else "omit it"
        return f"{outer or 'it'} has no {place[-1]!r}: {advice}"
    if kind == "value_error":
        words = message.removeprefix("Value error, ")
        return f"{at}: {words}" if at else words
    return f"{at or 'it'} is {_short(value)}: {_advice(message)}"


def explained_body(found: Sequence[Mapping[str, Any]], body: Any) -> tuple[str, str, Sequence[Mapping[str, Any]]]:
    """Return the first error in a body as a sentence, its place, and the pydantic errors at that place.

    Args: found: pydantic's errors, each with its `loc` within the body.

    Where a value fits none of several types, the sentence is about the one that it comes nearest to, or names them all.
    """
    first, depth = found[0], len(_place_in(body, found[0]))
    if first["type"] == "missing" and not first["loc"]:
        return "there is no body: send one JSON object", "", [first]
    # The value fits no type of a union: the rest of `loc` is pydantic's name of the type it tried.
    if depth < len(first["loc"]) and first["loc"][-1] != KEY:
        prefix = first["loc"][:depth]
        rivals = [other for other in found if other["loc"][:depth] == prefix]
        depth = max(len(_place_in(body, other)) for other in rivals)
        first = next(other for other in rivals if len(_place_in(body, other)) == depth)
        rivals = [other for other in rivals if _place_in(body, other) == _place_in(body, first)]
    else:
        rivals = [first]
    place = _place_in(body, first)
    at = dotted(place)
    if first["loc"] and first["loc"][-1] == KEY:
        return f"{dotted(place[:-1])} has the key {place[-1]!r}: {_advice(first['msg'])}", dotted(place[:-1]), rivals
    advice = list(dict.fromkeys(_advice(other["msg"]) for other in rivals))
    if len(advice) > 1 and all(other.startswith("use ") for other in advice):
        words = ", or ".join([advice[0], *(other[4:] for other in advice[1:])])
        return f"{at} is {_short(first['input'])}: {words}", at, rivals
    outer = [dotted(place[:-1]) or "the body", str(place[-1])] if first["type"] in ABOUT_KEYS else [at or "the body"]
    return explained(outer, first["type"], first["msg"], first["input"]), at, rivals


def _place_in(body: Any, error: Mapping[str, Any]) -> tuple[str | int, ...]:
    """Return the part of an error's location that are keys and indices of the body."""
    place, value = list[str | int](), body
    for part in error["loc"]:
        is_key = isinstance(value, Mapping) and part in value
        if is_key or (isinstance(value, list) and isinstance(part, int) and part < len(value)):
            place.append(part)
            value = value[part]
    return (*place, error["loc"][-1]) if error["type"] == "missing" and error["loc"] else tuple(place)


def dotted(place: Sequence[str | int]) -> str:
    """Return a place in JavaScript notation: `messages[0].role`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part[:100]}" for part in place).removeprefix(".")


def _advice(message: str) -> str:
    expected = message.removeprefix("Input should be ")
    words = f"use {expected}" if expected != message else f"{message[:1].lower()}{message[1:]}"
    for pattern, ours in WORDS.items():
        words = re.sub(pattern, ours, words)
    return words


def _short(value: Any) -> str:
    # Cut before `repr`, which is slow for values of megabytes.
    text = repr(value[:80] if isinstance(value, list | str) else value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def schemas_in(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield a schema of pydantic's core and all that are within it; each may be changed when it is yielded."""
    if isinstance(schema, dict):
        yield schema
        schema = list(schema.values())
    for part in schema if isinstance(schema, list | tuple) else ():
        yield from schemas_in(part)


def _key(field: dataclasses.Field[Any]) -> str:
    return str(field.metadata.get("alias", field.name))


def _always_written(kind: Any) -> list[str]:
    return [_key(field) for field in dataclasses.fields(kind) if not {"exclude", "exclude_if"} & set(field.metadata)]
