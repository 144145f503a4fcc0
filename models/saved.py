"""Folders of saved models: whether one is complete and supported, reading it in silence, and the cache for them."""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from ..core.errors import ModelNotFound, UnsupportedModel
from .families import FAMILIES, family_of

OnStep = Callable[[str], None]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tokenizer_config.json")
STALE_S = 24 * 3600  # age from which what a process left unfinished in the cache is removed
TOLD_S = 1.0  # between two reports of how much of the weights is read
_LOUD = ("transformers", "huggingface_hub", "accelerate")


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the progress bars and warnings of the libraries that load models, and restore them."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars
    from transformers import modeling_gguf_pytorch_utils
    from transformers.utils import logging as transformers_logging

    bars: Any = transformers_logging
    bars.get_verbosity()  # sets its logger up, which later would undo our level
    levels = {name: logging.getLogger(name).level for name in _LOUD}
    had_bars, had_hub_bars = bars.is_progress_bar_enabled(), not are_progress_bars_disabled()
    reader: Any = modeling_gguf_pytorch_utils  # its bar has no switch of its own
    bar = reader.tqdm
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            bars.disable_progress_bar()
            reader.tqdm = partial(bar, disable=True)
            for name in _LOUD:
                logging.getLogger(name).setLevel(logging.ERROR)
            yield
        finally:
            reader.tqdm = bar
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)
            if had_bars:
                bars.enable_progress_bar()
            if had_hub_bars:
                enable_progress_bars()


@contextmanager
def telling(step: OnStep, doing: str) -> Iterator[None]:
    """Tell `step` "`doing`, 40 % of the weights" about every second while transformers loads a model."""
    from tqdm import tqdm
    from transformers.utils import logging as transformers_logging

    class Bar(tqdm):  # type: ignore[misc,type-arg,unused-ignore]  # untyped
        monitor_interval = 0  # no thread that redraws a bar which stands still

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            """Tell the share instead of drawing it; tqdm clears a bar with an empty `msg`."""
            if self.total and msg is None:
                step(f"{doing}, {100 * self.n // self.total} % of the weights")

    def bar(_factory: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        ours = {"disable": False, "leave": False, "file": io.StringIO(), "miniters": 1, "mininterval": TOLD_S}
        return Bar(*args, **options | ours | {"delay": TOLD_S})

    before = transformers_logging.set_tqdm_hook(bar)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(before)


def cache_root() -> Path:
    """Return SWIFTOPT_CACHE_DIR, or the user's cache folder of this system."""
    from platformdirs import user_cache_dir

    return Path(os.environ.get("SWIFTOPT_CACHE_DIR") or user_cache_dir("swiftopt", appauthor=False)).expanduser()


def remove_stale(leftovers: Iterable[Path]) -> None:
    """Remove those files and folders that processes left long ago when they died while writing to the cache."""
    for left in leftovers:
        with suppress(OSError):  # another process has just finished, or removed, it
            if time.time() - left.stat().st_mtime > STALE_S:
                shutil.rmtree(left) if left.is_dir() else left.unlink()


def is_complete(folder: Path) -> bool:
    """Tell whether config and all weights are there."""
    from .fingerprint import weight_files

    if not (folder / "config.json").is_file():
        return False
    files = weight_files(folder)
    return bool(files) and all(path.is_file() for path in files)


def has_tokenizer(folder: Path) -> bool:
    """Tell whether some tokenizer was saved with the model."""
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def supported_type(folder: Path) -> str:
    """Read the model type from the folder's config, without transformers.

    Raises: ModelNotFound: it cannot be read. UnsupportedModel: swiftopt cannot skip in that architecture.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelNotFound(f"{path} is no model's config ({first_line(error)}): copy the folder again") from error
    if not isinstance(config, dict):
        raise ModelNotFound(f"{path} is no model's config (it holds no JSON object): copy the folder again")
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise UnsupportedModel(
            f"{path} has the model type {model_type!r}, which is not supported: use {', '.join(sorted(FAMILIES))}"
        )
    return str(model_type)


def supported_config(folder: Path) -> Any:
    """Read the folder's config.

    Raises: ModelNotFound: it cannot be read. UnsupportedModel: swiftopt cannot skip in that architecture.
    """
    from transformers import AutoConfig

    supported_type(folder)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # config classes check their values, each with errors of its own
        path = folder / "config.json"
        raise ModelNotFound(f"{path} is no model's config ({first_line(error)}): copy the folder again") from error
    family_of(config)
    return config


def refuse_missing(missing: Any, where: Path) -> None:
    """Raises: ModelNotFound: weights are missing; transformers would fill them with random numbers."""
    if missing:
        first = sorted(missing)[0]
        raise ModelNotFound(f"{where} lacks {len(missing)} weights, such as {first}: download or copy it again")


def first_line(error: BaseException) -> str:
    """Return what an error of another library says, cut to fit into a sentence."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror  # without its number and its paths
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].strip().rstrip(".:")[:160]


def no_step(words: str) -> None:
    """Report a step to nobody."""
