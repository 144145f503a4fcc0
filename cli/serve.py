"""`swiftopt serve`."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import click

from ..core.errors import SettingsError
from ..core.requests import ServedModel
from . import options
from .options import database_url, open_store, pick, positive
from .output import emit_json, note


@click.command(short_help="Answer look-ups and take jobs over HTTP.")
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on; others than this machine's own need an API key.",
)
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="0 takes a free one.")
@click.option(
    "--stream-folder",
    "folders",
    multiple=True,
    metavar="DIR",
    help="Folder whose streams jobs may name; may be repeated.  [env: SWIFTOPT_STREAM_FOLDERS]",
)
@click.option(
    "--max-body-mb", default=32, show_default=True, type=click.IntRange(1, 4096), help="Largest body, in MiB."
)
@click.option(
    "--rate",
    default=600,
    show_default=True,
    type=click.IntRange(min=0),
    help="Requests a minute per key, or address where there are no keys; 0 is no limit.",
)
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="[NAME=]MODEL",
    help="A model to decode with: alias, hub id, folder or GGUF file; may be repeated. NAME is what clients call it.",
)
@click.option("--concurrency", default=8, show_default=True, type=positive, help="Completions at once, per model.")
@click.option(
    "--max-waiting", default=64, show_default=True, type=click.IntRange(min=0), help="Completions that may wait."
)
@click.option(
    "--memory-gb", type=click.FloatRange(min=0.01), help="For keys and values.  [default: half of what is free]"
)
@click.option("--timeout", default=600, show_default=True, type=positive, help="Seconds for one completion.")
@click.option("--drain", default=30, show_default=True, type=positive, help="Seconds for completions at the end.")
@click.option("--tune/--no-tune", default=True, show_default=True, help="Learn from the requests that are served.")
@options.placement(ServedModel)
@options.speed(ServedModel)
@click.option("--new-key", metavar="NAME", help="Print a new API key and its entry, and do nothing else.")
@options.redis
@options.db
@options.json
@options.example("serve --model smollm2-135m", "serve --port 8000 --stream-folder prompts", "serve --new-key ci")
def serve(new_key: str | None, as_json: bool, models: tuple[str, ...], **values: Any) -> None:
    """Answer look-ups of layer sets, take jobs, and decode over HTTP.

    With --model the server speaks OpenAI's API (/v1/chat/completions, /v1/completions, /v1/models) and gets faster on
    the requests that it serves; their output stays that of plain decoding. Each model runs in a process of its own.

    API keys come from SWIFTOPT_API_KEYS (name:sha256hex, separated by commas) or SWIFTOPT_API_KEYS_FILE (one entry per
    line, read again when it changes). One line per request goes to stderr. --json prints the address as JSON.
    """
    if new_key is not None:
        _show_key(new_key, as_json)
        return
    from ..server.app import listen
    from ..server.app import serve as run
    from ..server.settings import MIB, KeyRing, ServerSettings, stream_folders

    settings = ServerSettings(
        keys=KeyRing.from_environment(),
        stream_folders=stream_folders(values["folders"]),
        max_body_bytes=values["max_body_mb"] * MIB,
        requests_per_min=values["rate"],
        max_waiting=values["max_waiting"],
        drain_s=values["drain"],
        timeout_s=values["timeout"],
    )
    served = _served(models, values)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    for noisy in ("uvicorn.error", "alembic", "sse_starlette", "python_multipart"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    with listen(values["host"], values["port"], settings) as bound, open_store(values["db"]) as store:
        url = _url(values["host"], bound.getsockname()[1])

        def ready() -> None:
            if as_json:
                emit_json({"schema": "swiftopt.serve/1", "url": url})
            note(f"swiftopt serves {url}; Ctrl-C ends it")

        run(bound, store, values["redis"], settings, ready, served)


def _served(models: tuple[str, ...], values: dict[str, Any]) -> list[ServedModel]:
    """Return the models by the names that clients use.

    Raises: ModelNotFound, SettingsError, UnsupportedModel: one cannot be loaded, as far as can be told before it is.
    """
    from ..models.sources import check_names

    found: dict[str, ServedModel] = {}
    memory = None if values["memory_gb"] is None else int(values["memory_gb"] * 1e9 / len(models or "1"))
    for words in models:
        given, equals, path = words.partition("=")
        path = path if equals else words
        name = given if equals else Path(words).name if os.path.exists(words) else words
        check_names(path, values["dtype"], values["device"])
        if name in found:
            raise SettingsError(f"two models are called {name!r}: name one of them, as --model NAME={path}")
        own = {**values, "name": name, "path": path, "memory": memory, "db": database_url(values["db"])}
        found[name] = pick(ServedModel, own)
    return list(found.values())


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _show_key(name: str, as_json: bool) -> None:
    from ..server.settings import new_key

    key, entry = new_key(name)
    if as_json:
        emit_json({"schema": "swiftopt.api-key/1", "name": name, "key": key, "entry": entry})
        return
    click.echo(f"key    {key}\nentry  {entry}")
    note("The key is shown this once; put the entry into SWIFTOPT_API_KEYS or the file of SWIFTOPT_API_KEYS_FILE.")
