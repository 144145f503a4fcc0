"""Which weights a draft should have: each format's measured cost against how well it agrees with the model."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Protocol

from ..core.costs import CostProfile
from ..core.events import FormatTried
from ..core.formats import AUTO, STORED
from ..core.settings import SwiftSettings
from ..core.types import LayerSet, Prompt
from ..decoding.draft_models import SkippedTarget
from ..decoding.engine import alone, side_by_side
from ..decoding.loop import Began, Round
from ..decoding.methods.adaptive import adaptive
from ..decoding.session import Session
from .drafting import ADAPTIVE
from .evaluation import WindowScore, adaptive_speedup, score_window

CANDIDATES = ("int4", "int8")  # the cheaper one first
ENOUGH = 2.0  # what int8 can hardly come to, however well it agrees: it reads half of the weights
WORTH_IT = 1.05  # below this expected speedup copies are not worth their memory
N_PROMPTS, N_WINDOWS = 2, 2  # texts that are looked at, and windows of each


class MeasureFormats(Protocol):
    """Gives the cost profile of the model here with what the named formats cost, whose copies are then made."""

    def __call__(self, *formats: str) -> CostProfile: ...


def choose_format(
    session: Session,
    prompts: Sequence[Prompt],
    window: int,
    costs: CostProfile,
    measured: Callable[[str], CostProfile],
) -> Generator[FormatTried, None, tuple[str, CostProfile]]:
    """The format in which drafts of all sub-layers promise most tokens per measured time, and the costs with it.

    "stored" where none promises anything. Copies that are not chosen are dropped.

    Args: window: tokens of a window. measured: the costs with those of a format, its copies made.
    """
    runtime = session.runtime
    best, most = STORED, WORTH_IT
    for name in CANDIDATES:
        draft = LayerSet(runtime.n_layers).filled(name)
        try:
            known = measured(name)
            score = _scored(session, prompts[:N_PROMPTS], window, draft, known)
        except (RuntimeError, MemoryError) as error:  # a device without such a kernel, or without room
            yield FormatTried(name, None, None, (str(error) or type(error).__name__).splitlines()[0])
            runtime.drop_copies(name)
            continue
        worth = adaptive_speedup(score, draft, known)
        yield FormatTried(name, worth, score.matchness)
        worse = name
        if worth > most:
            best, most, costs, worse = name, worth, known, best
        runtime.drop_copies(worse)
        if most >= ENOUGH:
            break
    return best, costs


def prepared(
    session: Session,
    prompts: Sequence[Prompt],
    settings: SwiftSettings,
    measured: MeasureFormats,
) -> Generator[FormatTried, None, tuple[SwiftSettings, CostProfile]]:
    """The settings with the format that drafts get, chosen here where they leave it open, and what passes cost with it.

    Its copies are made.
    """
    name = settings.draft_format
    if name == AUTO:
        name, costs = yield from choose_format(session, prompts, settings.context_window, measured(), measured)
    else:
        costs = measured(name)
    session.runtime.copies.prepare(LayerSet(session.runtime.n_layers).filled(name))
    return replace(settings, draft_format=name), costs


def _scored(
    session: Session, prompts: Sequence[Prompt], window: int, draft: LayerSet, costs: CostProfile
) -> WindowScore:
    """What the draft predicts over windows of the model's own completions, which it drafts itself; as one window."""
    scores: list[WindowScore] = []
    for prompt in prompts:
        # A look comes after a round, which may have gone beyond the window's end by a whole draft.
        enough = N_WINDOWS * (window + ADAPTIVE.max_draft_length) + 1
        short = replace(prompt, turns=prompt.turns[:1], max_new_tokens=min(session.room(prompt), enough))
        method = adaptive(SkippedTarget(draft), costs, ADAPTIVE)
        looked, own = 0, list[WindowScore]()
        with closing(side_by_side([session.request(short, method, scratch_rows=window)])) as run:
            for event in run:
                if isinstance(event, Began | Round) and event.context.finish is None:
                    if len(event.context.generated) - looked >= window:
                        looked = len(event.context.generated)
                        own += alone(score_window(event.context, [draft], window))
                    if len(own) == N_WINDOWS:
                        break
        scores += own
    ranks = [rank for score in scores for rank in score.ranks]
    confidences = [confidence for score in scores for confidence in score.confidences]
    if not ranks:  # answers shorter than a window say nothing against the draft
        return WindowScore((0,), (1.0,))
    return WindowScore(tuple(ranks), tuple(confidences))
