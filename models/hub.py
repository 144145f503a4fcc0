"""A model of the Hugging Face hub as a folder on this machine, and one sentence where that cannot be."""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path

from ..core.errors import ModelNotFound, UnsupportedModel
from .catalog import ALIASES, nearest
from .saved import OnStep, first_line, has_tokenizer, is_complete, supported_config

TIMEOUT_S = 10  # to the hub's first answer


def hub_folder(hub_id: str, otherwise: str, on_step: OnStep) -> Path:
    """The model's snapshot; a complete one in the hub's cache is taken as it is, without asking the network.

    `otherwise` ends the sentence where the hub cannot be reached: another way to get the model, or nothing.

    Raises: ModelNotFound: not here and not to be had. UnsupportedModel: known from its config, before the weights.
    """
    cached = _cached(hub_id)
    if cached is not None:
        return cached
    from huggingface_hub import HfApi, snapshot_download

    on_step(f"asking the hub for {hub_id}")
    try:
        listed = HfApi().model_info(hub_id, timeout=TIMEOUT_S).siblings or ()
        folder = Path(snapshot_download(hub_id, allow_patterns=["config.json"], etag_timeout=TIMEOUT_S))
        supported_config(folder)
        on_step(f"downloading {hub_id}")
        wanted = needed_files([entry.rfilename for entry in listed])
        return Path(snapshot_download(hub_id, allow_patterns=wanted, etag_timeout=TIMEOUT_S))
    except (ModelNotFound, UnsupportedModel):
        raise
    except Exception as error:  # whatever the hub's client and the HTTP library under it raise
        raise ModelNotFound(_sentence(hub_id, otherwise, error)) from error


def needed_files(files: list[str]) -> list[str]:
    """Of a repository's files those that transformers reads: settings, tokenizer and one form of the weights."""
    small = [name for name in files if "/" not in name and name.endswith((".json", ".jinja", ".txt", ".model"))]
    for single in ("model.safetensors", "pytorch_model.bin"):
        if single in files:
            return [*small, single]
        stem, suffix = single.split(".")
        shards = [name for name in files if re.fullmatch(rf"{stem}-\d+-of-\d+\.{suffix}", name)]
        if shards:
            return [*small, *shards]
    return small


def _cached(hub_id: str) -> Path | None:
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(hub_id, local_files_only=True, allow_patterns=["config.json"]))
    except (OSError, ValueError):
        return None
    return folder if is_complete(folder) and has_tokenizer(folder) else None


def _sentence(hub_id: str, otherwise: str, error: Exception) -> str:
    from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return f"the hub model {hub_id} is gated: accept its terms on the hub and log in with `hf auth login`"
    if isinstance(error, RepositoryNotFoundError):
        near = " or ".join(nearest(hub_id))
        return f"the hub has no model {hub_id} that this account may read: check the name, or take {near}"
    if isinstance(error, OfflineModeIsEnabled):
        return f"{hub_id} is not on this machine and HF_HUB_OFFLINE forbids fetching it: unset it{otherwise}"
    likely = get_close_matches(hub_id, [alias.hub_id for alias in ALIASES.values()], n=1, cutoff=0.85)
    advice = "check the network" + otherwise
    if likely and likely[0] != hub_id:
        advice += f", or did you mean {likely[0]}?"
    return f"{hub_id} is not on this machine and the hub cannot be used ({first_line(error)}): {advice}"
