"""Whether values that came from outside are of the types that a dataclass says."""

from __future__ import annotations

import dataclasses
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints


def check_type(value: Any, hint: Any, where: str) -> None:
    """A figure may be null: the store writes so what is not finite. An int is a float, too; a bool is no number.

    Raises: TypeError: the value, or a part of it, is not of the annotated type; it names the part.
    """
    if dataclasses.is_dataclass(hint):
        if type(value) is not hint:
            raise _wrong(value, hint, where)
        for name, inner in _hints(cast(Any, hint)).items():
            check_type(getattr(value, name), inner, name)
    elif (origin := get_origin(hint)) in (tuple, frozenset):
        if not isinstance(value, origin):
            raise _wrong(value, hint, where)
        inners = [inner for inner in get_args(hint) if inner is not Ellipsis]
        many = inners if len(inners) > 1 else inners * len(value)
        if len(value) != len(many):
            raise _wrong(value, hint, where)
        for part, inner in zip(value, many, strict=True):
            check_type(part, inner, where)
    elif not _is(value, hint):
        raise _wrong(value, hint, where)


def _is(value: Any, hint: Any) -> bool:
    """Whether a value without parts is of that type, or one with parts of one of those types."""
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) in (Union, UnionType):
        return any(_fits(value, inner) for inner in get_args(hint))
    if isinstance(value, bool):
        return hint is bool
    if hint is float:
        return value is None or isinstance(value, int | float)
    return isinstance(value, get_origin(hint) or hint)


def _fits(value: Any, hint: Any) -> bool:
    try:
        check_type(value, hint, "")
    except TypeError:
        return False
    return True


def _wrong(value: Any, hint: Any, where: str) -> TypeError:
    wanted = hint.__name__ if isinstance(hint, type) else hint
    return TypeError(f"{where} is {value!r}, expected {wanted}")


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)
