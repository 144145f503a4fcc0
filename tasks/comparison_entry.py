"""A method as it enters a comparison: built of its pieces, with what is known of it before it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..core.errors import SwiftoptError
from ..core.types import Prompt
from ..decoding.methods import Method, build, method_info
from ..decoding.session import Session
from ..decoding.verify import TargetWalk
from ..models.runtime import Runtime
from .comparison_memory import buffer_bytes, held_bytes
from .comparison_pieces import PieceMaker
from .recipes import Pieces
from .report import About
from .requests import PEERS
from .runs import Contender, Decoded, decoding_with

EARLY = ("adadecode", "paradecode")  # methods whose draft is a token predicted at an intermediate layer
LOOKUP_TOKENS = 10  # prompt_lookup_num_tokens of hf-lookup, the value of transformers' documentation


# transformers' own greedy generate: (session, prompt's token ids, max_new_tokens, **options) -> the completion's
Generate = Callable[..., tuple[int, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One method of the comparison, or a peer where `method` is None; `error` says why it cannot run at all."""

    name: str
    method: Method | None = None
    pieces: Pieces | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None


def enter(name: str, maker: PieceMaker, told: Mapping[str, Any]) -> Entry:
    """A method with its pieces; `told` are settings beyond its defaults, or beyond those stored with a layer set."""
    if name in PEERS:
        return Entry(name)
    try:
        pieces = maker.of(name, told)
        settings = method_info(name).settings_from({**pieces.settings, **told})
        return Entry(name, build(name, pieces.parts, settings), pieces, settings.to_json())
    except SwiftoptError as error:
        return Entry(name, error=str(error))


def contender(entry: Entry, session: Session, draft: Runtime | None, generate: Generate | None) -> Contender:
    """The entry at work; `generate` runs the peers."""
    if entry.method is not None:
        return Contender(entry.name, decoding_with(session, entry.method))
    assert generate is not None
    options: dict[str, Any] = {"prompt_lookup_num_tokens": LOOKUP_TOKENS} if entry.name == "hf-lookup" else {}
    if entry.name == "hf-assisted" and draft is not None:
        options = {"assistant_model": draft.hf_model}
    return Contender(entry.name, _peer(session, generate, options))


def _peer(session: Session, generate: Generate, options: Mapping[str, Any]) -> Callable[[Prompt], Decoded]:
    def run(prompt: Prompt) -> Decoded:
        room = session.room(prompt)
        return generate(session, session.encode(prompt), room, **options), None

    return run


def about(entry: Entry, session: Session, draft: Runtime | None, n_positions: int) -> About:
    """What is known of the entry; memory that a method takes only at work counts once it has run.

    Args: n_positions: of the longest prompt and completion together.
    """
    if entry.name in PEERS:
        size = draft.info.n_parameters if entry.name == "hf-assisted" and draft is not None else 0
        return About(entry.name, PEERS[entry.name], extra_parameters=size, extra_bytes=None)
    info = method_info(entry.name)
    known = About(entry.name, info.title, info.lossy, predicts_early=entry.name in EARLY, settings=entry.settings)
    if entry.method is None or entry.pieces is None:
        return replace(known, extra_parameters=None, extra_bytes=None)
    parts, runtime = entry.pieces.parts, session.runtime
    trained = [part.n_parameters for part in (parts.heads, parts.probe) if part is not None]
    drafting = parts.draft_runtime
    extra = buffer_bytes(entry.method, runtime, drafting, n_positions, session.max_new_tokens)
    return replace(
        known,
        keeps_tokens=session.sampling.greedy or isinstance(entry.method.verifier, TargetWalk),
        extra_parameters=sum(trained) + (0 if drafting is None else drafting.info.n_parameters),
        extra_bytes=held_bytes(entry.method, runtime) + extra,
    )
