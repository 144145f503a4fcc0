"""Chooses what another engine drafts with for a plan: the layer set, the format of its weights, and the draft length.

In swiftopt a layer set drafts with the target's KV cache. Another engine loads the set as a checkpoint, a separate
model with its own KV cache. Its prediction after a committed text does not depend on how rounds divide that text, so
one pass over the target's completion gives the acceptance at every draft length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from ..core.costs import CostProfile, context_bucket
from ..core.errors import InvalidInput, LayerSetError, UnsupportedModel
from ..core.layer_sets import KINDS, LayerSet
from ..core.records import FoundPlan, LayerSetRecord
from ..core.settings import FORMATS, SwiftSettings
from ..core.types import Prompt, Sampling, Trial
from ..decoding.methods import PLAIN
from ..decoding.session import Session
from ..models.config_layout import is_parallel
from ..models.copies import STORED_BITS
from ..models.fingerprint import earlier_fingerprints, fingerprint
from ..models.loading import load
from ..models.quantised import BITS
from ..models.restacked import (
    check_restackable,
    distance,
    nearest,
    pairs_of,
    takes_fewer_bits,
    takes_no_ops,
)
from ..models.rows import Rows
from ..models.runtime import Runtime
from ..models.saved import OnStep, no_step, supported_config
from ..store import Store
from ..tasks.recipes import TYPICAL_POSITIONS

Kind = Literal["draft", "text"]  # Source of an engine's drafts: a checkpoint, or n-grams of earlier text.
# Format of a draft's weights: "stored" is the model's own; the others also allow fewer bits.
Writes = Literal["stored", "compressed-tensors", "gguf"]

NEW_TOKENS = 128  # Default number of new tokens of a prompt.
CHUNK_ROWS = 256  # Maximum number of tokens of a text in one forward pass.
LENGTHS = range(17)  # Draft lengths to choose from, in tokens per round.
LOADS = (1, 2, 4, 8, 16, 32, 64)  # Numbers of concurrent requests for which a draft length is chosen.
GUESSED_LENGTH = 5  # Draft length in tokens when no acceptance rate is known.
MEASURED_SETS = 5  # Maximum number of candidate sets whose acceptance is measured.
MEASURED = "measured with its own keys and values"
ESTIMATED = "estimated from the plan's, which reads the target's keys and values"
TEXT_METHODS = ("prompt-lookup", "adaptive")  # Methods that draft from earlier text.


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """How an engine drafts: `kind` is the source of its drafts, `n_tokens` their length per round.

    `lengths`: draft length by load, as (fewest requests, most requests, draft tokens). `confidence`: probability below
    which a draft ends; None leaves it out of the settings. `own_text`: swiftopt's `TextProposer` drafts in the engine.
    """

    kind: Kind
    n_tokens: int
    lengths: tuple[tuple[int, int, int], ...] = ()
    confidence: float | None = None
    own_text: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDraft(Speculation):
    """All that an engine's exported files are written from.

    `name` is the target model's name, `target` the path or id from which the engine loads it. `layer_set` is the
    checkpoint's layer set, if there is a checkpoint; it differs from the plan's in `n_changed` sub-layers, and with
    `no_ops` some layers lack attention or MLP. `shared` is the plan's own set if the engine can run swiftopt's drafts.
    """

    found: FoundPlan
    name: str
    target: str
    layer_set: LayerSet | None = None
    n_changed: int = 0
    no_ops: bool = False
    shared: LayerSetRecord | None = None
    acceptance: float | None = None
    acceptance_from: str | None = None


@dataclass(frozen=True, slots=True)
class ExportEngine:
    """An engine to export to: its settings file, what goes into that file, and the commands that run it.

    `writes`: format of the draft's weights; all but "stored" allow fewer bits, so a set that only quantises can be a
    draft, too. `no_ops`: a draft's layers may lack attention or MLP. `shares`: swiftopt can run inside the engine.
    `run_here`: the project's tests or `make engines` load the files. `confidence`: default probability below which
    drafts end; None: drafts always have their full length.
    """

    title: str
    settings_file: str
    settings: Callable[[Speculation], Mapping[str, Any]]
    lines: Callable[[EngineDraft], list[str]]  # Commands that run the engine, in Markdown, the best first.
    writes: Writes = "stored"
    no_ops: bool = False
    shares: bool = False
    run_here: bool = False
    confidence: float | None = None


# --- acceptance of a draft that is a model by itself


@dataclass(frozen=True, slots=True)
class OwnAcceptance:
    """Which completion tokens after the first the draft model predicts correctly, for each text."""

    matches: tuple[tuple[bool, ...], ...]

    def counts(self, length: int) -> tuple[int, int, int]:
        """Return rounds, drafted and accepted tokens with `length` draft tokens per round."""
        rounds = drafted = accepted = 0
        for matches in self.matches:
            at = 0
            while at < len(matches):
                # A round ends with a token of the target, so the last token of the text is never drafted.
                offered = matches[at : min(at + length, len(matches) - 1)]
                right = offered.index(False) if False in offered else len(offered)
                rounds, drafted, accepted = rounds + 1, drafted + len(offered), accepted + right
                at += right + 1
        return rounds, drafted, accepted

    def rate(self, length: int) -> float:
        """Return the acceptance rate: accepted / drafted tokens."""
        _, drafted, accepted = self.counts(length)
        return accepted / drafted if drafted else 0.0

    def tokens_per_round(self, length: int) -> float:
        """Return the mean number of tokens committed per round, the target's own token included."""
        rounds, _, _ = self.counts(length)
        return sum(map(len, self.matches)) / rounds if rounds else 1.0


Acceptance = float | OwnAcceptance  # An estimated rate, or measured matches.


def own_acceptance(
    runtime: Runtime, prompts: Sequence[Prompt], layer_sets: Sequence[LayerSet], on_step: OnStep = no_step
) -> list[OwnAcceptance]:
    """Decode the prompts' first turns plainly and greedily, and let a draft model of each set predict the completions.

    Raises: InvalidInput, ContextOverflow: a prompt cannot be decoded on this model.
    """
    session = Session(runtime, Sampling(), NEW_TOKENS)
    by_set: list[list[tuple[bool, ...]]] = [[] for _ in layer_sets]
    for number, prompt in enumerate(prompts, 1):
        on_step(f"measuring acceptance, prompt {number} of {len(prompts)}")
        first = replace(prompt, turns=prompt.turns[:1])
        (turn,) = session.run(first, PLAIN)
        before = session.encode(first)
        for set_matches, layer_set in zip(by_set, layer_sets, strict=True):
            set_matches.append(_matches(runtime, before, turn.completion.token_ids, layer_set))
    return [OwnAcceptance(tuple(set_matches)) for set_matches in by_set]


def _matches(
    runtime: Runtime, before: Sequence[int], completion: Sequence[int], layer_set: LayerSet
) -> tuple[bool, ...]:
    runtime.copies.prepare(layer_set)
    text = [*before, *completion]
    buffer = runtime.new_buffer(len(text))
    predicted: list[int] = []
    for start in range(0, len(text) - 1, CHUNK_ROWS):
        chunk = text[start : min(start + CHUNK_ROWS, len(text) - 1)]
        rows_read = [row for row in range(len(chunk)) if start + row >= len(before)]
        logits = runtime.forward(Rows(chunk, start, variants=(layer_set,)), buffer, rows_read or [0])
        predicted += logits.argmax(dim=-1).tolist() if rows_read else []
    return tuple(token == token_there for token, token_there in zip(predicted, completion[1:], strict=True))


# --- from a plan to a draft


def planned_draft(found: FoundPlan, name: str, target: str, folder: Path, engine: ExportEngine) -> EngineDraft:
    """Choose what an engine drafts with for a plan; `layer_set` is set only if it can be a checkpoint.

    The draft length for a layer set is a guess, which `with_checkpoint` replaces.

    Args:   target: path or id from which the engine loads the target. folder: the target's weights.
    Raises: as `export`.
    """
    plan, record = found.plan, found.plan.layer_set
    n_layers = int(supported_config(folder).num_hidden_layers)
    layer_set = None if record is None else record.layer_set
    if layer_set is None and plan.method == "adaptive":
        draft_format = str(plan.settings.get("draft_format", "int4"))
        layer_set = LayerSet(n_layers).filled(draft_format if draft_format in FORMATS else "int4")
    takes_bits = engine.shares or engine.writes != "stored"
    text = EngineDraft(found=found, name=name, target=target, kind="text", n_tokens=GUESSED_LENGTH)
    if layer_set is not None and (layer_set.n_skipped or (layer_set.formats and takes_bits)):
        model_id = fingerprint(folder)
        known_ids = (None, model_id, *earlier_fingerprints(folder))
        if layer_set.n_layers != n_layers or (record is not None and record.fingerprint not in known_ids):
            raise LayerSetError(
                f"the layer set was tuned on another model than {name} ({model_id}): export it with the model that it"
                " is of"
            )
        written = layer_set if _has_checkpoint(layer_set, name, folder, engine) else None
        return replace(text, kind="draft", layer_set=written, **_inside(found, name, layer_set, engine))
    if plan.method in TEXT_METHODS:
        return replace(text, n_tokens=int(plan.settings.get("max_draft_length", 10)))
    if layer_set is not None:
        raise InvalidInput(
            f"this plan's draft leaves out no sub-layer, it only has fewer bits, in which swiftopt writes none for"
            f" {engine.title}: export a layer set that skips, or to another engine"
        )
    raise InvalidInput(
        f"this plan decodes with {plan.method}, for which {engine.title} has nothing: export a version with a layer"
        " set or with prompt-lookup (`swiftopt layers list` shows those with a layer set)"
    )


def _inside(found: FoundPlan, name: str, layer_set: LayerSet, engine: ExportEngine) -> dict[str, Any]:
    """Return `confidence`, below which a draft ends, and `shared`, the record for swiftopt inside the engine."""
    plan, record = found.plan, found.plan.layer_set
    settings = SwiftSettings.from_json(record.settings) if record is not None else SwiftSettings(method="adaptive")
    confidence, shared = engine.confidence, None
    if confidence is not None and settings.method == "swift" and settings.early_stop:
        confidence = settings.stop_threshold
    if engine.shares:
        own_way = {"method": plan.method} if plan.method in ("swift", "adaptive") else {}
        described = record or LayerSetRecord(name, "any", layer_set, settings=settings.to_json())
        shared = replace(described, settings={**described.settings, **own_way})
    return {"confidence": confidence, "shared": shared}


def _has_checkpoint(layer_set: LayerSet, name: str, folder: Path, engine: ExportEngine) -> bool:
    """Tell whether the layer set can be written as a draft checkpoint for the engine.

    Raises: UnsupportedModel: it cannot be, and the engine drafts with nothing else.
    """
    if not layer_set.n_skipped and engine.writes == "stored":
        return False
    try:
        check_restackable(supported_config(folder))
        if not layer_set.n_skipped and engine.writes == "compressed-tensors" and not takes_fewer_bits(folder):
            raise UnsupportedModel(
                f"the linear maps of {name} cannot be written in fewer bits for {engine.title}: export a layer set"
                " that skips, or to another engine"
            )
    except UnsupportedModel:
        if engine.shares:
            return False
        raise
    return True


def with_checkpoint(
    draft: EngineDraft,
    folder: Path,
    engine: ExportEngine,
    store: Store | None,
    prompts: Sequence[Prompt],
    on_step: OnStep,
) -> EngineDraft:
    """Choose the checkpoint's layer set, by measured acceptance if there are prompts, and the draft lengths.

    Args: as for `export`; `folder` holds the target's weights.
    """
    record, layer_set, trials = draft.found.plan.layer_set, draft.layer_set, list[Trial]()
    assert layer_set is not None
    if store is not None and record is not None and record.job:
        trials = store.trials(record.job, record.task)
    whole = alternating(layer_set, is_parallel(supported_config(folder)), trials)
    no_ops = engine.no_ops and _needs_no_ops(layer_set, whole, folder)
    candidates = (layer_set, *whole) if no_ops else whole
    runs = [candidate if engine.writes != "stored" else replace(candidate, formats=()) for candidate in candidates]
    costs = None if store is None or record is None else _stored_costs(store, record, folder)
    best = 0
    accepted: Acceptance | None = None
    source: str | None = None
    if prompts:
        runtime = load(str(folder), on_step=on_step)
        measured = own_acceptance(runtime, prompts, runs[:MEASURED_SETS], on_step)
        speeds = [speed_of(run, one, costs) for run, one in zip(runs, measured, strict=False)]
        best = max(range(len(measured)), key=lambda i: max(speeds[i](1, k) for k in LENGTHS))
        accepted, source = measured[best], MEASURED
    elif record is not None:
        accepted = record.matchness if record.acceptance_rate is None else record.acceptance_rate
        source = None if accepted is None else ESTIMATED
    lengths = lengths_by_load(runs[best], accepted, costs)
    n_tokens = max([1, *(k for _, _, k in lengths)])
    return replace(
        draft,
        n_tokens=n_tokens,
        lengths=lengths,
        layer_set=candidates[best],
        no_ops=candidates[best] not in whole,
        n_changed=distance(layer_set, candidates[best]),
        acceptance=accepted.rate(n_tokens) if isinstance(accepted, OwnAcceptance) else accepted,
        acceptance_from=source,
    )


def _stored_costs(store: Store, record: LayerSetRecord, folder: Path) -> CostProfile | None:
    if record.device is None or record.dtype is None:
        return None
    return store.cost_profile(fingerprint(folder), record.device, record.dtype, context_bucket(TYPICAL_POSITIONS))


def alternating(layer_set: LayerSet, parallel: bool, trials: Sequence[Trial]) -> tuple[LayerSet, ...]:
    """Return the set itself if it can be a checkpoint, else the nearest sets that can, the most promising first.

    Sets that the search has tried come first, by mean matchness, the highest first; untried sets follow in the order of
    `nearest`.
    """
    tried: dict[LayerSet, list[float]] = {}
    for trial in trials:
        tried.setdefault(replace(trial.layer_set, formats=()), []).append(trial.matchness)

    def promise(one: LayerSet) -> float:
        return fmean(tried.get(replace(one, formats=()), [-1.0]))

    return tuple(sorted(nearest(layer_set, parallel), key=promise, reverse=True))


def _needs_no_ops(layer_set: LayerSet, whole: Sequence[LayerSet], folder: Path) -> bool:
    """Tell whether the set needs layers that lack attention or MLP, and the model's type can load such layers."""
    if layer_set in whole or not takes_no_ops(folder):
        return False
    try:
        return bool(pairs_of(layer_set, no_ops=True))
    except LayerSetError:
        return False


def speed_of(layer_set: LayerSet, acceptance: Acceptance, costs: CostProfile | None) -> Callable[[int, int], float]:
    """Return a function from concurrent requests and draft length k to the speed relative to plain decoding.

    A round of k draft tokens commits the measured number of tokens, or 1 + a + … + a^k on average for an estimated
    acceptance rate a. It costs k draft passes and one target pass over k + 1 rows per request. Without measured costs,
    a draft pass costs its share of the model's weight bits, and a target pass costs the same at any number of rows.

    Args: layer_set: as the engine runs it, with formats only if the engine's weights have fewer bits.
    """
    known_costs = None if costs is None or costs.missing(layer_set) else costs
    kept = [(kind, i) for i in range(layer_set.n_layers) for kind in KINDS if not layer_set.skips(kind, i)]
    n_bits = sum(BITS.get(layer_set.format_of(*sub) or "", STORED_BITS) for sub in kept)
    share = n_bits / (STORED_BITS * 2 * layer_set.n_layers)

    def speed(n_requests: int, k: int) -> float:
        if isinstance(acceptance, OwnAcceptance):
            tokens = acceptance.tokens_per_round(k)
        else:
            tokens = float(sum(acceptance**i for i in range(k + 1)))
        if known_costs is None:
            return tokens / (k * share + 1)
        drafting = k * known_costs.draft_cost(layer_set, n_requests)
        return tokens * known_costs.verify_cost(n_requests) / (drafting + known_costs.verify_cost(n_requests * (k + 1)))

    return speed


def lengths_by_load(
    layer_set: LayerSet, acceptance: Acceptance | None, costs: CostProfile | None
) -> tuple[tuple[int, int, int], ...]:
    """Return the fastest draft length by load, as (fewest requests, most requests, draft tokens); see `speed_of`.

    Without measured costs, one length is chosen for all loads.
    """
    if acceptance is None:
        return ((1, LOADS[-1], GUESSED_LENGTH),)
    speed = speed_of(layer_set, acceptance, costs)
    by_load = costs is not None and not costs.missing(layer_set)
    lengths = {n: max(LENGTHS, key=lambda k: speed(n, k)) for n in (LOADS if by_load else LOADS[-1:])}
    ranges, lowest = list[tuple[int, int, int]](), 1
    for k, loads in groupby(lengths, key=lengths.__getitem__):
        highest = max(loads)
        ranges.append((lowest, highest, k))
        lowest = highest + 1
    return tuple(ranges)
