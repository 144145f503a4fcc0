"""All errors shown to users, with the exit code that the command line returns for each.

SwiftoptError                         exit 1
├── InvalidInput (ValueError)         exit 2   something the caller passed cannot be used
│   ├── LayerSetError                          a layer set is out of range or for another model
│   ├── SettingsError                          a setting is out of its range or unknown
│   │   └── DeviceMissing                          the device is not on this machine
│   ├── ShapeError                             tensors or tree arrays do not fit together
│   ├── StreamError                            a stream of prompts has a line that cannot be read
│   ├── SchemaError                            a JSON schema cannot be enforced
│   │   └── ParametersError                        it is that of a function's parameters
│   ├── UnsupportedField                       a request has a field that cannot be obeyed here
│   │   └── UnsupportedValue                       the field can be obeyed with other values
│   ├── UnsupportedModel                       swiftopt cannot skip sub-layers of this architecture
│   └── ContextOverflow                        prompt and completion do not fit the model's context
├── NotFound (LookupError)            exit 3
│   ├── ModelNotFound                          no alias, folder, file or hub model of that name
│   │   └── HubUnreachable                         the hub, which may have it, does not answer
│   ├── FileNotFound                           no such file
│   │   └── StreamNotFound                     no such file of prompts
│   ├── LayerSetNotFound                       nothing stored for that model and task
│   └── LearnedNotFound                        no heads or probe stored for that model and task
├── StoreError                        exit 1   the database cannot be used
│   ├── SchemaTooNew                           it was written by a newer swiftopt
│   └── StoreUnavailable                       it cannot be reached now: retrying may help
├── OutputError                       exit 1   a result cannot be written (disk full, no permission)
├── JobFailed                         exit 4   a job that was followed ended without a result
├── JobCancelled                      exit 5   a job that was followed was cancelled
├── ServiceUnreachable                exit 6   Redis or the API does not answer
│   └── EngineGone                             a model's engine is loading or has died
├── Busy                              exit 6   too many requests wait on the server
├── Conflict                          exit 7   the job's state does not allow the action
└── LeaseLost                         exit 1   a job's attempt was replaced by a newer one, or its job has ended
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import TypeVar
from urllib.parse import urlsplit

T = TypeVar("T")


MOST_CHARACTERS, LAST_CHARACTERS = 2000, 300  # Maximum length of a message, and of the end kept if it is longer.


class SwiftoptError(Exception):
    """Base of all errors; the message is one sentence: what is wrong, where, and what to do.

    A message that quotes a very long value is shortened in the middle.

    `param`: the request field with the error, if it is one field.
    """

    exit_code = 1

    def __init__(self, message: str = "", param: str | None = None) -> None:
        if len(message) > MOST_CHARACTERS:
            message = f"{message[: MOST_CHARACTERS - LAST_CHARACTERS]} … {message[-LAST_CHARACTERS:]}"
        super().__init__(message)
        self.param = param


class InvalidInput(SwiftoptError, ValueError):
    exit_code = 2


class LayerSetError(InvalidInput): ...


class SettingsError(InvalidInput): ...


class DeviceMissing(SettingsError): ...


class ShapeError(InvalidInput): ...


class StreamError(InvalidInput): ...


class SchemaError(InvalidInput): ...


class ParametersError(SchemaError): ...


class UnsupportedField(InvalidInput): ...


class UnsupportedValue(UnsupportedField): ...


class UnsupportedModel(InvalidInput): ...


class ContextOverflow(InvalidInput): ...


class NotFound(SwiftoptError, LookupError):
    exit_code = 3


class ModelNotFound(NotFound): ...


class HubUnreachable(ModelNotFound): ...


class FileNotFound(NotFound): ...


class StreamNotFound(FileNotFound): ...


class LayerSetNotFound(NotFound): ...


class LearnedNotFound(NotFound): ...


class StoreError(SwiftoptError): ...


class SchemaTooNew(StoreError): ...


class StoreUnavailable(StoreError): ...


class OutputError(SwiftoptError): ...


class JobFailed(SwiftoptError):
    exit_code = 4


class JobCancelled(SwiftoptError):
    exit_code = 5


class ServiceUnreachable(SwiftoptError):
    exit_code = 6


class EngineGone(ServiceUnreachable): ...


class Busy(SwiftoptError):
    exit_code = 6


class Conflict(SwiftoptError):
    exit_code = 7


class LeaseLost(SwiftoptError): ...


def cut_short(text: str, longest: int = 40) -> str:
    """Return a text from a file for use in a sentence: on one line, cut to `longest` characters."""
    return text if len(text) <= longest and text.isprintable() else ascii(text[:longest])


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error message, shortened for use in a sentence."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror  # Leave out the errno and the paths.
    # str() of a KeyError is only the key, so put the error's class before it.
    words = f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error)
    lines = words.strip().splitlines() or [type(error).__name__]
    return lines[0].strip().rstrip(".:")[:160]


def connection_problem(error: BaseException) -> str:
    """Return why a connection failed: the operating system's message if it reported one, otherwise the library's."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror.lower()
        cause = cause.__cause__ or cause.__context__
    return first_line(error)


def nearest_words(name: str, known: Iterable[str], n: int = 1) -> str:
    """Return " (nearest: …)" with the most similar known names, best first; "" where none is similar."""
    similar_names = get_close_matches(name, list(known), n=n)
    return f" (nearest: {', '.join(similar_names)})" if similar_names else ""


def look_up(what: str, name: str, known: Mapping[str, T]) -> T:
    """Return the value of a name.

    Raises: SettingsError: the name is unknown; the message suggests a similar one.
    """
    if name not in known:
        raise SettingsError(f"{what} {name!r} is unknown: use one of {', '.join(known)}{nearest_words(name, known)}")
    return known[name]


# Matches a password given as a query parameter: ?password=… or ?sslpassword=….
SECRET_OPTION = re.compile(r"([?&](?:ssl)?password=)[^&#]*", re.IGNORECASE)


def safe_url(url: str) -> str:
    """Return the URL or path without its password, for errors, logs and hints."""
    url = SECRET_OPTION.sub(r"\1***", url)
    if "@" not in url or "://" not in url:
        return url
    try:
        url_parts = urlsplit(url)
    except ValueError:
        return "(unreadable URL)"  # Do not show the URL: it may contain a password.
    user, separator, _ = url_parts.netloc.rpartition("@")[0].partition(":")
    return url_parts._replace(netloc=f"{user}:***@{url_parts.netloc.rpartition('@')[2]}").geturl() if separator else url
