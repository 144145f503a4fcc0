"""Every error a user can meet, each with the exit code its front door answers with.

SwiftoptError                         exit 1
├── InvalidInput (ValueError)         exit 2   something the caller passed cannot be used
│   ├── LayerSetError                          a layer set is out of range or of another model
│   ├── SettingsError                          a setting is out of its range or unknown
│   │   └── DeviceMissing                          the device is not on this machine
│   ├── ShapeError                             tensors or tree arrays do not fit together
│   ├── StreamError                            a stream of prompts has a line that cannot be read
│   ├── UnsupportedModel                       the architecture is not one that swiftopt can skip in
│   └── ContextOverflow                        prompt and completion do not fit the model's context
├── NotFound (LookupError)            exit 3
│   ├── ModelNotFound                          no alias, folder, file or hub model of that name
│   ├── FileNotFound                           no such file
│   │   └── StreamNotFound                     no such file of prompts
│   ├── LayerSetNotFound                       nothing stored for that model and task
│   └── LearnedNotFound                        no heads or probe stored for that model and task
├── StoreError                        exit 1   the database cannot be used
│   ├── SchemaTooNew                           it was written by a newer swiftopt
│   └── StoreUnavailable                       it cannot be reached just now: trying again may help
├── OutputError                       exit 1   a result cannot be written (disk full, no permission)
├── JobFailed                         exit 4   a job that was followed ended without a result
├── JobCancelled                      exit 5   a job that was followed was cancelled
├── ServiceUnreachable                exit 6   Redis or the API does not answer
│   └── EngineGone                             a model's engine loads or has died
├── Busy                              exit 6   more requests wait than the server lets wait
├── Conflict                          exit 7   the job is not in a state for that
└── LeaseLost                         exit 1   a job's attempt was replaced by a newer one, or its job has ended
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit


class SwiftoptError(Exception):
    """Base of all; its text is one sentence that says what, where and what to do.

    `param` is the field of a request that it is about, where one is.
    """

    exit_code = 1

    def __init__(self, message: str = "", param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidInput(SwiftoptError, ValueError):
    """Something the caller passed cannot be used."""

    exit_code = 2


class LayerSetError(InvalidInput):
    """A layer set is out of range or belongs to another model."""


class SettingsError(InvalidInput):
    """A setting is unknown or out of its range."""


class DeviceMissing(SettingsError):
    """The device is not on this machine; another one may have it."""


class ShapeError(InvalidInput):
    """Tensors or tree arrays do not fit together."""


class StreamError(InvalidInput):
    """A stream of prompts has a line that cannot be read."""


class UnsupportedModel(InvalidInput):
    """The architecture is not one in which swiftopt can skip sub-layers."""


class ContextOverflow(InvalidInput):
    """Prompt and completion together do not fit the model's context."""


class NotFound(SwiftoptError, LookupError):
    """What was asked for does not exist."""

    exit_code = 3


class ModelNotFound(NotFound):
    """No alias, folder, file or hub model of that name can be loaded."""


class FileNotFound(NotFound):
    """A file that the caller named does not exist."""


class StreamNotFound(FileNotFound):
    """The file with the prompts does not exist."""


class LayerSetNotFound(NotFound):
    """Nothing is stored for that model and task."""


class LearnedNotFound(NotFound):
    """No heads or no probe are stored for that model and task."""


class StoreError(SwiftoptError):
    """The database cannot be opened, read or written."""


class SchemaTooNew(StoreError):
    """The database was written by a newer swiftopt."""


class StoreUnavailable(StoreError):
    """The database cannot be reached just now."""


class OutputError(SwiftoptError):
    """A result cannot be written."""


class JobFailed(SwiftoptError):
    """A job that was followed ended without a result."""

    exit_code = 4


class JobCancelled(SwiftoptError):
    """A job that was followed was cancelled."""

    exit_code = 5


class ServiceUnreachable(SwiftoptError):
    """Redis or the API does not answer."""

    exit_code = 6


class EngineGone(ServiceUnreachable):
    """The process that decodes with a model is not there: it loads, or it has died."""


class Busy(SwiftoptError):
    """More requests wait than the server lets wait: ask again later."""

    exit_code = 6


class Conflict(SwiftoptError):
    """The job is not in a state for that, or was submitted with other values under the same key."""

    exit_code = 7


class LeaseLost(SwiftoptError):
    """A write came from an attempt that was replaced, or whose job has ended: stop working on it."""


# another way to write a password into a URL
SECRET_OPTION = re.compile(r"([?&](?:ssl)?password=)[^&#]*", re.IGNORECASE)


def safe_url(url: str) -> str:
    """Return the URL, or path, without its password, as errors, logs and hints may show it."""
    url = SECRET_OPTION.sub(r"\1***", url)
    if "@" not in url or "://" not in url:
        return url
    try:
        parts = urlsplit(url)
    except ValueError:
        return "(unreadable URL)"  # it may hold a password
    user, colon, _ = parts.netloc.rpartition("@")[0].partition(":")
    return parts._replace(netloc=f"{user}:***@{parts.netloc.rpartition('@')[2]}").geturl() if colon else url
