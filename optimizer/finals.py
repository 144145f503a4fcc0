"""Who may replace the set in use: challengers that win against it on the same windows, several times."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..core.completions import layer_set_from_json, layer_set_to_json
from ..core.types import LayerSet

FINALISTS = 4  # challengers that are kept
FINAL_WINDOWS = 2  # windows, besides the one that brought it here, over which a challenger must win


@dataclass(frozen=True, slots=True)
class Place:
    """Where a window lies: its prompt, and its first token's position in the text."""

    prompt_id: str
    position: int

    def to_json(self) -> list[Any]:
        """Its two values; `Place(*values)` is the inverse."""
        return [self.prompt_id, self.position]

    def is_new_after(self, earlier: Place, window: int) -> bool:
        """Whether at least half of the window's tokens are others than those of the earlier one."""
        if self.prompt_id != earlier.prompt_id or self.position < earlier.position:
            return True
        return 2 * (self.position - earlier.position) >= window


@dataclass(frozen=True, slots=True)
class Finalist:
    """A challenger: the rating that brought it here, where it was scored last, and its leads over the set in use."""

    layer_set: LayerSet
    entry: float
    place: Place
    leads: tuple[float, ...] = ()

    @property
    def lead(self) -> float:
        """Its mean lead over the windows on which both were scored."""
        return sum(self.leads) / max(1, len(self.leads))


@dataclass(slots=True)
class Finals:
    """Successive halving over windows: of those scored beside the set in use, the better half goes on.

    A window brings one final at most, and its text must be new to who is scored; so a lucky window wins nothing.
    """

    finalists: list[Finalist] = field(default_factory=list)
    latest: Place | None = None  # of the latest final

    def enter(self, challengers: Mapping[LayerSet, float], place: Place, bar: float) -> None:
        """Keep those of a window that are rated above `bar`, the best of all where there are too many."""
        known = {finalist.layer_set for finalist in self.finalists}
        for layer_set, rating in challengers.items():
            if rating > bar and layer_set not in known:
                self.finalists.append(Finalist(layer_set, rating, place))
        self.finalists.sort(key=lambda own: (len(own.leads), own.lead, own.entry), reverse=True)
        del self.finalists[FINALISTS:]

    def due(self, place: Place, window: int) -> list[LayerSet]:
        """Who is to be scored beside the set in use, on the window there."""
        if self.latest is not None and not place.is_new_after(self.latest, window):
            return []
        return [own.layer_set for own in self.finalists if place.is_new_after(own.place, window)]

    def settle(
        self, place: Place, leads: Mapping[LayerSet, float], doubted: Collection[LayerSet] = ()
    ) -> Finalist | None:
        """Take in the leads of those who were due; the winner, if there is one by now.

        Who is `doubted`, for all that was seen elsewhere speaks against it, leaves: it led by luck.
        """
        judged = [
            replace(own, place=place, leads=(*own.leads, leads[own.layer_set]))
            for own in self.finalists
            if own.layer_set in leads
        ]
        waiting = [own for own in self.finalists if own.layer_set not in leads]
        ahead = (own for own in judged if own.lead > 0 and own.layer_set not in doubted)
        better = sorted(ahead, key=lambda own: own.lead, reverse=True)
        better = better[: (len(judged) + 1) // 2]
        self.latest = place
        won = next((own for own in better if len(own.leads) >= FINAL_WINDOWS), None)
        self.finalists = [*(better if won is None else []), *waiting]
        return won

    def to_json(self) -> dict[str, Any]:
        """Plain values, for a snapshot."""
        return {
            "finalists": [
                {
                    "layer_set": layer_set_to_json(own.layer_set),
                    "entry": own.entry,
                    "place": own.place.to_json(),
                    "leads": list(own.leads),
                }
                for own in self.finalists
            ],
            "latest": None if self.latest is None else self.latest.to_json(),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Finals:
        """Inverse of `to_json`."""
        finalists = [
            Finalist(layer_set_from_json(own["layer_set"]), own["entry"], Place(*own["place"]), tuple(own["leads"]))
            for own in values["finalists"]
        ]
        latest = values["latest"]
        return cls(finalists, None if latest is None else Place(*latest))
