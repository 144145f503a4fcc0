"""The pieces of each method of a comparison: those stored for the task, or else made briefly, each once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.errors import LayerSetNotFound, LearnedNotFound
from ..core.learned import LearnedRecord
from ..core.types import LayerSetRecord
from ..decoding.methods import Resources, method_info
from ..models.early_exit import Heads, Probe
from .maker import Workshop
from .recipes import Pieces, StoredPieces


class PieceMaker:
    """Looks in `stored` and makes what is missing in the `workshop`, for the workshop's task."""

    def __init__(self, stored: StoredPieces, workshop: Workshop) -> None:
        self.stored, self.workshop = stored, workshop
        self._sets: dict[str, LayerSetRecord] = {}
        self._heads: tuple[Heads, LearnedRecord] | None = None
        self._probe: tuple[Probe, LearnedRecord] | None = None

    def of(self, name: str, settings: Mapping[str, Any] = {}) -> Pieces:
        """The pieces of a method that is told `settings`.

        Raises: SwiftoptError: one is missing and cannot be made.
        """
        info, task, draft = method_info(name), self.workshop.task, self.stored.draft_runtime
        if "heads" in info.needs:
            heads, record = self.heads()
            return Pieces(Resources(self.stored.runtime, heads=heads), learned=record)
        if "probe" in info.needs:
            probe, record = self.probe()
            return Pieces(Resources(self.stored.runtime, probe=probe), learned=record)
        if "costs" in info.needs:
            return self.stored.of(name, task, settings=settings)
        skips = "layer_set" in info.needs or (info.drafts_with_model and draft is None)
        return self.stored.of(name, task, self.layer_set(name) if skips else None)

    def layer_set(self, name: str) -> LayerSetRecord:
        """Self-SD's own set, SWIFT's for all others."""
        kind = "self-sd" if name == "self-sd" else "swift"
        if kind not in self._sets:
            try:
                self._sets[kind] = self.stored.layer_set(kind, self.workshop.task)
            except LayerSetNotFound:
                make = self.workshop.self_sd_set if kind == "self-sd" else self.workshop.swift_set
                self._sets[kind] = make()
        return self._sets[kind]

    def heads(self) -> tuple[Heads, LearnedRecord]:
        """Heads of the task."""
        if self._heads is None:
            try:
                self._heads = self.stored.heads(self.stored.learned("heads", self.workshop.task))
            except LearnedNotFound:
                self._heads = self.workshop.heads()
        return self._heads

    def probe(self) -> tuple[Probe, LearnedRecord]:
        """A probe of the task."""
        if self._probe is None:
            try:
                self._probe = self.stored.probe(self.stored.learned("probe", self.workshop.task))
            except LearnedNotFound:
                self._probe = self.workshop.probe()
        return self._probe
