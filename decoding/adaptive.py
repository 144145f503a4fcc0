"""Drafts from whatever pays at the moment: earlier text, a cheaper model, both, or nothing; decided by measured time.

A round is one of three. *Plain*: only the root. *Text*: what followed the text's end before, as in prompt lookup.
*Model*: a chain of the draft model; where earlier text suggests the next tokens, one pass of the draft model checks
several of them at once, and what text suggests behind the chain's end is added unchecked. Which round it is, when a
chain ends and where a second candidate hangs beside it is decided by `worth`: expected tokens against λ times measured
costs. All estimates are learnt from outcomes and carried over from request to request.

The tree is a function of what was committed before, so that `TargetWalk` is exact at every temperature.
Source: the choice between drafts by online estimates follows CAS-Spec (arXiv:2510.26843), drafts of drafts are its
vertical cascade; stopping where a further step is not worth λ times its cost is our own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..core.costs import CostProfile
from ..core.method_settings import AdaptiveSettings
from ..core.types import LayerSet
from .context import Context
from .draft import Draft, Drafting, Outcome
from .engine import PassGenerator
from .follow import Cursor, Matches
from .lookup import HitRates
from .method import Method
from .models import DraftModel
from .tree import DraftTree
from .worth import Acceptance, Pace, Prices, Probing, Rate, chain_worth

PROBE_LENGTH = 4  # draft steps of a round that is only made to learn
MOST_GUESSES = 3  # that a draft pass checks at once: quantised passes get dear with every row


class AdaptiveDrafter:
    """See the module; `model` None: earlier text only."""

    def __init__(self, model: DraftModel | None, prices: Prices, settings: AdaptiveSettings) -> None:
        self.model, self.prices, self.settings = model, prices, settings
        self.pace, self.acceptance, self.probing = Pace(), Acceptance(), Probing()
        self.matched = HitRates()  # over all texts so far; each text has its own beside
        self.second = Rate(0.5)  # a second candidate is the target's, where the first is not
        self.step_cost = prices.draft(1)  # per token of a model's chain; text makes it less
        self._text: Matches | None = None  # that was begun last
        self._n_known = 0  # tokens that an earlier life of the text in flight has read

    @property
    def layer_set(self) -> LayerSet | None:
        """See `Drafter`."""
        return None if self.model is None else self.model.layer_set

    def begin(self, context: Context) -> Drafting:
        """See `Drafter`."""
        self._text = Matches(self.matched)
        if len(context.generated) > 1:  # taken up behind its first rounds
            self._text.read(context.token_ids[: self._n_known], known=True)
        self._n_known = 0
        return _Adapting(self, context, self._text)

    def state(self) -> dict[str, Any]:
        """What was learnt so far, as JSON values, between two rounds."""
        return {
            "pace": self.pace.state(),
            "acceptance": self.acceptance.state(),
            "probing": self.probing.state(),
            "matched": self.matched.state(),
            "second": self.second.state(),
            "step_cost": self.step_cost,
            "n_read": 0 if self._text is None else len(self._text.text.token_ids),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`, in the text that was in flight then if there was one.

        Raises: KeyError, TypeError, ValueError: that is no such state.
        """
        for name in ("pace", "acceptance", "probing", "matched", "second"):
            getattr(self, name).restore(state[name])
        self.step_cost, self._n_known = float(state["step_cost"]), int(state["n_read"])

    def max_rows(self, room: int) -> int:
        """See `Drafter`."""
        return 1 + 2 * min(room, self.settings.max_draft_length) + MOST_GUESSES


def adaptive(model: DraftModel, costs: CostProfile, settings: AdaptiveSettings) -> Method:
    """Adaptive drafting with that model, whose layer set may change between rounds."""
    return Method("adaptive", AdaptiveDrafter(model, Prices(costs, model), settings))


@dataclass(slots=True)
class _Chain:
    """A chain as it grows: tokens, the confidence of those that the model gave (None: text's), and second candidates.

    `alive` is the chance that the whole chain stands; `spent` the cost of the draft's passes so far.
    """

    token_ids: list[int] = field(default_factory=list)
    confidences: list[float | None] = field(default_factory=list)
    seconds: dict[int, int] = field(default_factory=dict)
    alive: float = 1.0
    spent: float = 0.0

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


class _Adapting:
    def __init__(self, drafter: AdaptiveDrafter, context: Context, matches: Matches) -> None:
        self.drafter, self.context, self.matches = drafter, context, matches
        self.passes = None if drafter.model is None else drafter.model.begin(context)
        self.chain, self.reckoned = _Chain(), 0.0

    def draft(self, room: int) -> PassGenerator[Draft]:
        """The first call reads the prompt, so that this counts as drafting."""
        drafter = self.drafter
        drafter.prices.load = self.context.runtime.load
        self.matches.read(self.context.token_ids)
        most = min(room, drafter.settings.max_draft_length)
        self.chain = chain = _Chain()
        if most > 0:
            yield from self._fill(chain, most)
        self.reckoned = chain.spent + drafter.prices.verify(chain.n_rows)
        return Draft(chain.tree(self.context.token_ids[-1]), reckoned=self.reckoned)

    def observe(self, outcome: Outcome) -> None:
        """Learn from every token that the target judged."""
        drafter, chain, path = self.drafter, self.chain, outcome.walk.path
        n_stood = sum(node == depth for depth, node in enumerate(path, 1))
        for i, confidence in enumerate(chain.confidences[: n_stood + 1]):
            if confidence is not None:
                drafter.acceptance.learn(confidence, i < n_stood)
        if n_stood < len(chain.token_ids) and n_stood in chain.seconds:
            drafter.second.learn(len(path) > n_stood)
        drafter.pace.add(len(outcome.walk.token_ids), self.reckoned)
        n_modelled = sum(confidence is not None for confidence in chain.confidences)
        if n_modelled:
            drafter.step_cost += 0.1 * (chain.spent / n_modelled - drafter.step_cost)

    def _fill(self, chain: _Chain, most: int) -> PassGenerator[None]:
        """Choose the kind of round and make its chain."""
        drafter, rate = self.drafter, self.drafter.pace.rate
        cursor = self.matches.at_end()
        by_text = self._text_worth(cursor, most, rate)
        if self.passes is not None:
            most_modelled = min(most, self.passes.room)
            expected = [drafter.acceptance.overall.value] * most_modelled
            n_steps, by_model = chain_worth(expected, drafter.step_cost, rate, drafter.prices)
            if n_steps and by_model >= by_text:
                drafter.probing.paid()
                yield from self._by_model(chain, cursor, most_modelled, rate)
                self._by_text(chain, cursor, most, rate)
                return
            if drafter.probing.due():
                yield from self._by_model(chain, cursor, min(most_modelled, PROBE_LENGTH), 0.0)
                return
        self._by_text(chain, cursor, most, rate)

    def _text_worth(self, cursor: Cursor, most: int, rate: float) -> float:
        if not self.drafter.settings.lookup:
            return float("-inf")
        ahead, chances = cursor.copy(), list[float]()
        while len(chances) < most and (token_id := ahead.token_id) is not None:
            chances.append(ahead.chance)
            ahead.move(token_id)
        return chain_worth(chances, 0.0, rate, self.drafter.prices)[1]

    def _by_text(self, chain: _Chain, cursor: Cursor, most: int, rate: float) -> None:
        """Add what earlier text says while a further row is worth its time."""
        if not self.drafter.settings.lookup:
            return
        while len(chain.token_ids) < most and (token_id := cursor.token_id) is not None:
            if chain.alive * cursor.chance < rate * self._row(chain):
                break
            chain.add(token_id, cursor.chance)
            cursor.move(token_id)

    def _by_model(self, chain: _Chain, cursor: Cursor, most: int, rate: float) -> PassGenerator[None]:
        """Add the draft model's tokens while a further pass is worth its time; rate 0: up to `most`."""
        assert self.passes is not None
        drafter = self.drafter
        self.passes.restart()
        last, n_run = self.context.token_ids[-1], 0
        while len(chain.token_ids) < most:
            expected = chain.alive * drafter.acceptance.overall.value
            if expected < rate * (drafter.step_cost + self._row(chain)):
                break
            guesses = self._guesses(cursor, most - len(chain.token_ids) - 1)
            rows = [last, *guesses]
            logits = yield from self.passes.extend(rows, range(n_run - 1, n_run + len(rows) - 1))
            chain.spent += drafter.prices.draft(len(rows))
            n_right = self._take(chain, cursor, logits, guesses, rate)
            self.passes.drop(len(guesses) - n_right)
            last, n_run = chain.token_ids[-1], n_run + 1 + n_right

    def _take(self, chain: _Chain, cursor: Cursor, logits: torch.Tensor, guesses: Sequence[int], rate: float) -> int:
        """Add what one pass gave, row by row while the guesses were the draft's own tokens; how many were."""
        drafter, rule = self.drafter, self.context.rule
        at_once = [] if rule.processors else rule.confidences(logits.float())
        for i, row in enumerate(logits):
            if at_once:
                scores, (token_id, confidence) = row, at_once[i]
            else:  # penalties read the text, which grows from row to row
                scores = rule.scores([*self.context.token_ids, *chain.token_ids], row)
                token_id, confidence = rule.confidence(scores)
            chance = drafter.acceptance.of(confidence)
            beside = chain.alive * (1 - chance) * drafter.second.value
            if drafter.settings.second_candidates and beside > rate * self._row(chain) and rate:
                found = rule.candidates(scores, token_id, 2)
                if len(found) > 1:
                    chain.seconds[len(chain.token_ids)] = found[1]
            chain.add(token_id, chance, confidence)
            cursor.move(token_id)
            if i == len(guesses) or guesses[i] != token_id:
                return i
        raise AssertionError("a pass gives one row more than it had guesses")

    def _guesses(self, cursor: Cursor, most: int) -> list[int]:
        """What text suggests that the draft's next pass should check along: as far as it saves passes."""
        prices = self.drafter.prices
        if not self.drafter.settings.lookup or most < 1:
            return []
        found = cursor.guesses(min(most, MOST_GUESSES), 0.0)
        ahead, alive, n_worth = cursor.copy(), 1.0, 0
        for n, token_id in enumerate(found, 1):
            alive *= ahead.chance
            if alive * prices.draft(1) < prices.draft(n + 1) - prices.draft(n):
                break
            ahead.move(token_id)
            n_worth = n
        return found[:n_worth]

    def _row(self, chain: _Chain) -> float:
        """What one more row costs the target's pass."""
        verify = self.drafter.prices.verify
        return verify(chain.n_rows + 1) - verify(chain.n_rows)
