"""What can be refused before torch is loaded, so that a slip of the keyboard costs no waiting."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from ..core.errors import SettingsError
from ..core.requests import GenerateRequest, TuneRequest


def check_model(request: TuneRequest | GenerateRequest) -> None:
    """Raises: SwiftoptError: no such model, dtype or device, or an architecture that is not supported."""
    from ..models.sources import check_names

    check_names(request.model, request.dtype, request.device)


def check_words(what: str, words: Iterable[str], known: Iterable[str]) -> None:
    """Raises: SettingsError: one of the words is not known; it names the nearest."""
    known = tuple(known)
    for word in words:
        if word not in known:
            near = get_close_matches(word, known, n=1)
            nearest = f" (nearest: {near[0]})" if near else ""
            raise SettingsError(f"{what} {word!r} is unknown: use {', '.join(known)}{nearest}")
