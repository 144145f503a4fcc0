"""The settings of a GGUF file's architecture: they are taken one by one, and unused ones are refused at the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.errors import ModelNotFound, UnsupportedModel, cut_short
from .gguf_form import GgufForm
from .gguf_reader import GgufFile

KV_HEADS, MLP_WIDTH = "attention.head_count_kv", "feed_forward_length"
PATTERN = "attention.sliding_window_pattern"
MOST = 1 << 31  # Larger counts are refused before memory of that size is requested.
# Settings without a config field, and the values that do not change what the model computes (None: any value).
NEUTRAL: dict[str, tuple[Any, ...] | None] = {
    **dict.fromkeys(("tensor_data_layout", "rope.scaling.finetuned")),
    "attention.causal": (True,),
    **dict.fromkeys(("rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor"), (1.0,)),
    **dict.fromkeys(("logit_scale", "embedding_scale", "residual_scale"), (0.0, 1.0)),
}
NOTHING = (0, False, "", "none")
ENCODER_SETTINGS = ("vision.", "audio.", "mm.")  # Name prefixes of settings of image and audio encoders.


class OwnSettings:
    """An architecture's settings by name without its prefix; it records which ones have not been taken."""

    def __init__(self, file: GgufFile) -> None:
        self.path, self._given = file.path, file.own_settings()
        self._left = dict.fromkeys(self._given)

    def take(self, name: str, default: Any = None) -> Any:
        """Return a setting; if it has a value for each layer and all are equal, return that value."""
        self._left.pop(name, None)
        value = self._given.get(name, default)
        return value[0] if isinstance(value, list) and value and value == value[:1] * len(value) else value

    def number(self, name: str, default: Any = None) -> Any:
        """Return a setting that is a number; an integer if `default` is one.

        Raises: UnsupportedModel: it differs by layer. ModelNotFound: it is not a number.
        """
        value = self.take(name, default)
        if isinstance(value, list):
            raise self.refusal(name, value)
        plain = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < MOST
        if value is not None and not plain:
            raise ModelNotFound(f"{self.path} has the setting {name} = {shown(value)}: download it again")
        return value

    def size(self, name: str, default: int | None = None) -> int:
        """Return a setting that is a positive integer.

        Raises: as `number`; ModelNotFound: it is missing.
        """
        value = self.number(name, default)
        if not isinstance(value, int) or value == 0:
            raise ModelNotFound(f"{self.path} has the setting {name} = {shown(value)}: download it again")
        return value

    def layers_without(self, name: str, n_layers: int, n_further: int = 0) -> list[bool]:
        """Return which layers have 0 in a setting with a number for each layer; it then becomes the others' number.

        Args:   n_further: number of layers in the file after the model's own.
        Raises: UnsupportedModel: the list has another length, or all its numbers are 0.
        """
        values = self._given.get(name)
        if not isinstance(values, list):
            return [False] * n_layers
        by_layer = values[:n_layers]
        others = [value for value in by_layer if value]
        if len(values) not in (n_layers, n_layers + n_further) or not others:
            raise self.refusal(name, values)
        self._given[name] = others
        return [not value for value in by_layer]

    def listed(self, name: str) -> Any:
        """Return a setting as the file has it, without reducing a list of equal values."""
        self._left.pop(name, None)
        return self._given.get(name)

    def of_layers(self, name: str, n_layers: int) -> list[int]:
        """Return a setting's positive integer for each layer; the setting then becomes the first layer's.

        Raises: UnsupportedModel: it is neither one number for all layers, nor one for each.
        """
        values = self.listed(name)
        numbers: list[Any] = values if isinstance(values, list) else [values] * n_layers
        if len(numbers) != n_layers or not all(type(number) is int and 0 < number < MOST for number in numbers):
            raise self.refusal(name, values)
        self._given[name] = numbers[0]
        return numbers

    def choice(self, name: str, values: Mapping[Any, Any]) -> Any:
        """Translate a setting to the value of a config's field.

        Raises: UnsupportedModel: the setting has another value than those in `values`.
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
        """Raises: UnsupportedModel: a setting was not taken, and may change what the model computes."""
        for name in list(self._left):
            if name.startswith(ENCODER_SETTINGS):
                continue
            value = self.take(name)
            neutral = form.ignored.get(name, NEUTRAL.get(name, NOTHING))
            if neutral is not None and value not in neutral:
                raise self.refusal(name, value)


def shown(value: Any) -> str:
    return cut_short(str(value))
