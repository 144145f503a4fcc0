"""Drafting with the target's first layers; verification runs the remaining ones.

LayerSkip and AdaSPEED draft a chain with the first layers. AdaDecode predicts a token at the first intermediate layer
whose head is confident and defers the deeper layers. They run together with those of the next token that reaches them,
at the latest when no head is confident. That pass ends in the verification, and no layer of a token runs twice.
ParaDecode advances tokens at different layers together, each by one layer per step, over stacked weights: a token is
predicted when its predecessor reaches an early layer, and starts while the predecessor still runs deeper layers.

Source: LayerSkip (arXiv:2404.16710); AdaSPEED II; AdaDecode (arXiv:2506.03700) 2.2, Algorithm 1, appendix D;
ParaDecode 2.2, Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...core.errors import SettingsError
from ...core.serialization import Settings, count, share
from ...decoding.draft import Draft, Drafter, DraftModel, Outcome, offers_of
from ...decoding.draft_tree import DraftTree
from ...decoding.methods import Resources, method
from ...decoding.methods.chains import ChainDrafter, StopRule
from ...decoding.verify import ChainRatio, TargetWalk, Verifier
from ..training.settings import default_exit
from .chains import AdaptiveStop, AdaptiveThreshold

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ...decoding.work import PassGenerator
    from ...models.runtime import Runtime
    from ..early_exit import Heads, StackedLayers, StagedPass


@dataclass(frozen=True, slots=True)
class LayerSkipSettings(Settings):
    """LayerSkip (arXiv:2404.16710); its examples exit after 8 of 32 layers and draft 6 tokens."""

    exit_layer: int | None = count(None)  # Number of layers that draft; None: a quarter of the model's layers.
    draft_length: int = count(6)


@dataclass(frozen=True, slots=True)
class AdaSpeedSettings(AdaptiveThreshold):
    """AdaSPEED: the stop threshold is for the product of the draft's confidences, and starts at 0.8 (appendix A)."""

    exit_layer: int | None = count(None)  # Number of layers that draft; None: a quarter of the model's layers.


@dataclass(frozen=True, slots=True)
class AdaDecodeSettings(Settings):
    """AdaDecode, appendix D."""

    early_threshold: float = share(0.75)  # γ: confidence above which a head predicts the token early.
    max_early: int = count(5)  # Maximum consecutive early predictions before verification.


@dataclass(frozen=True, slots=True)
class ParaDecodeSettings(Settings):
    """ParaDecode 4.3: with γ = 0, every token is predicted early."""

    early_threshold: float = share(0.0)


@method("layerskip", "LayerSkip", "arXiv:2404.16710", LayerSkipSettings)
def _layerskip(resources: Resources, settings: LayerSkipSettings) -> tuple[Drafter, Verifier]:
    model = early_exit(resources, settings.exit_layer)
    return ChainDrafter(model, StopRule(settings.draft_length), sampled=True), ChainRatio()


@method("adaspeed", "AdaSPEED", "AdaSPEED II.A", AdaSpeedSettings)
def _adaspeed(resources: Resources, settings: AdaSpeedSettings) -> tuple[Drafter, Verifier]:
    model = early_exit(resources, settings.exit_layer)
    return ChainDrafter(model, AdaptiveStop.of(settings, joint=True), sampled=True), ChainRatio()


@method("adaspeed-probe", "AdaSPEED with a probe", "AdaSPEED II.B", AdaSpeedSettings, ["probe"])
def _adaspeed_probe(resources: Resources, settings: AdaSpeedSettings) -> tuple[Drafter, Verifier]:
    probe = _learned_weights(resources, "probe", "a probe")
    if settings.exit_layer not in (None, probe.depth):
        raise SettingsError(
            f"the probe was trained after {probe.depth} layers, not {settings.exit_layer}: remove exit_layer, or train"
            " another probe with --layer"
        )
    stop = AdaptiveStop.of(settings, joint=True, probe=probe)
    return ChainDrafter(early_exit(resources, probe.depth), stop, sampled=True), ChainRatio()


@method("adadecode", "AdaDecode", "arXiv:2506.03700", AdaDecodeSettings, ["heads"], predicts_early=True)
def _adadecode(resources: Resources, settings: AdaDecodeSettings) -> tuple[Drafter, Verifier]:
    heads = _learned_weights(resources, "heads", "heads")
    return EarlyDrafter(heads, settings.early_threshold, settings.max_early), ChainRatio()


@method("paradecode", "ParaDecode", "ParaDecode, section 2.2", ParaDecodeSettings, ["heads"], predicts_early=True)
def _paradecode(resources: Resources, settings: ParaDecodeSettings) -> tuple[Drafter, Verifier]:
    from ..early_exit import StackedLayers

    heads = _learned_weights(resources, "heads", "heads")
    return PipelineDrafter(heads, settings.early_threshold, StackedLayers(resources.runtime)), TargetWalk()


def early_exit(resources: Resources, exit_layer: int | None) -> EarlyExit:
    """Return the target's first layers (None: a quarter) as a draft model; raise SettingsError if it has fewer."""
    model = EarlyExit(exit_layer or default_exit(resources.runtime.n_layers))
    model.check(resources.runtime)
    return model


class EarlyExit(DraftModel):
    """The target's first `depth` layers with its norm and head; verification runs the remaining layers (LayerSkip).

    Only chains can be drafted. The state of each row is kept for the verification.
    """

    staged: StagedPass | None = None

    def __init__(self, depth: int) -> None:
        self.depth = depth

    def check(self, runtime: Runtime) -> None:
        runtime.check_depth(self.depth)

    def restart(self) -> None:
        from ..early_exit import StagedPass

        self.staged = StagedPass(self.context.runtime, self.context.buffer, self.context.root_slot)

    def extend(self, token_ids: Sequence[int] | Tensor, parents: Sequence[int]) -> PassGenerator[Tensor]:
        assert self.staged is not None and len(token_ids) == 1 and parents[0] == self.staged.n_rows - 1
        self.staged.add(token_ids[0])
        logits = yield from self.staged.advance(self.depth, with_logits=True)
        self.hidden = self.staged.newest
        return logits

    def drop(self, n_nodes: int) -> None:
        assert n_nodes == 0, "an early exit cannot drop drafted tokens"


def _learned_weights(resources: Resources, kind: str, words: str) -> Any:
    if kind not in resources.learned:
        command = f"swiftopt {kind} train"
        raise SettingsError(f"this method needs {words}: train them for this model and task with `{command}`")
    return resources.learned[kind]


class EarlyDrafter(Drafter):
    """AdaDecode's early predictions: at the first head whose largest probability exceeds `threshold` (γ).

    At most `max_early` tokens in a row are predicted early.

    DEVIATION: the paper draws a token and exits if the probability of this token exceeds γ. The distribution that a
    token comes from then depends on the token, which biases the output: by enumeration, a probability of 0.90 becomes
    0.98. Here the head's largest probability decides, then the token is drawn. Greedy decoding is the same either way.
    """

    def __init__(self, heads: Heads, threshold: float, max_early: int) -> None:
        self.heads, self.threshold, self.max_depth = heads, threshold, max_early

    def draft(self, room: int) -> PassGenerator[Draft]:
        from ..early_exit import StagedPass

        context = self.context
        staged = StagedPass(context.runtime, context.buffer, context.root_slot)
        tokens = [context.token_ids[-1]]
        token_probs: list[Tensor] = []
        staged.add(tokens[0])
        while len(tokens) <= min(room, self.max_depth):
            prediction = yield from self._predict_token(staged, tokens[1:])
            if prediction is None:
                break
            token_id, probs = prediction
            if probs is not None:
                token_probs.append(probs)
            tokens.append(token_id)
            staged.add(token_id)
        tree = DraftTree.chain(tokens)
        return Draft(tree, offers_of(tree, token_probs), staged=staged.finish())

    def _predict_token(self, staged: StagedPass, drafted: list[int]) -> PassGenerator[tuple[int, Tensor | None] | None]:
        """Return the token of the first head above the threshold, and its distribution if sampled; None: no head is."""
        rule, heads = self.context.rule, self.heads
        for depth in heads.depths:
            yield from staged.advance(depth)
            logits = heads.logits(self.context.runtime, depth, staged.newest)[0]
            scores = self.context.scores(drafted, logits)
            token_id, confidence = rule.confidence(scores)
            if confidence > self.threshold:
                if rule.greedy:
                    return token_id, None
                probs = scores.double().softmax(dim=-1)
                return int(rule.draw_drafts(probs)), probs
        return None


@dataclass(slots=True)
class _Flight:
    """A token that is still passing through the layers; `is_predicted`: a head has predicted its successor."""

    token_id: int | Tensor  # Tensor (1,) while the device may still be computing the id.
    slot: int
    hidden: Tensor  # State (1, hidden_size) after `depth` layers.
    depth: int = 0
    is_predicted: bool = False


class PipelineDrafter(Drafter):
    """ParaDecode's early predictions: where a head's largest probability exceeds `threshold` (γ).

    With γ = 0, the first head predicts every token. The oldest token in flight reaches the last layer first. If the
    target's token there is the next one in flight, that one continues, else all are dropped. This is exact at every
    temperature, because the target's own draw is always the output.

    DEVIATION: the paper draws early tokens independently. Here they are drawn with the noise of the target's draw,
    which makes them more often equal to the target's token.
    """

    def __init__(self, heads: Heads, threshold: float, stacked: StackedLayers) -> None:
        self.heads, self.threshold, self.stacked = heads, threshold, stacked
        self.max_depth = -(-stacked.runtime.n_layers // heads.depths[0])

    def start(self) -> None:
        self._flights: list[_Flight] = []  # Tokens in flight; the oldest one, at the deepest layer, comes first.
        self._buffer = self.context.buffer  # The KV buffer that holds the flights' keys and values.

    def draft(self, room: int) -> PassGenerator[Draft]:
        import torch

        from ...models.transfers import uploaded

        yield from ()  # The stacked steps run here; only the pass of the model's head is batched with other requests.
        context = self.context
        root_id, slot = context.token_ids[-1], context.root_slot
        in_flight = [(flight.token_id, flight.slot) for flight in self._flights[:1]]
        if in_flight != [(root_id, slot)] or self._buffer is not context.buffer:
            self._flights, self._buffer = [self._start_flight(root_id, slot)], context.buffer
        while self._flights[0].depth < context.runtime.n_layers:
            self._predict_token(slot + room)
            self._advance_flights()
        staged = self._stage_flight(self._flights.pop(0))
        next_id = next((flight.token_id for flight in self._flights), None)
        if next_id is None or isinstance(next_id, int):
            tokens = [root_id] if next_id is None else [root_id, next_id]
            return Draft(DraftTree.chain(tokens), staged=staged, n_checked=1)
        chain = torch.cat((uploaded([root_id], next_id.device), next_id)).double()
        unread = torch.stack((chain, torch.zeros_like(chain)))
        return replace(Draft.of_unread(unread, [], staged), n_checked=1)

    def observe(self, outcome: Outcome) -> None:
        for flight, token_id in zip(self._flights[:1], outcome.draft.tree.token_ids[1:], strict=False):
            flight.token_id = token_id  # Replace the device tensor by the id, which is known by now.

    def _stage_flight(self, flight: _Flight) -> PassGenerator[Tensor]:
        """Return the logits (1, vocab) of a token that has run all layers, by a pass of the model's head alone."""
        from ...models.rows import Pass, Rows

        runtime, buffer, depth = self.context.runtime, self.context.buffer, flight.depth
        return (yield Pass(runtime, Rows([0], flight.slot), buffer, hidden=flight.hidden, layers=(depth, depth)))

    def _start_flight(self, token_id: int | Tensor, slot: int) -> _Flight:
        tokens = [token_id] if isinstance(token_id, int) else token_id
        return _Flight(token_id, slot, self.context.runtime.embed(tokens, slot))

    def _predict_token(self, last_slot: int) -> None:
        """Start the newest token's successor if a head predicts it confidently and a slot is free."""
        from ...decoding.context import likeliest

        newest, heads = self._flights[-1], self.heads
        if newest.is_predicted or newest.depth not in heads.transforms or newest.slot >= last_slot:
            return
        logits = heads.logits(self.context.runtime, newest.depth, newest.hidden)[0]
        drafted: list[Any] = [flight.token_id for flight in self._flights[1:]]
        scores = self.context.noisy_scores(drafted, logits)
        token_id: int | Tensor
        # Every confidence exceeds a threshold of 0, so the confidence need not be read from the device.
        if self.threshold == 0.0 and self.context.reads_late:
            token_id = likeliest(scores[None])[0].long()
        else:
            token_id, confidence = self.context.rule.confidence(scores)
            if not confidence > self.threshold:
                return
        newest.is_predicted = True
        self._flights.append(self._start_flight(token_id, newest.slot + 1))

    def _advance_flights(self) -> None:
        import torch

        flights = self._flights[::-1]
        hidden = torch.cat([flight.hidden for flight in flights])
        layers, slots = [flight.depth for flight in flights], [flight.slot for flight in flights]
        new_states = self.stacked.step(hidden, layers, slots, self.context.buffer)
        for row, flight in enumerate(flights):
            flight.hidden, flight.depth = new_states[row : row + 1], flight.depth + 1
