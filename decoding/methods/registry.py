"""What a decoding method is: its name, promise, needs and settings, and the drafter and verifier that carry it out.

Each file of this package holds one family of methods. `@method` registers a function that builds a method's drafter and
verifier; the package finds the files by itself. Front doors check names and settings before torch is loaded, so files
of this package import torch, and modules that do, for type checking or inside functions only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self, get_type_hints

from ...core.errors import SettingsError
from ..verify import TargetWalk

if TYPE_CHECKING:
    from ...core.costs import CostProfile
    from ...core.types import LayerSet
    from ...models.early_exit import Heads, Probe
    from ...models.runtime import Runtime
    from ..draft import Drafter, Verifier
    from ..draft_models import DraftModel

Need = Literal["layer_set", "heads", "probe", "costs"]


@dataclass(frozen=True, slots=True)
class MethodSettings:
    """Base of all settings of methods; a method without settings has this one.

    Raises: SettingsError: a value is out of its range.
    """

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            value, choices = getattr(self, each.name), each.metadata.get("choices")
            if choices is not None and value not in choices:
                raise SettingsError(f"{each.name} {value!r} is unknown: use one of {', '.join(choices)}")
            low, high, words = each.metadata.get("range", (None, None, ""))
            if low is not None and value is not None and not low <= value <= high:
                raise SettingsError(f"{each.name} {value} is out of range: use {words}")

    def to_json(self) -> dict[str, Any]:
        """Return plain values, for the store and for `--json`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read what `to_json` gives; a missing key takes its default.

        Raises: SettingsError: a key is unknown, or a value is out of range or of the wrong type.
        """
        hints = get_type_hints(cls)
        known = [each.name for each in dataclasses.fields(cls)]
        for name, value in values.items():
            if name not in known:
                raise SettingsError(f"there is no setting {name!r} here: known are {', '.join(known) or 'none'}")
            if not _fits(value, hints[name]):
                words = {bool: "true or false", str: "a word"}.get(hints[name], "a number")
                raise SettingsError(f"{name} is {value!r}: use {'a whole number' if hints[name] in _WHOLE else words}")
        return cls(**values)


_WHOLE = (int, int | None)


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a plain value is of a setting's type; true and false are no numbers, whole numbers are."""
    if hint is str or isinstance(value, str):
        return hint is str and isinstance(value, str)
    if value is None or hint is bool or isinstance(value, bool):
        return (value is None and hint in (int | None, float | None)) or (hint is bool and isinstance(value, bool))
    return isinstance(value, int if hint in _WHOLE else int | float)


def bounded(default: float | None, low: float, high: float, words: str) -> Any:
    """Declare a setting from `low` to `high`; `words` says so in error messages."""
    return field(default=default, metadata={"range": (low, high, words)})


def share(default: float | None) -> Any:
    """Declare a setting from 0 to 1."""
    return bounded(default, 0.0, 1.0, "a number from 0 to 1")


def count(default: int | None, least: int = 1) -> Any:
    """Declare a setting of at least `least`."""
    return bounded(default, least, float("inf"), f"{least} or more")


def choice(default: str, *choices: str) -> Any:
    """Declare a setting that is one of several words."""
    return field(default=default, metadata={"choices": choices})


@dataclass(frozen=True, slots=True, eq=False)
class Resources:
    """What methods are built of; a method takes what it needs.

    Where a method drafts with a model, that is `draft_runtime`, or else the target without `layer_set`.
    """

    runtime: Runtime
    layer_set: LayerSet | None = None
    heads: Heads | None = None
    probe: Probe | None = None
    draft_runtime: Runtime | None = None
    costs: CostProfile | None = None

    def draft_model(self) -> DraftModel:
        """Return the smaller model, or the target without the layer set's sub-layers.

        Raises: SettingsError: there is neither. InvalidInput: the model's tokenizer is not the target's.
        """
        from ..draft_models import OtherModel, SkippedTarget

        other = self.draft_runtime
        model: DraftModel = SkippedTarget(self.skipped()) if other is None else OtherModel(other)
        model.check(self.runtime)
        return model

    def skipped(self) -> LayerSet:
        """Return the layer set.

        Raises: SettingsError: there is none. LayerSetError: it was made for another depth.
        """
        if self.layer_set is None:
            raise SettingsError("this method drafts without some sub-layers: give a layer set, or tune one first")
        self.runtime.check_layer_set(self.layer_set)
        return self.layer_set


@dataclass(frozen=True, slots=True)
class Method:
    """A drafter and the verifier that its drafts need; the one loop decodes with it, and results carry its `name`."""

    name: str
    drafter: Drafter
    verifier: Verifier = field(default_factory=TargetWalk)

    @property
    def lossy(self) -> bool:
        """Whether the output may differ in distribution from the target's own."""
        return self.verifier.lossy

    @property
    def layer_set(self) -> LayerSet | None:
        """The sub-layers that its drafts leave out, if that is how it drafts."""
        return self.drafter.layer_set


Builder = Callable[[Resources, Any], tuple["Drafter", "Verifier"]]


@dataclass(frozen=True, slots=True)
class MethodInfo:
    """A row of the registry: a method's paper, its needs, and whether its output may differ from the target's.

    `drafts_with_model` says that a smaller model drafts; without one, the target without a layer set's sub-layers does.
    """

    name: str
    title: str
    source: str
    builder: Builder
    settings: type[Any] = MethodSettings  # with `from_json` and `to_json`
    needs: frozenset[Need] = frozenset()
    drafts_with_model: bool = False
    lossy: bool = False

    def settings_from(self, values: Any) -> Any:
        """Return the method's settings from plain values.

        Raises: SettingsError: one is unknown or out of range.
        """
        try:
            return self.settings.from_json(values)
        except SettingsError as error:
            raise SettingsError(f"method {self.name}: {error}") from error


REGISTERED: list[MethodInfo] = []


def method(
    name: str,
    title: str,
    source: str,
    settings: type[Any] = MethodSettings,
    needs: Iterable[Need] = (),
    *,
    drafts_with_model: bool = False,
    lossy: bool = False,
) -> Callable[[Builder], Builder]:
    """Register the decorated function as the builder of a method: (resources, settings) -> (drafter, verifier)."""

    def register(builder: Builder) -> Builder:
        info = MethodInfo(name, title, source, builder, settings, frozenset(needs), drafts_with_model, lossy)
        REGISTERED.append(info)
        return builder

    return register
