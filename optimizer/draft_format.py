"""Which weights a draft should have: each format's measured cost against how well it agrees with the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from ..core.costs import CostProfile
from ..core.events import FormatTried
from ..core.formats import AUTO, STORED
from ..core.settings import SwiftSettings
from ..core.types import LayerSet, Prompt
from ..decoding.adaptive import adaptive
from ..decoding.context import Context
from ..decoding.loop import Watch
from ..decoding.models import SkippedTarget
from ..decoding.session import Session
from .drafting import ADAPTIVE
from .evaluation import WindowScore, score_window
from .objective import adaptive_speedup

CANDIDATES = ("int4", "int8")  # the cheaper one first
ENOUGH = 2.0  # what int8 can hardly come to, however well it agrees: it reads half of the weights
WORTH_IT = 1.05  # below this expected speedup copies are not worth their memory
N_PROMPTS, N_WINDOWS = 2, 2  # texts that are looked at, and windows of each


class _Enough(Exception):
    """Ends the decoding of a text that was looked at often enough."""


class Measured(Protocol):
    """Gives the cost profile of the model here with what the named formats cost, whose copies are then made."""

    def __call__(self, *formats: str) -> CostProfile: ...


def choose_format(
    session: Session,
    prompts: Sequence[Prompt],
    window: int,
    costs: CostProfile,
    measured: Callable[[str], CostProfile],
    tell: Callable[[FormatTried], None],
) -> tuple[str, CostProfile]:
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
            tell(FormatTried(name, None, None, (str(error) or type(error).__name__).splitlines()[0]))
            runtime.drop_copies(name)
            continue
        worth = adaptive_speedup(score, draft, known)
        tell(FormatTried(name, worth, score.matchness))
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
    measured: Measured,
    tell: Callable[[FormatTried], None],
) -> tuple[SwiftSettings, CostProfile]:
    """The settings with the format that drafts get, chosen here where they leave it open, and what passes cost with it.

    Its copies are made.
    """
    name = settings.draft_format
    if name == AUTO:
        name, costs = choose_format(session, prompts, settings.context_window, measured(), measured, tell)
    else:
        costs = measured(name)
    session.runtime.copies.prepare(LayerSet(session.runtime.n_layers).filled(name))
    return replace(settings, draft_format=name), costs


def _scored(
    session: Session, prompts: Sequence[Prompt], window: int, draft: LayerSet, costs: CostProfile
) -> WindowScore:
    """What the draft predicts over windows of the model's own completions, which it drafts itself; as one window."""
    ranks: list[int] = []
    confidences: list[float] = []
    for prompt in prompts:
        looked = n_looks = 0

        def look(context: Context) -> None:
            nonlocal looked, n_looks
            if len(context.generated) - looked >= window:
                n_looks += 1
                looked = len(context.generated)
                (score,) = score_window(context, [draft], window)
                ranks.extend(score.ranks)
                confidences.extend(score.confidences)
            if n_looks == N_WINDOWS:
                raise _Enough

        # A look comes before a round, when the last one may have gone beyond the window's end by a whole draft.
        enough = N_WINDOWS * (window + ADAPTIVE.max_draft_length) + 1
        short = replace(prompt, turns=prompt.turns[:1], max_new_tokens=min(session.room(prompt), enough))
        method = adaptive(SkippedTarget(draft), costs, ADAPTIVE)
        with suppress(_Enough):
            list(session.run(short, method, Watch(None, look, None, window)))
    if not ranks:  # answers shorter than a window say nothing against the draft
        return WindowScore((0,), (1.0,))
    return WindowScore(tuple(ranks), tuple(confidences))
