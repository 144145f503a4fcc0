"""All decoding methods: the guarantee, needs and settings of each, and how its drafter and verifier are built.

Each file of this package, and of the corresponding packages of wings, contains one family of methods. `@method`
registers a function that builds a method's drafter and verifier; the files are discovered automatically. Commands and
servers check names and settings before torch is loaded, so these files import torch, and modules that do, only for
type checking or inside functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from ...core.errors import SettingsError, look_up
from ...core.serialization import Settings
from ...core.wings import PACKAGE, wings
from ..draft import Draft, Drafter, DraftModel
from ..draft_tree import DraftTree
from ..verify import TargetWalk, Verifier

if TYPE_CHECKING:
    from ...core.costs import CostProfile
    from ...core.layer_sets import LayerSet
    from ...models.runtime import Runtime
    from ..draft_models import SkippedTarget
    from ..work import PassGenerator


@dataclass(frozen=True, slots=True)
class NoSettings(Settings):
    """Settings of a method without settings."""


@dataclass(frozen=True, slots=True, eq=False)
class Resources:
    """The parts from which methods are built; a method takes those that it needs.

    A method that drafts with a model uses `draft_runtime`, or else the target without `layer_set`. `learned` are
    trained weights for methods of wings, by kind.
    """

    runtime: Runtime
    layer_set: LayerSet | None = None
    learned: Mapping[str, Any] = field(default_factory=dict)
    draft_runtime: Runtime | None = None
    costs: CostProfile | None = None

    def draft_model(self) -> DraftModel:
        """Return the smaller model, or the target without the layer set's sub-layers.

        Raises: SettingsError: there is neither. InvalidInput: the model has another tokenizer than the target.
        """
        from ..draft_models import OtherModel

        model = self.skipped() if self.draft_runtime is None else OtherModel(self.draft_runtime)
        model.check(self.runtime)
        return model

    def skipped(self) -> SkippedTarget:
        """Return the target without the layer set's sub-layers.

        Raises: SettingsError: there is no layer set. LayerSetError: it was made for another depth.
        """
        from ..draft_models import SkippedTarget

        if self.layer_set is None:
            raise SettingsError(
                "this method drafts without some sub-layers and needs a layer set: provide one, or tune first"
            )
        self.runtime.check_layer_set(self.layer_set)
        return SkippedTarget(self.layer_set)


@dataclass(frozen=True, slots=True)
class Method:
    """A drafter and the verifier that its drafts need; the decode loop runs it, and results carry its `name`."""

    name: str
    drafter: Drafter
    verifier: Verifier = field(default_factory=TargetWalk)

    @property
    def lossy(self) -> bool:
        """Whether the output may differ in distribution from the target's own."""
        return self.verifier.lossy

    @property
    def layer_set(self) -> LayerSet | None:
        """The sub-layers that its drafts skip, if it drafts by skipping."""
        return self.drafter.layer_set


Builder = Callable[[Resources, Any], tuple[Drafter, Verifier]]


@dataclass(frozen=True, slots=True)
class MethodInfo:
    """A row of the registry: a method's paper, its needs, and whether its output may differ from the target's.

    `needs` are "layer_set", "costs", or a part of a wing. `drafts_with_model`: a smaller model drafts, or if there is
    none, the target without a layer set's sub-layers. `predicts_early`: drafts are predictions at an intermediate
    layer.
    """

    name: str
    title: str
    source: str
    builder: Builder
    settings: type[Settings] = NoSettings
    needs: frozenset[str] = frozenset()
    drafts_with_model: bool = False
    lossy: bool = False
    predicts_early: bool = False

    @property
    def takes_layer_set(self) -> bool:
        """Return whether the method drafts by a layer set if it has no draft model."""
        return self.drafts_with_model or not self.needs.isdisjoint(("layer_set", "costs"))

    def settings_from(self, values: Any) -> Any:
        """Return the method's settings from plain values.

        Raises: SettingsError: one is unknown or out of range.
        """
        return self.settings.from_json(values, f"method {self.name}")


METHODS: dict[str, MethodInfo] = {}


def method(
    name: str, title: str, source: str, settings: type[Settings] = NoSettings, needs: Iterable[str] = (), **flags: bool
) -> Callable[[Builder], Builder]:
    """Register the decorated function as a method's builder; `flags` are those of `MethodInfo`."""

    def register(builder: Builder) -> Builder:
        METHODS[name] = MethodInfo(name, title, source, builder, settings, frozenset(needs), **flags)
        return builder

    return register


class NoDrafter(Drafter):
    """Drafts nothing: the tree is only its root."""

    def draft(self, room: int) -> PassGenerator[Draft]:
        yield from ()
        return Draft(DraftTree.chain(self.context.token_ids[-1:]))


PLAIN = Method("plain", NoDrafter())


@method("plain", "plain decoding", "one token per pass")
def _plain(resources: Resources, settings: Any) -> tuple[Drafter, Verifier]:
    return PLAIN.drafter, PLAIN.verifier


def _order(info: MethodInfo) -> tuple[bool, bool, str]:
    """Sort key: plain decoding first, lossy methods last, otherwise by file name and order in the file."""
    return info.name != "plain", info.lossy, info.builder.__module__


for _package in (__name__, *(f"{PACKAGE}.{wing.methods}" for wing in wings() if wing.methods)):
    for _file in iter_modules(import_module(_package).__path__):
        import_module(f"{_package}.{_file.name}")
METHODS = {info.name: info for info in sorted(METHODS.values(), key=_order)}

from .chains import swift as swift  # noqa: E402 - these modules import the definitions above


def method_info(name: str) -> MethodInfo:
    """Return a method's row.

    Raises: SettingsError: the method is unknown; the message names the nearest.
    """
    return look_up("method", name, METHODS)


def build(name: str, resources: Resources, settings: Any = None) -> Method:
    """Build a method by name.

    Args:   settings: an object of the method's settings class; None: the defaults.
    Raises: SettingsError: there is no such method, or a resource is missing. UnsupportedModel: the model cannot run it.
    """
    info = method_info(name)
    drafter, verifier = info.builder(resources, info.settings() if settings is None else settings)
    return Method(name, drafter, verifier)
