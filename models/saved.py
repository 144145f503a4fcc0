"""A saved model's folder: is it whole, is it supported, and reading it without a word on stdout or stderr."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from ..core.errors import ModelNotFound, UnsupportedModel
from .families import FAMILIES, family_of

OnStep = Callable[[str], None]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tokenizer_config.json")
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


def is_complete(folder: Path) -> bool:
    """Whether config and all weights are there."""
    from .fingerprint import weight_files

    if not (folder / "config.json").is_file():
        return False
    files = weight_files(folder)
    return bool(files) and all(path.is_file() for path in files)


def has_tokenizer(folder: Path) -> bool:
    """Whether some tokenizer was saved with the model."""
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def supported_type(folder: Path) -> str:
    """The model type in the folder's config, read without transformers.

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
    """The folder's config.

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
    """What an error of another library says, cut to fit into a sentence."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror  # without its number and its paths
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].strip().rstrip(".:")[:160]


def no_step(words: str) -> None:
    """A listener for steps that nobody wants to hear."""
