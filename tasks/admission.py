"""Checks of a tuning job before it is queued or run, which refuse jobs whose files or settings cannot work.

The CLI, the API, the dashboard and workers share them. They need neither torch nor the network.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ..core.errors import SettingsError, StreamError
from ..core.requests import TuneRequest
from ..core.settings import FP8_ON_CPU
from ..core.types import Prompt
from ..models.adapters import is_adapter
from ..models.prompts import check_prompts
from ..models.saved import supported_type
from ..models.sources import check_names, check_placement, known_folder, resolve, tokenizer_folder
from ..models.stores import STORES
from ..optimizer.strategies import strategy_info

# Environment variable with the folders, separated by colons, that may contain the models of queued jobs.
MODEL_FOLDERS = "SWIFTOPT_MODEL_FOLDERS"


def check_tuning(
    request: TuneRequest, prompts: Sequence[Prompt], runs_elsewhere: bool = False, queued: bool = False
) -> None:
    """Refuse a job that no worker could complete.

    Args:   runs_elsewhere: workers may be on other machines, with files that this one does not have. queued: the job
            came with a request, so its model must lie in an allowed folder.
    Raises: StreamError: there is no prompt. SettingsError, InvalidInput, ContextOverflow: a setting contradicts the
            other settings, the prompts or the model. ModelNotFound, UnsupportedModel: the model cannot be loaded.
    """
    if queued:
        check_model_folder(request.model)
    if not prompts:
        raise StreamError("there is no prompt to tune on: give at least one")
    settings = request.settings
    strategy_info(settings.strategy)
    _check_completion_length(request, prompts)
    if settings.draft_format == "fp8" and request.device == "cpu" and request.speed == "exact":
        raise SettingsError(FP8_ON_CPU, "settings.draft_format")
    path = os.path.expanduser(request.model)
    if runs_elsewhere and os.path.isabs(path) and not os.path.exists(path):
        check_placement(request.dtype, request.device, request.speed)
        return
    source = check_names(request.model, request.dtype, request.device, request.speed)
    if (folder := known_folder(source)) is not None:
        supported_type(folder)
        texts, biased = tokenizer_folder(source, folder), dict(request.sampling.logit_bias)
        check_prompts(folder, texts, prompts, request.max_new_tokens, biased)


def check_model_folder(model: str) -> None:
    """Refuse a model, or an adapter's base model, whose path is outside the folders of SWIFTOPT_MODEL_FOLDERS.

    Aliases, hub ids and names in stores are not paths. Without the variable, all folders are allowed.

    Raises: SettingsError: the path is outside. ModelNotFound, UnsupportedModel: from `resolve`, for an adapter.
    """
    folders = [os.path.realpath(name) for name in os.environ.get(MODEL_FOLDERS, "").split(os.pathsep) if name]
    path = os.path.expanduser(model)
    is_path = model.startswith((".", "/", "~")) or model.count("/") > 1 or os.path.exists(path)
    if not folders or not is_path or model.partition(":")[0] in STORES:
        return
    _refuse_outside(path, folders, f"the model {model}")
    base = resolve(model).base if is_adapter(path) else None
    if base is not None and base.kind == "folder":
        _refuse_outside(base.location, folders, f"the base {base.name} of the adapter {model}")


def _refuse_outside(path: str, folders: Sequence[str], description: str) -> None:
    if not any(Path(os.path.realpath(path)).is_relative_to(folder) for folder in folders):
        raise SettingsError(
            f"{description} is outside the folders for models of jobs ({', '.join(folders)}): move it into one of them,"
            f" or add its folder to {MODEL_FOLDERS} of the API and its workers",
            "model",
        )


def _check_completion_length(request: TuneRequest, prompts: Sequence[Prompt]) -> None:
    """Check that some completions are longer than the context window, as a search needs.

    Raises: SettingsError: all are too short.
    """
    window = request.settings.context_window
    max_new_tokens = max(prompt.max_new_tokens or request.max_new_tokens for prompt in prompts)
    if request.settings.optimise and max_new_tokens <= window:
        raise SettingsError(
            f"max_new_tokens {max_new_tokens} leaves nothing to decode after the context window of {window} tokens:"
            " raise max_new_tokens above it, or lower context_window",
            "max_new_tokens",
        )
