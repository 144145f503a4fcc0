"""Conversion of records to JSON and back by their annotations, with pydantic, which is imported on first use.

A record is a frozen dataclass that inherits from `Record`. Rules beyond its annotations are in a field's metadata
(`ge`, `le`, `exclude`, `description`: the arguments of `pydantic.Field`), in one of the forms below, or in the class
variables of `Record`.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
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
    "a valid string, unable to parse raw data .*": "a text of whole characters",  # It has a lone surrogate.
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
    r"string should match pattern '\^\[(.*)\]\{1,(\d+)\}.*": r"use up to \2 of the characters \1",
    r"string should match pattern '\^\[(.*)\]\{(\d+)\}.*": r"use \2 of the characters \1",
    r"string should match pattern '\^\(auto\|.*": "use auto, cpu, cuda, cuda:N or auto-map",
    "a valid date.*": "a day such as 2026-11-01",
    "use (?=greater|less)": "use a number ",
}
KEY_ERRORS = ("missing", "unexpected_keyword_argument", "extra_forbidden")
KEY = "[key]"  # Last item of pydantic's error location when a dictionary key is invalid.
SCALARS = ("int", "float", "bool", "str")  # Scalar types in pydantic's core schema, which are validated strictly.


def kinds_by_name(kinds: Iterable[Any], separator: str) -> dict[str, Any]:
    """Return classes by their names in lower case, `separator` between the words."""
    return {re.sub(r"(?<!^)(?=[A-Z])", separator, kind.__name__).lower(): kind for kind in kinds}


class Record:
    """Base of the dataclasses that files, database rows, command line and HTTP exchange as JSON objects.

    Numbers, texts and booleans are read strictly: the only conversion is from an integer to a float.
    """

    __slots__ = ()
    __pydantic_config__: ClassVar[Any] = {"extra": "ignore", "serialize_by_alias": True}

    # Value of the key "schema" in the JSON; reading requires it. Empty: no such key.
    SCHEMA: ClassVar[str] = ""
    # Name of a field whose keys are merged into the record's own JSON object.
    FLAT: ClassVar[str] = ""
    COMPUTED: ClassVar[tuple[str, ...]] = ()  # Properties that are also written to JSON.
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
        """Return the object to read instead of `values`; overridden by records that accept more incomplete objects."""
        return values

    @classmethod
    def _read(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        values = cls.adapt(values)
        if cls.SCHEMA and values.get("schema", cls.SCHEMA) != cls.SCHEMA:
            raise ValueError(f"its schema is {values['schema']!r}, this version reads {cls.SCHEMA!r}")
        required_keys = [
            *(["schema"] if cls.SCHEMA else []),
            *(_always_written(cast(Any, cls)) if cls.COMPLETE else []),
        ]
        missing_keys = [key for key in required_keys if key not in values]
        if missing_keys:
            raise ValueError(f"it lacks {missing_keys[0]!r}")
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
        field_schemas = schema["schema"]["fields"]
        # Keyword-only fields come last in JSON, also inherited ones.
        field_schemas.sort(key=lambda field_schema: bool(field_schema.get("kw_only")))
        schema["fields"] = [field_schema["name"] for field_schema in field_schemas]
        # Validate strictly: no conversion of texts to numbers, no infinite numbers, no NaN.
        for inner_schema in schemas_in(schema):
            if inner_schema.get("type") in SCALARS:
                inner_schema["strict"] = True
            if inner_schema.get("type") == "float":
                inner_schema["allow_inf_nan"] = False
        if not (cls.SCHEMA or cls.FLAT or cls.COMPUTED or cls.COMPLETE):
            return cast("CoreSchema", schema)
        serializer = core_schema.wrap_serializer_function_ser_schema(cls._write)
        reference = schema.pop("ref", None)
        return core_schema.no_info_before_validator_function(cls._read, schema, ref=reference, serialization=serializer)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        reference = handler(schema)
        definition = handler.resolve_ref_schema(reference)
        definition["description"] = (cls.__doc__ or "").partition("\n")[0]
        if handler.mode == "serialization":
            flat_schema = handler.resolve_ref_schema(definition["properties"].pop(cls.FLAT, {}))
            computed_types = {name: get_type_hints(getattr(cls, name).fget)["return"] for name in cls.COMPUTED}
            definition["properties"] = {
                **({"schema": {"const": cls.SCHEMA, "type": "string"}} if cls.SCHEMA else {}),
                **flat_schema.get("properties", {}),
                **definition["properties"],
                **{name: adapter(hint).json_schema() for name, hint in computed_types.items()},
            }
            optional_keys = {
                _key(field) for field in dataclasses.fields(cast(Any, cls)) if "exclude_if" in field.metadata
            }
            # A field that the flat record may leave out, unless this one computes it.
            flat_optional_keys = flat_schema.get("properties", {}).keys() - flat_schema.get("required", ())
            optional_keys |= flat_optional_keys - set(cls.COMPUTED)
            definition["required"] = [name for name in definition["properties"] if name not in optional_keys]
        return reference


class Settings(Record):
    """Base of records whose values are checked when they are built: choices, and numbers in `ranged` fields.

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
            is_valid = (
                value in choices_of_field if choices_of_field else value is None or _in_range(value, field.metadata)
            )
            if not is_valid:
                allowed = (
                    " or ".join(map(str, choices_of_field)) if choices_of_field else _range_words(value, field.metadata)
                )
                raise SettingsError(f"{field.name} {value} is out of range: use {allowed}", field.name)


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
    minimum, exclusive_minimum = bounds.get("ge"), bounds.get("gt")
    # A number with a lower bound gets a finite upper one: JSON has no infinity.
    maximum = bounds.get("le", LARGEST if bounds.keys() & {"ge", "gt"} else None)
    return (
        (minimum is None or value >= minimum)
        and (exclusive_minimum is None or value > exclusive_minimum)
        and (maximum is None or value <= maximum)
    )


def _range_words(value: Any, bounds: Mapping[str, Any]) -> str:
    maximum = bounds.get("le", LARGEST)
    shows_maximum = maximum != LARGEST or value > maximum
    if "gt" in bounds:
        return f"a number above {bounds['gt']}" + (f", at most {maximum}" if shows_maximum else "")
    return f"a number from {bounds['ge']} to {maximum}" if shows_maximum else f"{bounds['ge']} or more"


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

        written_schema = handler.generate_schema(self.written)
        return core_schema.no_info_before_validator_function(
            self.read or (lambda values: values),
            handler(source),
            # Input and output have the same JSON schema.
            json_schema_input_schema=written_schema if self.read else None,
            serialization=core_schema.plain_serializer_function_ser_schema(self.write, return_schema=written_schema),
        )


class _NullWhereNotFinite:
    """Also accepts null when read, as the store writes infinite numbers and NaN as null."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema

        return core_schema.nullable_schema(handler(source))


def _to_text_keys(values: Mapping[int, Any]) -> dict[str, Any]:
    return {str(key): values[key] for key in sorted(values)}


def _to_number_keys(values: Any) -> Any:
    """Return the mapping with its keys as integers, ascending: a database may have reordered the text keys."""
    return {key: values[str(key)] for key in sorted(map(int, values))} if isinstance(values, Mapping) else values


Figure = Annotated[float, _NullWhereNotFinite()]
SORTED = Form(sorted, list[int])
BY_NUMBER = Form(_to_text_keys, dict[str, Any], _to_number_keys)  # Mappings with integer keys.


@cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def sentence(error: ValidationError, where: str, kind: type[Any]) -> str:
    """Return the first error as a sentence: where, what, what to do."""
    first_error = error.errors(include_url=False)[0]
    path = [str(part) for part in first_error["loc"] if part != getattr(kind, "FLAT", "")]
    field_names = [field.name for field in dataclasses.fields(kind)] if len(path) == 1 else []
    return f"{where}: {explain_error(path, first_error['type'], first_error['msg'], first_error['input'], field_names)}"


def explain_error(path: list[str], kind: str, message: str, value: Any, known_keys: Sequence[str] = ()) -> str:
    """Return one pydantic error as a phrase; the nearest of the valid keys, `known_keys`, is suggested."""
    dotted_path, parent_path = ".".join(path), ".".join(path[:-1])
    if kind == "missing":
        return f"{parent_path or 'it'} lacks {path[-1]!r}"
    if kind in KEY_ERRORS:
        similar_keys = difflib.get_close_matches(path[-1], known_keys, n=1)
        advice = (
            f"did you mean {similar_keys[0]!r}?"
            if similar_keys
            else f"known are {', '.join(known_keys)}"
            if known_keys
            else "omit it"
        )
        return f"{parent_path or 'it'} has no {path[-1]!r}: {advice}"
    if kind == "value_error":
        reason = message.removeprefix("Value error, ")
        return f"{dotted_path}: {reason}" if dotted_path else reason
    return f"{dotted_path or 'it'} is {shorten(value)}: {_advice(message)}"


def explain_body_error(errors: Sequence[Mapping[str, Any]], body: Any) -> tuple[str, str, Sequence[Mapping[str, Any]]]:
    """Return the first error in a body as a sentence, its place, and the pydantic errors at that place.

    Args: errors: pydantic's errors, each with its `loc` within the body.

    If a value fits none of several types, the sentence describes the nearest one, or names them all.
    """
    errors = [{**error, "loc": _without_tag(error["loc"], body)} for error in errors]
    first_error, same_place_errors = errors[0], errors[:1]
    if first_error["type"] == "missing" and not first_error["loc"]:
        return "the body is empty: send one JSON object", "", same_place_errors
    path = _body_path(body, first_error)
    # The value fits no type of a union: `loc` has the names of the types that pydantic tried. The type that accepts the
    # longest part of the value is the intended one.
    if path != first_error["loc"] and first_error["loc"][-1] != KEY:
        union = _before_types(body, first_error["loc"])
        rivals = [error for error in errors if error["loc"][: len(union)] == union]
        path = max((_body_path(body, rival) for rival in rivals), key=_progress)
        same_place_errors = [rival for rival in rivals if _body_path(body, rival) == path]
        first_error = same_place_errors[0]
    dotted_path = to_javascript_path(path)
    if first_error["loc"] and first_error["loc"][-1] == KEY:
        return (
            f"{to_javascript_path(path[:-1])} has the key {path[-1]!r}: {_advice(first_error['msg'])}",
            to_javascript_path(path[:-1]),
            same_place_errors,
        )
    advice = list(dict.fromkeys(_advice(rival["msg"]) for rival in same_place_errors))
    if len(advice) > 1 and all(rival.startswith("use ") for rival in advice):
        words = ", or ".join([advice[0], *(rival[4:] for rival in advice[1:])])
        return f"{dotted_path} is {shorten(first_error['input'])}: {words}", dotted_path, same_place_errors
    location = (
        [to_javascript_path(path[:-1]) or "the body", str(path[-1])]
        if first_error["type"] in KEY_ERRORS
        else [dotted_path or "the body"]
    )
    return (
        explain_error(location, first_error["type"], first_error["msg"], first_error["input"]),
        dotted_path,
        same_place_errors,
    )


def _without_tag(loc: tuple[str | int, ...], body: Any) -> tuple[str | int, ...]:
    """Return an error's location without the tag of a discriminated union of bodies, which may precede a field."""
    return loc[1:] if len(loc) > 1 and not _has(body, loc[0]) else loc


def _has(value: Any, path_part: str | int) -> bool:
    """Return whether a part of a location is a key or an index of the value."""
    if isinstance(value, list):
        return isinstance(path_part, int) and path_part < len(value)
    return isinstance(value, Mapping) and path_part in value


def _body_path(body: Any, error: Mapping[str, Any]) -> tuple[str | int, ...]:
    """Return the part of an error's location that consists of keys and indices of the body."""
    path, value = list[str | int](), body
    for path_part in error["loc"]:
        if _has(value, path_part):
            path.append(path_part)
            value = value[path_part]
    return (*path, error["loc"][-1]) if error["type"] == "missing" and error["loc"] else tuple(path)


def _before_types(body: Any, loc: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """Return the parts of an error's location before the first name of a type."""
    value = body
    for n_parts, path_part in enumerate(loc):
        if not _has(value, path_part):
            return loc[:n_parts]
        value = value[path_part]
    return loc


def _progress(path: Sequence[str | int]) -> tuple[int, list[int]]:
    """Return a sort key for places in one value: the depth, then the indices in its lists."""
    return len(path), [path_part for path_part in path if isinstance(path_part, int)]


def to_javascript_path(path: Sequence[str | int]) -> str:
    """Return a place in JavaScript notation: `messages[0].role`."""
    return "".join(
        f"[{path_part}]" if isinstance(path_part, int) else f".{path_part[:100]}" for path_part in path
    ).removeprefix(".")


def _advice(message: str) -> str:
    expected = message.removeprefix("Input should be ")
    advice = f"use {expected}" if expected != message else f"{message[:1].lower()}{message[1:]}"
    for pattern, replacement in WORDS.items():
        advice = re.sub(pattern, replacement, advice)
    return advice


def shorten(value: Any) -> str:
    """Return a value as JSON, cut to 80 characters; texts are in single quotes, as in error messages."""
    # Cut first, because serialising values of megabytes is slow.
    value = value[:80] if isinstance(value, list | str) else value
    text = repr(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 80 else f"{text[:77]}..."


def check_json(fields: Mapping[str, Any]) -> None:
    """Check that the fields of a request can be repeated in an answer.

    Raises: InvalidInput: a number or a text in one of them cannot be written as JSON, or its nesting is too deep.
    """
    for name, value in fields.items():
        try:
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except UnicodeEncodeError:
            problem = f"{name} has a lone surrogate, half of a character: send whole characters"
            raise InvalidInput(problem, name) from None
        except RecursionError:
            raise InvalidInput(f"{name} is nested too deeply: send it with fewer levels", name) from None
        except ValueError:
            raise InvalidInput(
                f"{name} has a number that JSON cannot represent (NaN or infinity): remove it", name
            ) from None


def schemas_in(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield a pydantic core schema and all schemas within it; the caller may change each one as it is yielded."""
    if isinstance(schema, dict):
        yield schema
        schema = list(schema.values())
    for part in schema if isinstance(schema, list | tuple) else ():
        yield from schemas_in(part)


def _key(field: dataclasses.Field[Any]) -> str:
    return str(field.metadata.get("alias", field.name))


@cache
def _always_written(kind: Any) -> list[str]:
    return [_key(field) for field in dataclasses.fields(kind) if not {"exclude", "exclude_if"} & set(field.metadata)]
