"""Progress of `swiftopt serve` at a terminal while its models load."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.status import Status
from rich.text import Text

from .output import console, note

LOADING = re.compile("engine=(loading|ready)")  # Log records hidden while the live line shows the same.


class StartReport:
    """Reports on stderr which models are loading, and the URL of each one once it answers.

    At a terminal, a live line shows each model's loading step; `handler` prints log records above that line.
    """

    def __init__(self, url: str, models: Sequence[str], quiet: bool) -> None:
        self._url, self._steps, self._quiet = url, dict.fromkeys(models, "starting the process"), quiet
        self._line: Status | None = None
        self.handler: logging.Handler = logging.StreamHandler(sys.stderr)
        terminal = console(stderr=True)
        if terminal.is_terminal and models and not quiet:
            self._line, self.handler = terminal.status(self._words()), ConsoleHandler(terminal)
            self.handler.addFilter(lambda record: not (self._steps and LOADING.match(record.getMessage())))

    def __enter__(self) -> StartReport:
        if self._line is not None:
            self._line.start()
        elif self._steps:
            self._say(f"loading {', '.join(self._steps)}; requests wait until it is loaded")
        else:
            self._say(f"swiftopt serves layer sets and takes jobs at {self._url}; Ctrl-C stops it")
        return self

    def __exit__(self, *error: object) -> None:
        if self._line is not None:
            self._line.stop()

    def __call__(self, model: str, state: str) -> None:
        """Update a model's state; after its first "ok", changes are reported only in the log."""
        if model not in self._steps:
            return
        self._steps[model] = state.removeprefix("it is loading the model").removeprefix(": ") or "starting the process"
        if state == "ok":
            del self._steps[model]
            if self._line is not None and not self._steps:
                self._line.stop()
            self._say(f"swiftopt serves {model} at {self._url}; Ctrl-C stops it")
        if self._line is not None:
            self._line.update(self._words())

    def _words(self) -> Text:
        steps = "; ".join(f"{name}: {step}" for name, step in self._steps.items())
        return Text(f"loading {steps}", no_wrap=True, overflow="ellipsis")

    def _say(self, text: str) -> None:
        if self._line is not None:
            self._line.console.print(text, soft_wrap=True)
        elif not self._quiet:
            note(text)


class ConsoleHandler(logging.Handler):
    """Prints log records through the console, above its live display."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(self.format(record), soft_wrap=True)
