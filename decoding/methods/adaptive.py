"""Drafts from whatever pays at the moment: earlier text, a cheaper model, both, or nothing; decided by measured time.

A round is one of three. *Plain*: only the root. *Text*: what followed the text's end before, as in prompt lookup.
*Model*: a chain of the draft model; where earlier text suggests the next tokens, one pass of the draft model checks
several of them at once, and what text suggests behind the chain's end is added unchecked. Which round it is, when a
chain ends and where a second candidate hangs beside it is decided by `cost_model`: expected tokens against λ times
measured costs. All estimates are learnt from outcomes and carried over from request to request.

`TargetWalk` gives the target's own tokens whatever the tree is. At temperatures above 0 a draft reads the noise of the
target's draws (`TokenRule`), so that it proposes what the target would draw if the two agreed.
Source: the choice between drafts by online estimates follows CAS-Spec (arXiv:2510.26843), drafts of drafts are its
vertical cascade; stopping where a further step is not worth λ times its cost is our own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, Self

from ...core.errors import SettingsError
from ...core.serialization import Settings, adapter, count
from ...core.types import LayerSet, TokenSource
from ..cost_model import Acceptance, Joining, PassCosts, Probing, Rate, Throughput, chain_worth, faded
from ..draft import Draft, Drafter, Outcome
from ..text_matches import Cursor, HitRates, Matches
from ..tree import DraftTree, Later
from ..verify import TargetWalk, Verifier
from .registry import Method, Resources, method

if TYPE_CHECKING:
    from torch import Tensor

    from ...core.costs import CostProfile
    from ..context import Context
    from ..draft_models import DraftModel
    from ..engine import PassGenerator

PROBE_LENGTH = 4  # draft steps of a round that is only made to learn
MOST_GUESSES = 3  # that a draft pass checks at once: quantised passes cost more with every row


@dataclass(frozen=True, slots=True)
class AdaptiveSettings(Settings):
    """Adaptive drafts: from earlier text and from a cheaper model, as measured time says."""

    # of all that the layer set names no format for
    draft_format: Literal["int8", "int4", "int4-64", "int4-32", "stored"] = "int4"
    max_draft_length: int = count(24)
    lookup: bool = True
    second_candidates: bool = True


@method("adaptive", "adaptive drafts", "docs/methods.md", AdaptiveSettings, ["costs"])
def _adaptive(resources: Resources, settings: AdaptiveSettings) -> tuple[Drafter, Verifier]:
    from ..draft_models import SkippedTarget

    costs = resources.costs
    if costs is None:
        raise SettingsError(
            "this method decides by measured costs: give Resources the profile that measure_costs returns"
        )
    layer_set = (resources.layer_set or LayerSet(resources.runtime.n_layers)).filled(settings.draft_format)
    if missing := costs.missing(layer_set):
        raise SettingsError(
            f"the costs of {', '.join(sorted(missing))} are not in the profile: add them with measure_format"
        )
    model = None if layer_set.is_whole else SkippedTarget(layer_set)
    if model is not None:
        model.check(resources.runtime)
    return AdaptiveDrafter(model, PassCosts(costs, model), settings), TargetWalk()


def adaptive(model: DraftModel, costs: CostProfile, settings: AdaptiveSettings) -> Method:
    """Build adaptive drafting with that model, whose layer set may change between rounds."""
    return Method("adaptive", AdaptiveDrafter(model, PassCosts(costs, model), settings))


@dataclass(slots=True)
class Learned:
    """What all requests have taught: the estimates that rounds are decided by."""

    step_cost: float  # per token of a model's chain; text makes it less
    throughput: Throughput = field(default_factory=Throughput)
    acceptance: Acceptance = field(default_factory=Acceptance)
    probing: Probing = field(default_factory=Probing)
    joining: Joining = field(default_factory=Joining)
    matched: HitRates = field(default_factory=HitRates)  # over all texts so far; each text has its own beside
    second: Rate = field(
        default_factory=lambda: Rate(0.5)
    )  # a second candidate is the target's, where the first is not


@dataclass(slots=True)
class _Chain:
    """A chain as it grows: tokens, the confidence of those that the model gave (None: text's), and second candidates.

    `alive` is the chance that the whole chain is accepted; `drafting` is the cost of the draft's passes so far, `spent`
    that with the time of sequences that waited for them. `sources`: see `Draft`.
    """

    token_ids: list[int] = field(default_factory=list)
    confidences: list[float | None] = field(default_factory=list)
    seconds: dict[int, int] = field(default_factory=dict)
    alive: float = 1.0
    drafting: float = 0.0
    spent: float = 0.0
    sources: dict[int, TokenSource] = field(default_factory=dict)

    def add(self, token_id: int, chance: float, confidence: float | None = None) -> None:
        self.token_ids.append(token_id)
        self.confidences.append(confidence)
        self.alive *= chance

    @property
    def n_rows(self) -> int:
        """Rows that the target would check, root included."""
        return 1 + len(self.token_ids) + len(self.seconds)

    def tree(self, root: int) -> DraftTree:
        offered = [
            (token_id, self.seconds[i]) if i in self.seconds else (token_id,)
            for i, token_id in enumerate(self.token_ids)
        ]
        return DraftTree.grow(root, offered)


class AdaptiveDrafter(Drafter):
    """Chains from `model` and from earlier text; `model` None: from earlier text only."""

    def __init__(self, model: DraftModel | None, costs: PassCosts, settings: AdaptiveSettings) -> None:
        self.model, self.costs, self.settings = model, costs, settings
        self.learned = Learned(step_cost=costs.draft(1))
        self._text: Matches | None = None  # that was begun last
        self._n_known = 0  # tokens that an earlier life of the text in flight has read

    def max_rows(self, room: int) -> int:
        return 1 + 2 * min(room, self.settings.max_draft_length) + MOST_GUESSES

    def begin(self, context: Context) -> Self:
        own = super().begin(context)
        if len(context.generated) > 1:  # taken up behind its first rounds
            own.matches.read(context.token_ids[: self._n_known], known=True)
        self._text, self._n_known = own.matches, 0
        return own

    def start(self) -> None:
        context = self.context
        self.matches = Matches(self.learned.matched, context.token_ids[: context.n_prompt], context.prediction)
        self.passes = None if self.model is None else self.model.begin(self.context)
        self.chain, self.estimated = _Chain(), 0.0

    def state(self) -> dict[str, Any]:
        """Return what was learnt so far, as JSON values, between two rounds."""
        n_read = 0 if self._text is None else self._text.n_read
        return {"learned": asdict(self.learned), "n_read": n_read}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`, in the text that was in flight then if there was one.

        Raises: KeyError, TypeError, ValueError: that is no such state.
        """
        self.learned = adapter(Learned).validate_python(state["learned"])
        self._n_known = int(state["n_read"])

    def draft(self, room: int) -> PassGenerator[Draft]:
        """Read what was committed, at the first call the prompt, so that this counts as drafting, and draft."""
        self.costs.load = self.context.load.checked
        self.matches.read(self.context.token_ids)
        most = min(room, self.settings.max_draft_length)
        self.chain = chain = _Chain()
        later = (yield from self._fill(chain, most)) if most > 0 else None
        self.estimated = chain.spent + self.costs.verify(chain.n_rows if later is None else len(later.token_ids))
        if later is not None:
            return Draft.of_later(later, self.estimated)
        return Draft(chain.tree(self.context.token_ids[-1]), estimated=self.estimated, sources=chain.sources)

    def observe(self, outcome: Outcome) -> None:
        """Learn from every token that the target judged."""
        learned, chain, path = self.learned, self.chain, outcome.walk.path
        if outcome.draft.logprobs:  # which was not read before it was checked
            for token_id, logprob in zip(outcome.draft.tree.token_ids[1:], outcome.draft.logprobs[1:], strict=True):
                chain.add(token_id, learned.acceptance.of(math.exp(logprob)), math.exp(logprob))
        n_accepted = sum(node == depth for depth, node in enumerate(path, 1))
        for i, confidence in enumerate(chain.confidences[: n_accepted + 1]):
            if confidence is not None:
                learned.acceptance.learn(confidence, i < n_accepted)
        if n_accepted < len(chain.token_ids) and n_accepted in chain.seconds:
            learned.second.learn(len(path) > n_accepted)
        learned.throughput.add(len(outcome.walk.token_ids), self.estimated)
        n_modelled = sum(confidence is not None for confidence in chain.confidences)
        if n_modelled:
            learned.step_cost = faded(learned.step_cost, chain.drafting / n_modelled)

    def _fill(self, chain: _Chain, most: int) -> PassGenerator[Later | None]:
        """Choose the kind of round and make its chain, or return what it will be."""
        learned = self.learned
        rate = learned.throughput.rate
        cursor = self.matches.at_end()
        by_text = self._text_worth(cursor, most, rate)
        if self.passes is not None:
            most_modelled = min(most, self.passes.room)
            expected = [learned.acceptance.overall.value] * most_modelled
            n_steps, by_model = chain_worth(expected, learned.step_cost, rate, self.costs)
            shared = rate * n_steps * learned.step_cost * self.costs.shared
            if n_steps and learned.joining.pays(by_model - by_text, shared, self.context.load.checked):
                learned.probing.paid()
                self.passes.restart()
                later = None if self._guesses(cursor, most_modelled - 1) else self.passes.later(n_steps)
                if later is not None:  # as many as are worth most by what was accepted so far
                    for _ in range(n_steps):
                        self._charge(chain, 1)
                    return (yield from later)
                yield from self._by_model(chain, cursor, most_modelled, rate)
                self._by_text(chain, cursor, most, rate)
                return None
            if learned.probing.due(self.context.load.checked):
                yield from self._by_model(chain, cursor, min(most_modelled, PROBE_LENGTH), 0.0)
                return None
        self._by_text(chain, cursor, most, rate)
        return None

    def _text_worth(self, cursor: Cursor, most: int, rate: float) -> float:
        chances = [guess.chance for guess in islice(cursor.ahead(), most if self.settings.lookup else 0)]
        return chain_worth(chances, 0.0, rate, self.costs)[1]

    def _by_text(self, chain: _Chain, cursor: Cursor, most: int, rate: float) -> None:
        """Add what earlier text says while a further row is worth its time."""
        if not self.settings.lookup:
            return
        for guess in islice(cursor.ahead(), most - len(chain.token_ids)):
            if chain.alive * guess.chance < rate * self._row(chain):
                break
            chain.add(guess.token_id, guess.chance)
            chain.sources[len(chain.token_ids)] = guess.source

    def _by_model(self, chain: _Chain, cursor: Cursor, most: int, rate: float) -> PassGenerator[None]:
        """Add the draft model's tokens while a further pass is worth its time; rate 0: up to `most`."""
        assert self.passes is not None
        learned = self.learned
        self.passes.restart()
        last, n_run = self.context.token_ids[-1], 0
        charge = 1.0  # for a pass, in equal parts of one that all join; that it pays was decided for the first
        while len(chain.token_ids) < most:
            expected = chain.alive * learned.acceptance.overall.value
            if n_run and expected < rate * (charge * learned.step_cost + self._row(chain)):
                break
            guesses = self._guesses(cursor, most - len(chain.token_ids) - 1)
            rows = [last, *guesses]
            logits = yield from self.passes.extend(rows, range(n_run - 1, n_run + len(rows) - 1))
            charge = self._charge(chain, len(rows))
            n_right = self._take(chain, cursor, logits, guesses, rate)
            self.passes.drop(len(guesses) - n_right)
            last, n_run = chain.token_ids[-1], n_run + 1 + n_right

    def _charge(self, chain: _Chain, n_rows: int) -> float:
        """Add what a pass of the draft cost; return its share of the time of all sequences that waited for it."""
        waiting = max(1.0, self.context.load.checked / self.context.load.drafted)  # for each that drafts
        charge = 1 + (waiting - 1) * self.costs.shared
        chain.drafting += self.costs.draft(n_rows)
        chain.spent += charge * self.costs.draft(n_rows)
        return charge

    def _take(self, chain: _Chain, cursor: Cursor, logits: Tensor, guesses: Sequence[int], rate: float) -> int:
        """Add what one pass gave, row by row while the guesses are the draft's own tokens; return how many are."""
        learned, rule = self.learned, self.context.rule
        at_once = rule.confidences(logits.float()) if rule.is_argmax else []
        for i, row in enumerate(logits):
            if at_once:
                scores, (token_id, confidence) = row, at_once[i]
            else:  # penalties read the text, which grows from row to row
                scores = self.context.noisy_scores(chain.token_ids, row)
                token_id, confidence = rule.confidence(scores)
            chance = learned.acceptance.of(confidence)
            beside = chain.alive * (1 - chance) * learned.second.value
            if self.settings.second_candidates and beside > rate * self._row(chain) and rate:
                found = rule.candidates(scores, token_id, 2)
                if len(found) > 1:
                    chain.seconds[len(chain.token_ids)] = found[1]
            chain.add(token_id, chance, confidence)
            cursor.move(token_id)
            if i == len(guesses) or guesses[i] != token_id:
                return i
        raise AssertionError("a pass gives one row more than it had guesses")

    def _guesses(self, cursor: Cursor, most: int) -> list[int]:
        """Return what text suggests that the draft's next pass should check along: as far as it saves passes."""
        guesses, alive, draft = list[int](), 1.0, self.costs.draft
        if not self.settings.lookup:
            return guesses
        for n, guess in enumerate(islice(cursor.ahead(), min(most, MOST_GUESSES)), 1):
            alive *= guess.chance
            if alive * draft(1) < draft(n + 1) - draft(n):
                break
            guesses.append(guess.token_id)
        return guesses

    def _row(self, chain: _Chain) -> float:
        """Return what one more row costs the target's pass."""
        return self.costs.verify(chain.n_rows + 1) - self.costs.verify(chain.n_rows)
