"""The settings of a GGUF file's architecture, read one by one: whoever takes none of them is told what was left."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.errors import ModelNotFound, UnsupportedModel, cut_short
from .gguf_form import GgufForm
from .gguf_reader import GgufFile

KV_HEADS, MLP_WIDTH = "attention.head_count_kv", "feed_forward_length"
PATTERN = "attention.sliding_window_pattern"
MOST = 1 << 31  # Larger counts are refused before anything is made of that size.
# Settings without a config field, and their values that do not change what the model computes; None: no value does.
NEUTRAL: dict[str, tuple[Any, ...] | None] = {
    **dict.fromkeys(("tensor_data_layout", "rope.scaling.finetuned")),
    "attention.causal": (True,),
    **dict.fromkeys(("rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor"), (1.0,)),
    **dict.fromkeys(("logit_scale", "embedding_scale", "residual_scale"), (0.0, 1.0)),
}
NOTHING = (0, False, "", "none")
ENCODERS = ("vision.", "audio.", "mm.")  # How the names of settings of parts for images and audio begin.


class OwnSettings:
    """An architecture's settings, by name without its prefix; those that nothing takes are left."""

    def __init__(self, file: GgufFile) -> None:
        self.path, self._given = file.path, file.own_settings()
        self._left = dict.fromkeys(self._given)

    def take(self, name: str, default: Any = None) -> Any:
        """Return a setting; of values by layer the one that all layers share."""
        self._left.pop(name, None)
        given = self._given.get(name, default)
        return given[0] if isinstance(given, list) and given and given == given[:1] * len(given) else given

    def number(self, name: str, default: Any = None) -> Any:
        """Return a setting that is a number; a whole one if `default` is.

        Raises: UnsupportedModel: it differs by layer. ModelNotFound: it is none.
        """
        value = self.take(name, default)
        if isinstance(value, list):
            raise self.refusal(name, value)
        plain = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < MOST
        if value is not None and not plain:
            raise ModelNotFound(f"{self.path} has the setting {name} = {shown(value)}: download it again")
        return value

    def size(self, name: str, default: int | None = None) -> int:
        """Return a setting that is a whole number above 0.

        Raises: as `number`; ModelNotFound: it is missing.
        """
        value = self.number(name, default)
        if not isinstance(value, int) or value == 0:
            raise ModelNotFound(f"{self.path} has the setting {name} = {shown(value)}: download it again")
        return value

    def layers_without(self, name: str, n_layers: int, n_further: int = 0) -> list[bool]:
        """Return which layers have 0 of a setting that lists numbers by layer; the setting then is that of the others.

        Args:   n_further: layers of a file behind the model's own.
        Raises: UnsupportedModel: it is not one number for each layer.
        """
        given = self._given.get(name)
        if not isinstance(given, list):
            return [False] * n_layers
        by_layer = given[:n_layers]
        others = [value for value in by_layer if value]
        if len(given) not in (n_layers, n_layers + n_further) or not others:
            raise self.refusal(name, given)
        self._given[name] = others
        return [not value for value in by_layer]

    def listed(self, name: str) -> Any:
        """Return a setting as the file has it: a list also where all layers share a value."""
        self._left.pop(name, None)
        return self._given.get(name)

    def of_layers(self, name: str, n_layers: int) -> list[int]:
        """Return a setting's whole numbers above 0 by layer; the setting then is that of the first layer.

        Raises: UnsupportedModel: it is neither one for all layers, nor one for each.
        """
        given = self.listed(name)
        numbers: list[Any] = given if isinstance(given, list) else [given] * n_layers
        if len(numbers) != n_layers or not all(type(number) is int and 0 < number < MOST for number in numbers):
            raise self.refusal(name, given)
        self._given[name] = numbers[0]
        return numbers

    def choice(self, name: str, values: Mapping[Any, Any]) -> Any:
        """Return the value of a config's field for a setting.

        Raises: UnsupportedModel: there is none for the setting's value.
        """
        value = self.take(name)
        if isinstance(value, list) or value not in values:
            raise self.refusal(name, value)
        return values[value]

    def refusal(self, name: str, value: Any) -> UnsupportedModel:
        return UnsupportedModel(
            f"{self.path} has the setting {name} = {shown(value)}, for which its architecture has no place here: use"
            " the model's hub id"
        )

    def refuse_left(self, form: GgufForm) -> None:
        """Raises: UnsupportedModel: a setting was not taken, and changes what the model computes."""
        for name in list(self._left):
            if name.startswith(ENCODERS):
                continue
            value = self.take(name)
            neutral = form.ignored.get(name, NEUTRAL.get(name, NOTHING))
            if neutral is not None and value not in neutral:
                raise self.refusal(name, value)


def shown(value: Any) -> str:
    return cut_short(str(value))
