"""Request of `swiftopt compare`, checked before any model is loaded; no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core.errors import SettingsError
from ..core.requests import MAX_NEW_TOKENS, Speed
from ..core.types import Sampling
from ..decoding.methods import METHODS, method_info

ALL = "all"
BASE = "plain"
PEERS: Mapping[str, str] = {
    "hf-plain": "transformers, greedy",
    "hf-lookup": "transformers, prompt lookup",
    "hf-assisted": "transformers, draft model",
}
EARLIER_NAMES = {"hf-assistant": "hf-assisted"}  # as the result files of earlier versions have them


@dataclass(frozen=True, slots=True)
class CompareRequest:
    """Compare `methods` on the same prompts; `plain`, which the others are measured against, always runs.

    `methods` are names of METHODS or PEERS; `settings`, by method, replace defaults; `task` names the plan (None: the
    stream's task, or "default" where it holds several). `keep` stores the report, the plan and what had to be made.
    """

    model: str
    methods: tuple[str, ...] = tuple(METHODS)
    task: str | None = None
    draft_model: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    speed: Speed = "auto"
    max_new_tokens: int = MAX_NEW_TOKENS
    sampling: Sampling = field(default_factory=Sampling)
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    keep: bool = True

    def __post_init__(self) -> None:
        peers = [name for name in self.methods if name in PEERS]
        if peers and not self.sampling.greedy:
            raise SettingsError(f"{peers[0]} runs greedily only: leave it out, or drop --temperature")
        if "hf-assisted" in peers and self.draft_model is None:
            raise SettingsError("hf-assisted drafts with a smaller model: name one with --draft-model, or leave it out")


def chosen_methods(words: str, lossless: bool = False) -> tuple[str, ...]:
    """Parse a list of methods such as "swift,spd" or "all"; `plain` comes first, and each once.

    With `lossless`, "all" means those that keep the target's own output.

    Raises: SettingsError: one is unknown (it names the nearest), or lossy where lossless ones were asked for.
    """
    named = list(dict.fromkeys(word.strip() for word in words.split(",") if word.strip()))
    chosen = [BASE]
    for word in named:
        if word == ALL:
            chosen += [name for name, info in METHODS.items() if not (lossless and info.lossy)]
        elif word not in PEERS and method_info(word).lossy and lossless:
            raise SettingsError(f"{word} is lossy, and --lossless was asked for: leave one of the two out")
        else:
            chosen.append(word)
    if not named:
        raise SettingsError(f"no method is named: use {ALL}, or some of {', '.join((*METHODS, *PEERS))}")
    return tuple(dict.fromkeys(chosen))


def parse_settings(assignments: Iterable[str], methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Parse settings such as "mtad.beam_width=8" into values by method and name.

    Raises: SettingsError: a word has another form, its method is not compared, or the method refuses the value.
    """
    found: dict[str, dict[str, Any]] = {}
    for words in assignments:
        where, equals, text = words.partition("=")
        name, dot, key = where.strip().partition(".")
        if not (equals and dot and key):
            raise SettingsError(f"{words!r} sets nothing: use METHOD.KEY=VALUE, such as spd.max_draft_length=8")
        info = method_info(name)
        if name not in methods:
            raise SettingsError(f"{words!r} is for a method that is not compared: add {name} to --methods")
        found.setdefault(name, {})[key.strip().replace("-", "_")] = _value(text.strip())
        info.settings_from(found[name])
    return found


def _value(text: str) -> Any:
    """Parse a number, true, false or null (also "none"); anything else stays text."""
    try:
        return None if text.lower() == "none" else json.loads(text)
    except json.JSONDecodeError:
        return text
