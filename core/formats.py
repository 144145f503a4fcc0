"""Weight formats that parts of a draft can have beside the model's own; activations stay as they are."""

from __future__ import annotations

import re
from typing import Final

from .errors import LayerSetError

FORMATS = ("int8", "int4", "int4-64", "int4-32")
GROUP = 128  # weights that share a scale in "int4"; "int4-64" and "int4-32" name their own
AUTO = "auto"  # in settings: the one that measured time and agreement with the model speak for
STORED: Final = "stored"  # the model's own weights, where a wider entry of `LayerSet.formats` says otherwise

_PART = re.compile(r"(attn|mlp)(:\d+)?|head")


def group_size(name: str, width: int) -> int | None:
    """Weights of a row of `width` that share a scale; None where the whole row does (int8).

    A width that the format's group does not divide takes the next smaller group that does; one that 32 does not divide
    is int8.
    """
    if name == "int8":
        return None
    wanted = int(name.partition("-")[2] or GROUP)
    return next((group for group in (128, 64, 32) if group <= wanted and width % group == 0), None)


def check_formats(formats: tuple[tuple[str, str], ...], n_layers: int) -> None:
    """Raises: LayerSetError: a part or a format is not known."""
    for part, name in formats:
        if not _PART.fullmatch(part) or int(part.partition(":")[2] or 0) >= n_layers:
            raise LayerSetError(
                f"there is no {part!r} to quantise in {n_layers} layers: use attn, mlp, attn:3, mlp:3 or head"
            )
        if name not in (*FORMATS, STORED):
            raise LayerSetError(f"{part} cannot be {name!r}: known formats are {', '.join(FORMATS)} and {STORED}")
