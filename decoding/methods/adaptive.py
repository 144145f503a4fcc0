"""Drafts from whatever pays at the moment: earlier text, a cheaper model, both, or nothing; decided by measured time.

A round is one of three. *Plain*: only the root. *Text*: what followed the text's end before, as in prompt lookup.
*Model*: a chain of the draft model; where earlier text suggests the next tokens, one pass of the draft model checks
several of them at once, and what text suggests behind the chain's end is added unchecked. Text takes no part where
drafted tokens are read from the device one step late (`DraftModel.draft_ahead`). All estimates are learnt from outcomes
and carried over from request to request.

All times are in plain passes of the target over one row. With λ the tokens per such pass that decoding gets at present,
whatever takes t must bring λ · t tokens, or the time is better spent otherwise; a draft that is decided by this rule,
step by step, makes λ as large as it can be (the fixed point of a ratio of sums, Dinkelbach 1967).

`TargetWalk` gives the target's own tokens whatever the tree is. At temperatures above 0 a draft reads the noise of the
target's draws (`TokenRule`), so that it proposes what the target would draw if the two agreed.
Source: the choice between drafts by online estimates follows CAS-Spec (arXiv:2510.26843), drafts of drafts are its
vertical cascade; stopping where a further step is not worth λ times its cost is our own.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ...core.errors import SettingsError
from ...core.serialization import Settings, adapter, count
from ...core.settings import Format
from ...core.types import LayerSet, TokenSource
from ..draft import Draft, Drafter, DraftModel, Outcome
from ..draft_tree import DraftTree
from ..hit_rates import HitRates
from ..text_matches import Cursor, Guess, Matches
from ..verify import TargetWalk, Verifier
from . import Method, Resources, method

if TYPE_CHECKING:
    from torch import Tensor

    from ...core.costs import CostProfile, CostSource
    from ..corpus import Occurrence
    from ..work import PassGenerator

PROBE_LENGTH = 4  # Maximum draft steps of a round that only probes the draft model.
MAX_GUESSES = 3  # Maximum guessed tokens per draft pass; quantised passes get slower with every row.
CONFIDENCE_LIMITS = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999)  # Limits between the classes of draft confidence.
PRIOR_WEIGHT = 4.0  # Weight of a prior, in observations.
FADING_WEIGHT = 0.1  # Weight of the latest round in running means.
MAX_OBSERVATIONS = 256.0  # Observations above which the counts are halved.


@dataclass(frozen=True, slots=True)
class AdaptiveSettings(Settings):
    """Adaptive drafts: from earlier text and from a cheaper model, as measured time says."""

    # Format of sub-layers for which the layer set names none.
    draft_format: Literal[Format, "stored"] = "int4"
    max_draft_length: int = count(24)
    lookup: bool = True
    second_candidates: bool = True


@method("adaptive", "adaptive drafts", "docs/methods.md", AdaptiveSettings, ["costs"])
def _adaptive(resources: Resources, settings: AdaptiveSettings) -> tuple[Drafter, Verifier]:
    from ..draft_models import SkippedTarget

    costs = resources.costs
    if costs is None:
        raise SettingsError("this method decides by measured costs: give Resources the profile of measure_costs")
    layer_set = (resources.layer_set or LayerSet(resources.runtime.n_layers)).filled(settings.draft_format)
    if missing_formats := costs.missing(layer_set):
        raise SettingsError(
            f"the costs of {', '.join(sorted(missing_formats))} are not in the profile: add them with measure_format"
        )
    model = None if layer_set.is_whole else SkippedTarget(layer_set)
    if model is not None:
        model.check(resources.runtime)
    return AdaptiveDrafter(model, PassCosts(costs, model), settings), TargetWalk()


def adaptive(model: DraftModel, costs: CostSource, settings: AdaptiveSettings) -> Method:
    """Build adaptive drafting with that model, whose layer set may change between rounds."""
    return Method("adaptive", AdaptiveDrafter(model, PassCosts(costs, model), settings))


class PassCosts:
    """Costs in plain passes of the target, from measured profiles; looked up once per layer set and number of rows.

    With `load` sequences side by side, a pass is taken to have as many rows of each of the others: the tokens of one
    are weighed against the time of all, for the others do the same.

    Args: drafts: the draft model, or its layer set; None: there is none.
    """

    def __init__(self, costs: CostSource, drafts: DraftModel | LayerSet | None) -> None:
        self._costs, self._drafts = costs, drafts
        self._lookups: dict[int, _Lookups] = {}  # Cached costs by context bucket.
        self.load = 1
        self._use_profile(costs.at())

    def follow(self, n_positions: int, load: int) -> None:
        """Use the newest costs for a context of `n_positions` tokens and `load` concurrent sequences."""
        self.load = load
        self._use_profile(self._costs.at(n_positions))

    def _use_profile(self, profile: CostProfile) -> None:
        lookups = self._lookups.get(profile.context_bucket)
        if lookups is None or lookups.profile is not profile:
            lookups = _Lookups(profile, cache(profile.draft_cost), cache(profile.verify_cost))
            self._lookups[profile.context_bucket] = lookups
        self._draft_cost, self._verify_cost = lookups.draft_cost, lookups.verify_cost

    def draft(self, n_rows: int) -> float:
        """Return the cost of a draft pass over `n_rows` rows of each sequence; infinite without a draft model."""
        return self._draft_pass_cost(n_rows * self.load)

    def _draft_pass_cost(self, n_rows: int) -> float:
        model_or_layer_set = self._drafts
        layer_set = (
            model_or_layer_set
            if model_or_layer_set is None or isinstance(model_or_layer_set, LayerSet)
            else model_or_layer_set.layer_set
        )
        return float("inf") if layer_set is None else self._draft_cost(layer_set, n_rows)

    @property
    def shared(self) -> float:
        """Share of a draft pass's cost that does not depend on the number of sequences in the pass."""
        if self.load == 1:
            return 1.0
        cost_alone, cost_joined = self._draft_pass_cost(1), self._draft_pass_cost(self.load)
        return max(0.0, 1 - self.load * (cost_joined - cost_alone) / (self.load - 1) / cost_joined)

    def verify(self, n_rows: int) -> float:
        """Return the cost of a target pass over `n_rows` rows of each sequence."""
        return self._verify_cost(n_rows * self.load)


class _Lookups(NamedTuple):
    """A cost profile with its cached lookups."""

    profile: CostProfile
    draft_cost: Callable[[LayerSet, int], float]
    verify_cost: Callable[[int], float]


@dataclass(slots=True)
class Rate:
    """An acceptance share learnt online; old observations fade, so that the share follows changes."""

    prior: float
    hits: float = 0.0
    seen: float = 0.0

    def learn(self, hit: bool) -> None:
        if self.seen >= MAX_OBSERVATIONS:
            self.hits, self.seen = self.hits / 2, self.seen / 2
        self.seen += 1
        self.hits += hit

    @property
    def value(self) -> float:
        """The estimated share; the prior counts as `PRIOR_WEIGHT` observations."""
        return (self.hits + PRIOR_WEIGHT * self.prior) / (self.seen + PRIOR_WEIGHT)


@dataclass(slots=True)
class Acceptance:
    """How often the target accepts a token, by classes of the draft's confidence (a class's middle is the prior)."""

    classes: list[Rate] = field(
        default_factory=lambda: [Rate((a + b) / 2) for a, b in pairwise((0.0, *CONFIDENCE_LIMITS, 1.0))]
    )
    overall: Rate = field(default_factory=lambda: Rate(0.8))

    def of(self, confidence: float) -> float:
        """Return the chance that a token of that confidence is accepted, given that those before it were."""
        return self.classes[bisect_right(CONFIDENCE_LIMITS, confidence)].value

    def learn(self, confidence: float, hit: bool) -> None:
        self.classes[bisect_right(CONFIDENCE_LIMITS, confidence)].learn(hit)
        self.overall.learn(hit)


@dataclass(slots=True)
class Throughput:
    """λ: tokens per time of a plain pass, as a decaying mean over rounds."""

    tokens: float = 8.0
    spent: float = 8.0
    memory: float = 0.97  # Factor by which older rounds lose weight with each new round.

    @property
    def rate(self) -> float:
        return self.tokens / self.spent

    def add(self, tokens: int, spent: float) -> None:
        self.tokens = self.memory * self.tokens + tokens
        self.spent = self.memory * self.spent + spent


@dataclass(slots=True)
class Probing:
    """Decides when to draft although it does not seem to pay: rarely, and less often the longer it does not.

    Without it a drafter that was switched off would never notice that the text has changed.
    """

    first: int = 32
    last: int = 512
    idle: float = 0.0
    wait: int = 32

    def due(self, load: int = 1) -> bool:
        """Return whether to draft in this round of one of `load` sequences, in which nothing else is drafted.

        All of them wait while one drafts, and all ask: one asks for a share of a round.
        """
        self.idle += 1 / load
        if self.idle < self.wait:
            return False
        self.idle, self.wait = 0.0, min(2 * self.wait, self.last)
        return True

    def paid(self) -> None:
        self.idle, self.wait = 0.0, self.first


@dataclass(slots=True)
class Joining:
    """Decides whether to draft by a model with concurrent sequences, which wait for the one that drafts.

    A draft pass pays if what it brings to all of them is worth its time; then a sequence should join that gains more
    than it adds to the cost. The others' gain is that of earlier rounds, for sequences decide one before the other.
    """

    # Running mean of the tokens that a sequence gains by joining a draft pass that is run anyway.
    gain: float = 1.0

    def pays(self, gain: float, shared: float, load: int) -> bool:
        """Return whether one of `load` sequences should draft in this round.

        Args: gain: its tokens more than without the draft model, less an equal part of the passes' cost. shared: how
            much of that part does not depend on its joining, in tokens.
        """
        gain_alone, gain_of_others = max(0.0, gain + shared), self.gain
        self.gain = faded(self.gain, gain_alone)
        return gain_alone > 0 and gain_alone + (load - 1) * gain_of_others >= load * shared


def faded(mean: float, latest: float) -> float:
    return mean + FADING_WEIGHT * (latest - mean)


def chain_worth(chances: Sequence[float], step_cost: float, rate: float, costs: PassCosts) -> tuple[int, float]:
    """Return a chain's best length and its value: tokens - λ · time of the round.

    Args: chances: that a token is accepted, given those before it. step_cost: the cost of drafting each.
    """
    chain_chance, tokens = 1.0, 1.0
    best_length_and_worth = (0, 1.0 - rate * costs.verify(1))
    for length, chance in enumerate(chances, 1):
        chain_chance *= chance
        tokens += chain_chance
        worth = tokens - rate * (length * step_cost + costs.verify(length + 1))
        if worth > best_length_and_worth[1]:
            best_length_and_worth = (length, worth)
    return best_length_and_worth


@dataclass(slots=True)
class Learned:
    """Estimates learnt from all requests, by which each round is planned."""

    step_cost: float  # Cost per token of a modelled chain, in plain passes; lookup guesses reduce it.
    throughput: Throughput = field(default_factory=Throughput)
    acceptance: Acceptance = field(default_factory=Acceptance)
    probing: Probing = field(default_factory=Probing)
    joining: Joining = field(default_factory=Joining)
    matched: HitRates = field(default_factory=HitRates)  # Hit rates over all texts; each text also has its own.
    # Acceptance of second candidates after the first was refused.
    second: Rate = field(default_factory=lambda: Rate(0.5))


@dataclass(slots=True)
class _Chain:
    """A chain as it grows: tokens, the confidence of those that the model gave (None: text's), and second candidates.

    `alive` is the chance that the whole chain is accepted; `drafting` is the cost of the draft's passes so far, `spent`
    that with the time of sequences that waited for them. `sources`: see `Draft`. `occurrences` are the places in the
    corpus that nodes' tokens come from.
    """

    token_ids: list[int] = field(default_factory=list)
    confidences: list[float | None] = field(default_factory=list)
    seconds: dict[int, int] = field(default_factory=dict)
    alive: float = 1.0
    drafting: float = 0.0
    spent: float = 0.0
    sources: dict[int, TokenSource] = field(default_factory=dict)
    occurrences: dict[int, Occurrence] = field(default_factory=dict)

    def add(self, token_id: int, chance: float, confidence: float | None = None) -> None:
        self.token_ids.append(token_id)
        self.confidences.append(confidence)
        self.alive *= chance

    def add_guess(self, guess: Guess) -> None:
        self.add(guess.token_id, guess.chance)
        self.sources[len(self.token_ids)] = guess.source
        if guess.occurrence is not None:
            self.occurrences[len(self.token_ids)] = guess.occurrence

    @property
    def n_rows(self) -> int:
        return 1 + len(self.token_ids) + len(self.seconds)

    def tree(self, root: int) -> DraftTree:
        candidates = [
            (token_id, self.seconds[i]) if i in self.seconds else (token_id,)
            for i, token_id in enumerate(self.token_ids)
        ]
        return DraftTree.grow(root, candidates)


class AdaptiveDrafter(Drafter):
    """Chains from `model` and from earlier text; `model` None: from earlier text only."""

    def __init__(self, model: DraftModel | None, costs: PassCosts, settings: AdaptiveSettings) -> None:
        self.model, self.costs, self.settings = model, costs, settings
        self.learned = Learned(step_cost=costs.draft(1))

    def max_rows(self, room: int) -> int:
        return 1 + 2 * min(room, self.settings.max_draft_length) + MAX_GUESSES

    def start(self) -> None:
        context = self.context
        prompt_ids = context.token_ids[: context.n_prompt]
        self.matches = Matches(self.learned.matched, prompt_ids, context.prediction, context.corpus)
        self.matches.read(context.token_ids[: context.n_learnt], known=True)
        self.chain, self.estimated = _Chain(), 0.0

    def state(self) -> dict[str, Any]:
        return {"learned": asdict(self.learned)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.learned = adapter(Learned).validate_python(state["learned"])

    def draft(self, room: int) -> PassGenerator[Draft]:
        """Index the committed tokens (at first the prompt), here so that it counts as drafting time, and draft."""
        self.costs.follow(self.context.root_slot, self.context.load.checked)
        self.matches.read(self.context.token_ids)
        self.context.n_learnt = len(self.context.token_ids)
        max_length = min(room, self.settings.max_draft_length)
        self.chain = chain = _Chain()
        draft = (yield from self._fill_chain(chain, max_length)) if max_length > 0 else None
        if draft is None:
            draft = Draft(chain.tree(self.context.token_ids[-1]), sources=chain.sources)
        self.estimated = chain.spent + self.costs.verify(draft.tree.n_nodes)
        return replace(draft, estimated=self.estimated)

    def observe(self, outcome: Outcome) -> None:
        """Learn from every token that the target judged."""
        learned, chain, path, draft = self.learned, self.chain, outcome.walk.path, outcome.draft
        # Tokens that stayed on the device until the target's were read.
        for step in range(len(chain.token_ids) + 1, draft.n_steps + 1):
            confidence_late = math.exp(draft.logprobs[step])
            chain.add(draft.tree.token_ids[step], learned.acceptance.of(confidence_late), confidence_late)
        n_accepted = sum(node == depth for depth, node in enumerate(path, 1))
        for i, confidence in enumerate(chain.confidences[: n_accepted + 1]):
            if confidence is not None:
                learned.acceptance.learn(confidence, i < n_accepted)
        for depth, occurrence in chain.occurrences.items():
            if depth <= n_accepted + 1:  # The target has not judged the tokens behind a refused one.
                occurrence.judge(depth <= n_accepted)
        if n_accepted < len(chain.token_ids) and n_accepted in chain.seconds:
            learned.second.learn(len(path) > n_accepted)
        learned.throughput.add(len(outcome.walk.token_ids), self.estimated)
        n_modelled = sum(confidence is not None for confidence in chain.confidences)
        if n_modelled:
            learned.step_cost = faded(learned.step_cost, chain.drafting / n_modelled)

    def _fill_chain(self, chain: _Chain, max_length: int) -> PassGenerator[Draft | None]:
        """Choose the kind of round and fill its chain; return its draft if the draft is still on the device."""
        learned, model, load = self.learned, self.model, self.context.load.checked
        rate = learned.throughput.rate
        cursor = self.matches.at_end()
        if model is not None:
            guess_chances = [guess.chance for guess in self._guesses_ahead(cursor, max_length)]
            worth_by_text = chain_worth(guess_chances, 0.0, rate, self.costs)[1]
            max_modelled = min(max_length, model.room)
            expected_chances = [learned.acceptance.overall.value] * max_modelled
            n_steps, worth_by_model = chain_worth(expected_chances, learned.step_cost, rate, self.costs)
            shared_tokens = rate * n_steps * learned.step_cost * self.costs.shared
            if n_steps and learned.joining.pays(worth_by_model - worth_by_text, shared_tokens, load):
                learned.probing.paid()
                draft = yield from self._draft_by_model(model, chain, cursor, max_modelled, rate)
                if draft is not None:
                    return draft
            elif learned.probing.due(load):
                return (yield from self._draft_by_model(model, chain, cursor, min(max_modelled, PROBE_LENGTH), 0.0))
        # Add lookup guesses while one more row pays.
        for guess in self._guesses_ahead(cursor, max_length - len(chain.token_ids)):
            if chain.alive * guess.chance < rate * self._row_cost(chain):
                break
            chain.add_guess(guess)
        return None

    def _guesses_ahead(self, cursor: Cursor, max_guesses: int) -> Iterator[Guess]:
        """Yield up to `max_guesses` tokens predicted from earlier text."""
        return islice(cursor.ahead(), max_guesses if self.settings.lookup else 0)

    def _draft_by_model(
        self, model: DraftModel, chain: _Chain, cursor: Cursor, max_length: int, rate: float
    ) -> PassGenerator[Draft | None]:
        """Add the draft model's tokens while a further pass is worth its time; rate 0: up to `max_length`.

        Return their draft if its last token is on the device still.
        """
        learned = self.learned
        model.restart()
        if model.reads_late and max_length:
            return (yield from self._draft_ahead_by_model(model, chain, max_length, rate))
        last_id, n_run = self.context.token_ids[-1], 0
        waiting_factor = 1.0  # Cost factor for the sequences that wait; `_charge` sets it with every pass.
        while len(chain.token_ids) < max_length:
            expected_chance = chain.alive * learned.acceptance.overall.value
            if n_run and expected_chance < rate * (waiting_factor * learned.step_cost + self._row_cost(chain)):
                break
            guesses = self._guesses(cursor, max_length - len(chain.token_ids) - 1)
            row_ids = [last_id, *guesses]
            logits = yield from model.extend(row_ids, range(n_run - 1, n_run + len(row_ids) - 1))
            waiting_factor = self._charge(chain, len(row_ids))
            n_matched = self._add_pass_tokens(chain, cursor, logits, guesses, rate)
            model.drop(len(guesses) - n_matched)
            last_id, n_run = chain.token_ids[-1], n_run + 1 + n_matched
        return None

    def _draft_ahead_by_model(
        self, model: DraftModel, chain: _Chain, max_length: int, rate: float
    ) -> PassGenerator[Draft]:
        """Draft like `_draft_by_model`, but read each step while the next one runs.

        Earlier text is not used: when a token is read, which a text match needs, the next pass is already running.
        """
        learned, n_run, waiting_factor = self.learned, 0, 1.0

        def should_continue() -> bool:
            nonlocal n_run, waiting_factor
            expected_chance = chain.alive * learned.acceptance.overall.value ** (1 + n_run - len(chain.token_ids))
            if n_run and expected_chance < rate * (waiting_factor * learned.step_cost + self._row_cost(chain)):
                return False
            n_run, waiting_factor = n_run + 1, self._charge(chain, 1)
            return True

        def on_candidates(candidates: tuple[int, ...], confidence: float) -> int:
            chance, position = learned.acceptance.of(confidence), len(chain.token_ids)
            if len(candidates) > 1 and self._pays_second(chain, chance, rate):
                chain.seconds[position] = candidates[1]
            chain.add(candidates[0], chance, confidence)
            return 2 if position in chain.seconds else 1

        return (yield from model.draft_ahead(max_length, 2, on_candidates, should_continue))

    def _charge(self, chain: _Chain, n_rows: int) -> float:
        """Add a draft pass's cost; return the factor for the sequences that waited for it."""
        # Waiting sequences per drafting sequence.
        n_waiting = max(1.0, self.context.load.checked / self.context.load.drafted)
        waiting_factor = 1 + (n_waiting - 1) * self.costs.shared
        chain.drafting += self.costs.draft(n_rows)
        chain.spent += waiting_factor * self.costs.draft(n_rows)
        return waiting_factor

    def _add_pass_tokens(
        self, chain: _Chain, cursor: Cursor, logits: Tensor, guesses: Sequence[int], rate: float
    ) -> int:
        """Add a pass's tokens, row by row while the guesses match the draft model; return the number of matches."""
        learned, rule = self.learned, self.context.rule
        row_confidences = self.context.confidences(logits) if rule.is_argmax else []
        for row_index, row in enumerate(logits):
            if row_confidences:
                scores, (token_id, confidence) = row, row_confidences[row_index]
            else:
                # Penalties depend on the text so far, so the rows are scored one by one.
                scores = self.context.noisy_scores(chain.token_ids, row)
                token_id, confidence = rule.confidence(scores)
            chance = learned.acceptance.of(confidence)
            if self._pays_second(chain, chance, rate):
                candidates = rule.candidates(scores, token_id, 2)
                if len(candidates) > 1:
                    chain.seconds[len(chain.token_ids)] = candidates[1]
            chain.add(token_id, chance, confidence)
            cursor.move(token_id)
            if row_index == len(guesses) or guesses[row_index] != token_id:
                return row_index
        raise AssertionError("a pass gives one row more than it had guesses")

    def _pays_second(self, chain: _Chain, chance: float, rate: float) -> bool:
        """Return whether a second candidate pays for its row, if the first is accepted with this `chance`."""
        second_chance = chain.alive * (1 - chance) * self.learned.second.value
        return self.settings.second_candidates and rate > 0 and second_chance > rate * self._row_cost(chain, 1)

    def _guesses(self, cursor: Cursor, max_guesses: int) -> list[int]:
        """Return lookup guesses that the next draft pass should check as well, as far as they save passes."""
        guesses, joint_chance, draft_cost = list[int](), 1.0, self.costs.draft
        for n_guesses, guess in enumerate(self._guesses_ahead(cursor, min(max_guesses, MAX_GUESSES)), 1):
            joint_chance *= guess.chance
            if joint_chance * draft_cost(1) < draft_cost(n_guesses + 1) - draft_cost(n_guesses):
                break
            guesses.append(guess.token_id)
        return guesses

    def _row_cost(self, chain: _Chain, n_beside: int = 0) -> float:
        """Return the cost of one more row in a target pass over the chain and `n_beside` other rows."""
        n_rows = chain.n_rows + n_beside
        return self.costs.verify(n_rows + 1) - self.costs.verify(n_rows)
