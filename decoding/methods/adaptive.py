"""Drafts from whatever pays at the moment: earlier text, a cheaper model, both, or nothing; decided by measured time.

A round is one of three kinds. *Plain*: only the root. *Text*: a continuation from earlier text, as in prompt lookup.
*Model*: a chain of a draft model, either the cheaper model or the checkpoint's multi-token-prediction layer, whichever
has the higher expected gain. If earlier text suggests the next tokens, one pass of the draft model checks several of
them at once, and suggestions after the chain's end are added unchecked. Text is not used if drafted tokens are read
from the device one step late (`DraftModel.draft_ahead`). All estimates are learnt from outcomes and kept across
requests.

All times are in one-row plain passes of the target. Let λ be the current number of tokens per such pass. A step of time
t must then gain λ · t tokens, or the time is better spent otherwise. Deciding a draft by this rule, step by step,
maximises λ (the fixed point of a ratio of sums, Dinkelbach 1967).

`TargetWalk` gives the target's own tokens for any tree. At temperatures above 0 a draft uses the noise of the target's
draws (`TokenRule`), so it proposes the token that the target would draw if the two agreed.
Source: the choice between drafts by online estimates follows CAS-Spec (arXiv:2510.26843), drafts of drafts are its
vertical cascade; stopping where a further step is not worth λ times its cost is our own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ...core.errors import SettingsError
from ...core.serialization import Settings, adapter, count
from ...core.settings import Format
from ...core.types import TokenSource
from ..draft import Draft, Drafter, DraftModel, Outcome
from ..draft_tree import DraftTree
from ..draft_worth import Acceptance, DraftParticipation, PassCosts, Probing, Rate, Throughput, chain_worth, faded
from ..hit_rates import HitRates
from ..text_matches import Cursor, Guess, Matches
from ..verify import TargetWalk, Verifier
from . import Method, Resources, method

if TYPE_CHECKING:
    from torch import Tensor

    from ...core.costs import CostSource
    from ...models.runtime import Runtime
    from ..corpus import Occurrence
    from ..work import PassGenerator

PROBE_LENGTH = 4  # Maximum draft steps of a round that only probes the draft model.
MAX_GUESSES = 3  # Maximum guessed tokens per draft pass; quantised passes get slower with every row.


@dataclass(frozen=True, slots=True)
class AdaptiveSettings(Settings):
    """Adaptive drafts: from earlier text and from a cheaper model, chosen by measured time."""

    # Format of sub-layers for which the layer set names none.
    draft_format: Literal[Format, "stored"] = "int4"
    max_draft_length: int = count(24)
    lookup: bool = True
    second_candidates: bool = True
    mtp_layer: bool = True  # Whether the checkpoint's multi-token-prediction layer may draft.


@method("adaptive", "adaptive drafts", "docs/methods.md", AdaptiveSettings, ["costs"])
def _adaptive(resources: Resources, settings: AdaptiveSettings) -> tuple[Drafter, Verifier]:
    from ..draft_models import SkippedTarget

    costs = resources.costs
    if costs is None:
        raise SettingsError("this method decides by measured costs: give Resources the profile of measure_costs")
    layer_set = (resources.layer_set or resources.runtime.whole).filled(settings.draft_format)
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


@dataclass(slots=True)
class ModelEstimates:
    """Estimates of one draft model, learnt from all requests."""

    step_cost: float  # Cost per token of a modelled chain, in plain passes; lookup guesses reduce it.
    acceptance: Acceptance = field(default_factory=Acceptance)
    probing: Probing = field(default_factory=Probing)
    joining: DraftParticipation = field(default_factory=DraftParticipation)


@dataclass(slots=True)
class Learned:
    """Estimates learnt from all requests, from which each round is planned; those of draft models by name."""

    models: dict[str, ModelEstimates] = field(default_factory=dict)
    throughput: Throughput = field(default_factory=Throughput)  # Over all contexts.
    # By context bucket, because the share of a round's time that rows take depends on the context.
    throughputs: dict[int, Throughput] = field(default_factory=dict)
    matched: HitRates = field(default_factory=HitRates)  # Hit rates over all texts; each text also has its own.
    # Acceptance of second candidates after the first was refused.
    second: Rate = field(default_factory=lambda: Rate(0.5))

    def throughput_at(self, context_bucket: int) -> Throughput:
        """Return the throughput in contexts of that length; a new one begins with that over all contexts."""
        return self.throughputs.setdefault(context_bucket, replace(self.throughput))


@dataclass(slots=True)
class _Chain:
    """A chain as it grows: tokens, the confidence of those that the model gave (None: text's), and second candidates.

    `alive` is the probability that the whole chain is accepted; `drafting` is the cost of the draft's passes so far,
    `spent` the same plus the time of sequences that waited for them. `sources`: see `Draft`. `occurrences` are the
    places in the corpus from which nodes' tokens come.
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


class DraftCandidate(NamedTuple):
    """A draft model of a request, with the costs of its passes and the estimates learnt about it."""

    model: DraftModel
    costs: PassCosts
    learned: ModelEstimates


class AdaptiveDrafter(Drafter):
    """Chains from `model`, from the target's `mtp` layer and from earlier text; None: there is none.

    The layer is taken from the runtime, if its costs are known.
    """

    def __init__(self, model: DraftModel | None, costs: PassCosts, settings: AdaptiveSettings) -> None:
        self.model, self.costs, self.settings = model, costs, settings
        self.mtp: DraftModel | None = None
        self.learned = Learned()
        self._used: DraftCandidate | None = None  # The offer that the latest round drafted with.

    def attach(self, runtime: Runtime) -> None:
        from ..mtp import measured_layer

        if self.mtp is None and self.settings.mtp_layer:
            self.mtp = measured_layer(runtime, self.costs.source.at())

    @property
    def slot_bytes(self) -> int:
        return super().slot_bytes + (0 if self.mtp is None else self.mtp.slot_bytes)

    @property
    def reads_states(self) -> bool:
        return super().reads_states or (self.mtp is not None and self.mtp.reads_states)

    def max_rows(self, room: int) -> int:
        return 1 + 2 * min(room, self.settings.max_draft_length) + MAX_GUESSES

    def start(self) -> None:
        context = self.context
        prompt_ids = context.token_ids[: context.n_prompt]
        self.matches = Matches(self.learned.matched, prompt_ids, context.prediction, context.corpus)
        self.matches.read(context.token_ids[: context.n_learnt], known=True)
        self.chain, self.estimated = _Chain(), 0.0
        models = {"model": (self.model, self.costs)}
        if self.mtp is not None and context.states is not None:  # `begin` has made a copy of `model` alone.
            models["mtp"] = self.mtp.begin(context), PassCosts(self.costs.source, self.mtp)
        self._offers = [
            DraftCandidate(model, costs, self.learned.models.setdefault(name, ModelEstimates(costs.draft(1))))
            for name, (model, costs) in models.items()
            if model is not None
        ]

    def state(self) -> dict[str, Any]:
        return {"learned": asdict(self.learned)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.learned = adapter(Learned).validate_python(state["learned"])

    def draft(self, room: int) -> PassGenerator[Draft]:
        self._read_committed()
        max_length = min(room, self.settings.max_draft_length)
        self.chain = chain = _Chain()
        self._used = None
        draft = (yield from self._fill_chain(chain, max_length)) if max_length > 0 else None
        if draft is None:
            draft = Draft(chain.tree(self.context.token_ids[-1]), sources=chain.sources)
        self.estimated = chain.spent + self.costs.verify(draft.tree.n_nodes)
        return replace(draft, estimated=self.estimated)

    def _read_committed(self) -> None:
        """Index the committed tokens (at first the prompt), here so that it counts as drafting time."""
        for costs in (self.costs, *(offer.costs for offer in self._offers)):
            costs.follow(self.context.root_slot, self.context.load.checked)
        self.throughput = self.learned.throughput_at(self.costs.context_bucket)
        self.matches.read(self.context.token_ids)
        self.context.n_learnt = len(self.context.token_ids)

    def guesses_behind(self, token_ids: Sequence[int], room: int) -> list[tuple[int, TokenSource]]:
        self._read_committed()
        cursor, chain = self.matches.at_end(), _Chain()
        for token_id in token_ids:
            chain.add(token_id, 1.0)
            cursor.move(token_id)
        self._add_guesses(chain, cursor, room)
        return [(chain.token_ids[depth - 1], source) for depth, source in chain.sources.items()]

    def observe(self, outcome: Outcome) -> None:
        """Learn from every token that the target judged."""
        learned, chain, path, draft = self.learned, self.chain, outcome.walk.path, outcome.draft
        n_accepted = sum(node == depth for depth, node in enumerate(path, 1))
        if self._used is not None:
            estimates = self._used.learned
            # Tokens that stayed on the device until the target's were read.
            for step in range(len(chain.token_ids) + 1, draft.n_steps + 1):
                confidence_late = math.exp(draft.logprobs[step])
                chain.add(draft.tree.token_ids[step], estimates.acceptance.of(confidence_late), confidence_late)
            for i, confidence in enumerate(chain.confidences[: n_accepted + 1]):
                if confidence is not None:
                    estimates.acceptance.learn(confidence, i < n_accepted)
            n_modelled = sum(confidence is not None for confidence in chain.confidences)
            if n_modelled:
                estimates.step_cost = faded(estimates.step_cost, chain.drafting / n_modelled)
        for depth, occurrence in chain.occurrences.items():
            if depth <= n_accepted + 1:  # The target has not judged the tokens after a refused one.
                occurrence.judge(depth <= n_accepted)
        if n_accepted < len(chain.token_ids) and n_accepted in chain.seconds:
            learned.second.learn(len(path) > n_accepted)
        for throughput in (self.throughput, learned.throughput):
            throughput.add(len(outcome.walk.token_ids), self.estimated)

    def _fill_chain(self, chain: _Chain, max_length: int) -> PassGenerator[Draft | None]:
        """Choose the kind of round and fill its chain; return its draft if the draft is still on the device."""
        rate, load = self.throughput.rate, self.context.load.checked
        cursor = self.matches.at_end()
        if self._offers:
            guess_chances = [guess.chance for guess in self._guesses_ahead(cursor, max_length)]
            worth_by_text = chain_worth(guess_chances, 0.0, rate, self.costs)[1]
            plans = [(offer, *self._plan_chain(offer, max_length, rate)) for offer in self._offers]
            best_offer, n_steps, worth_by_model = max(plans, key=itemgetter(2))
            estimates, costs = best_offer.learned, best_offer.costs
            shared_tokens = rate * n_steps * estimates.step_cost * costs.shared
            pays = n_steps > 0 and estimates.joining.pays(worth_by_model - worth_by_text, shared_tokens, load)
            idle_offers = [offer for offer in self._offers if offer is not best_offer or not pays]
            # Ask all of them: each counts the rounds that it was not used in.
            due_offers = [offer for offer in idle_offers if offer.learned.probing.due(load)]
            if due_offers:
                return (
                    yield from self._draft_by_model(due_offers[0], chain, cursor, min(max_length, PROBE_LENGTH), 0.0)
                )
            if pays:
                estimates.probing.paid()
                draft = yield from self._draft_by_model(best_offer, chain, cursor, max_length, rate)
                if draft is not None:
                    return draft
        self._add_guesses(chain, cursor, max_length - len(chain.token_ids))
        return None

    def _add_guesses(self, chain: _Chain, cursor: Cursor, max_guesses: int) -> None:
        """Add guesses from earlier text while one more row pays."""
        for guess in self._guesses_ahead(cursor, max_guesses):
            if chain.alive * guess.chance < self.throughput.rate * self._row_cost(chain):
                break
            chain.add_guess(guess)

    def _plan_chain(self, offer: DraftCandidate, max_length: int, rate: float) -> tuple[int, float]:
        """Return the best length of a chain of the candidate model, and its value."""
        expected_chances = [offer.learned.acceptance.overall.value] * min(max_length, offer.model.room)
        return chain_worth(expected_chances, offer.learned.step_cost, rate, offer.costs)

    def _guesses_ahead(self, cursor: Cursor, max_guesses: int) -> Iterator[Guess]:
        """Yield up to `max_guesses` tokens predicted from earlier text."""
        return islice(cursor.ahead(), max_guesses if self.settings.lookup else 0)

    def _draft_by_model(
        self, offer: DraftCandidate, chain: _Chain, cursor: Cursor, max_length: int, rate: float
    ) -> PassGenerator[Draft | None]:
        """Add the draft model's tokens while a further pass is worth its time; rate 0: up to `max_length`.

        Return the draft if its last token is still on the device.
        """
        model, learned, max_length = offer.model, offer.learned, min(max_length, offer.model.room)
        self._used = offer
        model.restart()
        if model.reads_late and max_length:
            return (yield from self._draft_ahead_by_model(offer, chain, max_length, rate))
        last_id, n_run = self.context.token_ids[-1], 0
        waiting_factor = 1.0  # Cost factor for the sequences that wait; `_charge` sets it with every pass.
        while len(chain.token_ids) < max_length:
            expected_chance = chain.alive * learned.acceptance.overall.value
            if n_run and expected_chance < rate * (waiting_factor * learned.step_cost + self._row_cost(chain)):
                break
            guesses = self._guesses(offer, cursor, max_length - len(chain.token_ids) - 1)
            row_ids = [last_id, *guesses]
            waiting_factor = self._charge(offer, chain, len(row_ids))
            logits = yield from model.extend(row_ids, range(n_run - 1, n_run + len(row_ids) - 1))
            n_matched = self._add_pass_tokens(offer, chain, cursor, logits, guesses, rate)
            model.drop(len(guesses) - n_matched)
            last_id, n_run = chain.token_ids[-1], n_run + 1 + n_matched
        return None

    def _draft_ahead_by_model(
        self, offer: DraftCandidate, chain: _Chain, max_length: int, rate: float
    ) -> PassGenerator[Draft]:
        """Draft like `_draft_by_model`, but read each step while the next one runs.

        Earlier text is not used: when a token is read, which a text match needs, the next pass is already running.
        """
        learned, n_run, waiting_factor = offer.learned, 0, 1.0

        def should_continue() -> bool:
            nonlocal n_run, waiting_factor
            expected_chance = chain.alive * learned.acceptance.overall.value ** (1 + n_run - len(chain.token_ids))
            if n_run and expected_chance < rate * (waiting_factor * learned.step_cost + self._row_cost(chain)):
                return False
            n_run, waiting_factor = n_run + 1, self._charge(offer, chain, 1)
            return True

        def on_candidates(candidates: tuple[int, ...], confidence: float) -> int:
            chance, position = learned.acceptance.of(confidence), len(chain.token_ids)
            if len(candidates) > 1 and self._pays_second(chain, chance, rate):
                chain.seconds[position] = candidates[1]
            chain.add(candidates[0], chance, confidence)
            return 2 if position in chain.seconds else 1

        return (yield from offer.model.draft_ahead(max_length, 2, on_candidates, should_continue))

    def _charge(self, offer: DraftCandidate, chain: _Chain, n_rows: int) -> float:
        """Add a draft pass's cost; return the factor for the sequences that waited for it.

        Rows of earlier rounds in the pass count only up to the number that one round leaves: a prompt's rows are read
        once, and would make every further step seem expensive.
        """
        n_rows += min(offer.model.n_behind, self.settings.max_draft_length)
        # Waiting sequences per drafting sequence.
        n_waiting = max(1.0, self.context.load.checked / self.context.load.drafted)
        waiting_factor = 1 + (n_waiting - 1) * offer.costs.shared
        chain.drafting += offer.costs.draft(n_rows)
        chain.spent += waiting_factor * offer.costs.draft(n_rows)
        return waiting_factor

    def _add_pass_tokens(
        self, offer: DraftCandidate, chain: _Chain, cursor: Cursor, logits: Tensor, guesses: Sequence[int], rate: float
    ) -> int:
        """Add a pass's tokens, row by row while the guesses match the draft model; return the number of matches."""
        learned, rule = offer.learned, self.context.rule
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

    def _guesses(self, offer: DraftCandidate, cursor: Cursor, max_guesses: int) -> list[int]:
        """Return the lookup guesses that the next draft pass should also check, as many as save passes."""
        guesses, joint_chance, draft_cost = list[int](), 1.0, offer.costs.draft
        if not offer.model.checks_guesses:
            return guesses
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
