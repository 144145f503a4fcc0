"""Chooses what another engine drafts with for a plan: the layer set, the format of its weights, and the draft length.

In swiftopt a layer set drafts with the target's KV cache. Another engine loads the set as a checkpoint, a separate
model with its own KV cache. What it predicts after a committed text does not depend on the rounds that committed it, so
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
from ..core.records import FoundPlan, LayerSetRecord, Plan
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

Kind = Literal["draft", "text"]  # Source of an engine's drafts: a draft model, or n-grams of earlier text.
# Format of a draft checkpoint's weights: "stored" is the model's own; the others also allow fewer bits.
CheckpointFormat = Literal["stored", "compressed-tensors", "gguf"]

NEW_TOKENS = 128  # Tokens of a completion on which acceptance is measured.
CHUNK_ROWS = 256  # Maximum number of tokens of a text in one forward pass.
LENGTHS = range(17)  # Draft lengths to choose from, in tokens per round.
LOADS = (1, 2, 4, 8, 16, 32, 64)  # Numbers of concurrent requests for which a draft length is chosen.
DEFAULT_LENGTH = 5  # Draft length in tokens if no acceptance rate is known.
MEASURED_SETS = 5  # Maximum number of candidate sets whose acceptance is measured.
MEASURED = "measured with its own keys and values"
ESTIMATED = "estimated from the plan's, which reads the target's keys and values"
TEXT_METHODS = ("prompt-lookup", "adaptive")  # Methods that draft from earlier text.


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """How an engine drafts: the source of its drafts, and their lengths."""

    kind: Kind
    n_tokens: int  # Draft tokens per round.
    # Draft length by load, as (fewest requests, most requests, draft tokens).
    lengths: tuple[tuple[int, int, int], ...] = ()
    confidence: float | None = None  # Probability below which a draft ends; None: not in the settings.
    own_text: bool = False  # True: swiftopt's `TextProposer` drafts inside the engine.


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDraft(Speculation):
    """What an engine's exported files describe."""

    found: FoundPlan
    name: str  # Name of the target model.
    target: str  # Path or id from which the engine loads the target.
    layer_set: LayerSet | None = None  # Layer set of the draft checkpoint, if there is one.
    n_changed: int = 0  # Number of sub-layers in which `layer_set` differs from the plan's set.
    no_ops: bool = False  # True: some layers of the checkpoint lack attention or MLP.
    shared: LayerSetRecord | None = None  # The plan's own set, if swiftopt can draft inside the engine.
    acceptance: float | None = None
    acceptance_from: str | None = None  # MEASURED or ESTIMATED.


@dataclass(frozen=True, slots=True)
class ExportEngine:
    """An engine to export to: its settings file, what goes into that file, and the commands that run it."""

    title: str
    settings_file: str
    settings: Callable[[Speculation], Mapping[str, Any]]
    commands: Callable[[EngineDraft], list[str]]  # Commands that run the engine, in Markdown, the best first.
    # With a format of fewer bits, a layer set that skips nothing and only quantises can be a draft as well.
    checkpoint_format: CheckpointFormat = "stored"
    no_ops: bool = False  # True: a draft's layers may lack attention or MLP.
    shares: bool = False  # True: swiftopt can draft inside the engine, with the target's keys and values.
    is_tested: bool = False  # True: the project's tests or `make engines` load the files.
    confidence: float | None = None  # Default probability below which drafts end; None: all have full length.


# --- acceptance of a draft checkpoint


@dataclass(frozen=True, slots=True)
class MeasuredAcceptance:
    """For each text, whether a draft checkpoint predicts each completion token after the first correctly."""

    matches: tuple[tuple[bool, ...], ...]

    def counts(self, length: int) -> tuple[int, int, int]:
        """Return rounds, drafted and accepted tokens with `length` draft tokens per round."""
        n_rounds = n_drafted = n_accepted = 0
        for matches in self.matches:
            start = 0
            while start < len(matches):
                # A round ends with a token of the target, so the last token of the text is never drafted.
                drafted = matches[start : min(start + length, len(matches) - 1)]
                n_right = drafted.index(False) if False in drafted else len(drafted)
                n_rounds, n_drafted, n_accepted = n_rounds + 1, n_drafted + len(drafted), n_accepted + n_right
                start += n_right + 1
        return n_rounds, n_drafted, n_accepted

    def rate(self, length: int) -> float:
        """Return the acceptance rate: accepted / drafted tokens."""
        _, n_drafted, n_accepted = self.counts(length)
        return n_accepted / n_drafted if n_drafted else 0.0

    def tokens_per_round(self, length: int) -> float:
        """Return the mean number of tokens committed per round, the target's own token included."""
        n_rounds, _, _ = self.counts(length)
        return sum(map(len, self.matches)) / n_rounds if n_rounds else 1.0


Acceptance = float | MeasuredAcceptance  # An estimated rate, or measured matches.


def measured_acceptance(
    runtime: Runtime, prompts: Sequence[Prompt], layer_sets: Sequence[LayerSet], on_step: OnStep = no_step
) -> list[MeasuredAcceptance]:
    """Measure how well the draft checkpoint of each set predicts plain greedy completions of the prompts' first turns.

    Raises: InvalidInput, ContextOverflow: a prompt cannot be decoded on this model.
    """
    session = Session(runtime, Sampling(), NEW_TOKENS)
    by_set: list[list[tuple[bool, ...]]] = [[] for _ in layer_sets]
    for number, prompt in enumerate(prompts, 1):
        on_step(f"measuring acceptance, prompt {number} of {len(prompts)}")
        first_turn = replace(prompt, turns=prompt.turns[:1])
        (turn,) = session.run(first_turn, PLAIN)
        prompt_ids = session.encode(first_turn)
        for set_matches, layer_set in zip(by_set, layer_sets, strict=True):
            set_matches.append(_matches(runtime, prompt_ids, turn.completion.token_ids, layer_set))
    return [MeasuredAcceptance(tuple(set_matches)) for set_matches in by_set]


def _matches(
    runtime: Runtime, prompt_ids: Sequence[int], completion_ids: Sequence[int], layer_set: LayerSet
) -> tuple[bool, ...]:
    """Return for each completion token after the first whether the layer set predicts it, with its own KV cache."""
    runtime.copies.prepare(layer_set)
    text = [*prompt_ids, *completion_ids]
    buffer = runtime.new_buffer(len(text))
    predicted: list[int] = []
    for start in range(0, len(text) - 1, CHUNK_ROWS):
        chunk = text[start : min(start + CHUNK_ROWS, len(text) - 1)]
        read_rows = [row for row in range(len(chunk)) if start + row >= len(prompt_ids)]
        logits = runtime.forward(Rows(chunk, start, variants=(layer_set,)), buffer, read_rows or [0])
        predicted += logits.argmax(dim=-1).tolist() if read_rows else []
    return tuple(guess == token_id for guess, token_id in zip(predicted, completion_ids[1:], strict=True))


# --- from a plan to a draft


def planned_draft(found: FoundPlan, name: str, target: str, folder: Path, engine: ExportEngine) -> EngineDraft:
    """Return what an engine drafts with for a plan; its `layer_set` is None if the set cannot be a checkpoint.

    For a layer set, the draft length is the default one, which `with_checkpoint` replaces.

    Args:   target: path or id from which the engine loads the target. folder: the target's weights.
    Raises: as `export`.
    """
    plan, record = found.plan, found.plan.layer_set
    n_layers = int(supported_config(folder).num_hidden_layers)
    layer_set = None if record is None else record.layer_set
    if layer_set is None and plan.method == "adaptive":
        draft_format = str(plan.settings.get("draft_format", "int4"))
        layer_set = LayerSet(n_layers).filled(draft_format if draft_format in FORMATS else "int4")
    allows_bits = engine.shares or engine.checkpoint_format != "stored"
    text_draft = EngineDraft(found=found, name=name, target=target, kind="text", n_tokens=DEFAULT_LENGTH)
    if layer_set is not None and (layer_set.n_skipped or (layer_set.formats and allows_bits)):
        model_id = fingerprint(folder)
        known_ids = (None, model_id, *earlier_fingerprints(folder))
        if layer_set.n_layers != n_layers or (record is not None and record.fingerprint not in known_ids):
            raise LayerSetError(
                f"the layer set was tuned on another model than {name} ({model_id}): export it with its own model"
            )
        checkpoint_set = layer_set if _has_checkpoint(layer_set, name, folder, engine) else None
        return replace(
            text_draft,
            kind="draft",
            layer_set=checkpoint_set,
            confidence=_confidence(plan, engine),
            shared=_shared_record(plan, name, layer_set) if engine.shares else None,
        )
    if plan.method in TEXT_METHODS:
        return replace(text_draft, n_tokens=int(plan.settings.get("max_draft_length", 10)))
    if layer_set is not None:
        raise InvalidInput(
            "this plan's draft skips no sub-layer, it only has fewer bits, and swiftopt writes no such draft for"
            f" {engine.title}: export a layer set that skips, or to another engine"
        )
    raise InvalidInput(
        f"this plan decodes with {plan.method}, which {engine.title} cannot do: export a version with a layer set or"
        " with prompt-lookup (`swiftopt layers list` shows those with a layer set)"
    )


def _swift_settings(plan: Plan) -> SwiftSettings:
    record = plan.layer_set
    return SwiftSettings(method="adaptive") if record is None else SwiftSettings.from_json(record.settings)


def _confidence(plan: Plan, engine: ExportEngine) -> float | None:
    """Return the probability below which the engine's drafts end: the plan's stop threshold, or the engine's default.

    None if the engine's drafts always have their full length.
    """
    settings = _swift_settings(plan)
    if engine.confidence is not None and settings.method == "swift" and settings.early_stop:
        return settings.stop_threshold
    return engine.confidence


def _shared_record(plan: Plan, name: str, layer_set: LayerSet) -> LayerSetRecord:
    """Return the record with which swiftopt drafts inside the engine; its settings name the plan's method."""
    method = {"method": plan.method} if plan.method in ("swift", "adaptive") else {}
    record = plan.layer_set or LayerSetRecord(name, "any", layer_set, settings=_swift_settings(plan).to_json())
    return replace(record, settings={**record.settings, **method})


def _has_checkpoint(layer_set: LayerSet, name: str, folder: Path, engine: ExportEngine) -> bool:
    """Tell whether the layer set can be written as a draft checkpoint for the engine.

    Raises: UnsupportedModel: it cannot, and the engine cannot draft with the set in another way.
    """
    if not layer_set.n_skipped and engine.checkpoint_format == "stored":
        return False
    needs_quantising = not layer_set.n_skipped and engine.checkpoint_format == "compressed-tensors"
    try:
        check_restackable(supported_config(folder))
        if needs_quantising and not takes_fewer_bits(folder):
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
    """Return the draft with the checkpoint's layer set and the draft lengths chosen.

    With prompts, the acceptance of the nearest sets is measured and the fastest one is chosen.

    Args: as for `export`; `folder` holds the target's weights.
    """
    record, layer_set, trials = draft.found.plan.layer_set, draft.layer_set, list[Trial]()
    assert layer_set is not None
    if store is not None and record is not None and record.job:
        trials = store.trials(record.job, record.task)
    alternating = alternating_sets(layer_set, is_parallel(supported_config(folder)), trials)
    no_ops = engine.no_ops and _needs_no_ops(layer_set, alternating, folder)
    candidates = (layer_set, *alternating) if no_ops else alternating
    # The candidates as the engine runs them.
    keeps_formats = engine.checkpoint_format != "stored"
    run_sets = [candidate if keeps_formats else replace(candidate, formats=()) for candidate in candidates]
    costs = None if store is None or record is None else _stored_costs(store, record, folder)
    best = 0
    acceptance: Acceptance | None = None
    source: str | None = None
    if prompts:
        runtime = load(str(folder), on_step=on_step)
        measured = measured_acceptance(runtime, prompts, run_sets[:MEASURED_SETS], on_step)
        speeds = [speed_of(run_set, one, costs) for run_set, one in zip(run_sets, measured, strict=False)]
        best = max(range(len(measured)), key=lambda i: max(speeds[i](1, k) for k in LENGTHS))
        acceptance, source = measured[best], MEASURED
    elif record is not None:
        acceptance = record.matchness if record.acceptance_rate is None else record.acceptance_rate
        source = None if acceptance is None else ESTIMATED
    lengths = lengths_by_load(run_sets[best], acceptance, costs)
    n_tokens = max([1, *(k for _, _, k in lengths)])
    return replace(
        draft,
        n_tokens=n_tokens,
        lengths=lengths,
        layer_set=candidates[best],
        no_ops=candidates[best] not in alternating,
        n_changed=distance(layer_set, candidates[best]),
        acceptance=acceptance.rate(n_tokens) if isinstance(acceptance, MeasuredAcceptance) else acceptance,
        acceptance_from=source,
    )


def _stored_costs(store: Store, record: LayerSetRecord, folder: Path) -> CostProfile | None:
    if record.device is None or record.dtype is None:
        return None
    return store.cost_profile(fingerprint(folder), record.device, record.dtype, context_bucket(TYPICAL_POSITIONS))


def alternating_sets(layer_set: LayerSet, parallel: bool, trials: Sequence[Trial]) -> tuple[LayerSet, ...]:
    """Return the set itself if its sub-layers alternate attention and MLP, else the nearest sets whose sub-layers do.

    Sets that the search has tried come first, in descending order of mean matchness; the others follow in the order of
    `nearest`.
    """
    matchness: dict[LayerSet, list[float]] = {}  # Of each set's trials.
    for trial in trials:
        matchness.setdefault(replace(trial.layer_set, formats=()), []).append(trial.matchness)

    def mean_matchness(candidate: LayerSet) -> float:
        return fmean(matchness.get(replace(candidate, formats=()), [-1.0]))

    return tuple(sorted(nearest(layer_set, parallel), key=mean_matchness, reverse=True))


def _needs_no_ops(layer_set: LayerSet, alternating: Sequence[LayerSet], folder: Path) -> bool:
    """Tell whether the set needs layers that lack attention or MLP, and the model's type can load such layers."""
    if layer_set in alternating or not takes_no_ops(folder):
        return False
    try:
        return bool(pairs_of(layer_set, no_ops=True))
    except LayerSetError:
        return False


def speed_of(layer_set: LayerSet, acceptance: Acceptance, costs: CostProfile | None) -> Callable[[int, int], float]:
    """Return a function of concurrent requests and draft length k: the speed relative to plain decoding.

    A round of k draft tokens commits the measured number of tokens, or 1 + a + … + a^k on average for an estimated
    acceptance rate a. It costs k draft passes and one target pass over k + 1 rows per request. Without measured costs,
    a draft pass costs its share of the model's weight bits, and a target pass costs the same at any number of rows.

    Args: layer_set: as the engine runs it, with formats only if the engine's weights have fewer bits.
    """
    known_costs = None if costs is None or costs.missing(layer_set) else costs
    sub_layers = [(kind, i) for i in range(layer_set.n_layers) for kind in KINDS if not layer_set.skips(kind, i)]
    n_bits = sum(BITS.get(layer_set.format_of(kind, i) or "", STORED_BITS) for kind, i in sub_layers)
    share = n_bits / (STORED_BITS * 2 * layer_set.n_layers)

    def speed(n_requests: int, k: int) -> float:
        if isinstance(acceptance, MeasuredAcceptance):
            tokens = acceptance.tokens_per_round(k)
        else:
            tokens = float(sum(acceptance**i for i in range(k + 1)))
        if known_costs is None:
            return tokens / (k * share + 1)
        draft_cost = k * known_costs.draft_cost(layer_set, n_requests)
        round_cost = draft_cost + known_costs.verify_cost(n_requests * (k + 1))
        return tokens * known_costs.verify_cost(n_requests) / round_cost

    return speed


def lengths_by_load(
    layer_set: LayerSet, acceptance: Acceptance | None, costs: CostProfile | None
) -> tuple[tuple[int, int, int], ...]:
    """Return the fastest draft length by load, as (fewest requests, most requests, draft tokens); see `speed_of`.

    Without measured costs, one length is chosen for all loads; without an acceptance, the default length.
    """
    if acceptance is None:
        return ((1, LOADS[-1], DEFAULT_LENGTH),)
    speed = speed_of(layer_set, acceptance, costs)
    by_load = costs is not None and not costs.missing(layer_set)
    lengths = {n: max(LENGTHS, key=lambda k: speed(n, k)) for n in (LOADS if by_load else LOADS[-1:])}
    ranges, lowest = list[tuple[int, int, int]](), 1
    for k, loads in groupby(lengths, key=lengths.__getitem__):
        highest = max(loads)
        ranges.append((lowest, highest, k))
        lowest = highest + 1
    return tuple(ranges)
