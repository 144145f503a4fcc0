"""Timing of an engine's passes, to refine cost profiles while decoding."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.costs import ExpertCounts
from ..core.observed_costs import Part, PassTiming
from ..models.rows import Pass
from .load import Load


class PassClock:
    """Records the time of each decoding pass in the engine's load.

    On a CUDA device logits are computed asynchronously. Draft passes are then timed together with the target's
    verification, which waits for them all.
    """

    def __init__(self, load: Load) -> None:
        self._load = load
        self._untimed_parts: list[Part] = []
        self._started: float | None = None

    def add(
        self,
        passes: Sequence[Pass],
        started: float,
        ended: float,
        is_usual: bool,
        experts: ExpertCounts | None = None,
    ) -> None:
        """Record passes that ran together from `started` on; the first of them was read at `ended`.

        Args: is_usual: whether later passes of this kind will take as long; False while passes are being captured.
              experts: counts of the experts that their rows used, if counted.
        """
        part = part_of(passes)
        n_positions = sum(pass_.rows.first_slot for pass_ in passes) / len(passes)
        # Experts of drafts say nothing about the target's own rows.
        if any(pass_.kind == "draft" or pass_.rows.variants for pass_ in passes):
            experts = None
        if part is None or not is_usual:
            self._untimed_parts, self._started = [], None
            if experts is not None and experts.taken:
                self._load.timings.append(PassTiming((), n_positions, 0.0, experts))
            return
        self._untimed_parts.append(part)
        timing_started = started if self._started is None else self._started
        if passes[0].kind == "draft" and passes[0].runtime.blocks[0].device.type == "cuda":
            self._started = timing_started
            return
        self._load.timings.append(PassTiming(tuple(self._untimed_parts), n_positions, ended - timing_started, experts))
        self._untimed_parts, self._started = [], None


def part_of(passes: Sequence[Pass]) -> Part | None:
    """Return the rows and the layer set of passes that ran together; None if cost profiles have no such passes.

    Profiles contain verification passes of the whole target, and drafts with one layer set of it.
    """
    first_pass = passes[0]
    if any((pass_.kind, pass_.rows.variants) != (first_pass.kind, first_pass.rows.variants) for pass_ in passes[1:]):
        return None
    if first_pass.kind == "beside" or any(pass_.layers is not None or _stops_between(pass_) for pass_ in passes):
        return None
    is_draft = first_pass.kind == "draft"
    if len(first_pass.rows.variants) != is_draft:  # A draft by a separate model has no layer set; skip it.
        return None
    n_rows = sum(len(pass_.rows.token_ids) for pass_ in passes)
    return n_rows, first_pass.rows.variants[0] if is_draft else None


def _stops_between(pass_: Pass) -> bool:
    """Return whether a pass captures states before the last layer, which takes time."""
    return pass_.capture is not None and set(pass_.capture) != {pass_.runtime.n_layers}
