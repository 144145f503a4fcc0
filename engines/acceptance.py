"""How often a draft is accepted where it is a model by itself, which computes its own keys and values.

In swiftopt a layer set drafts over the target's keys and values. Another engine has the set as a checkpoint of its own.
What that predicts after a committed text does not depend on rounds, so one pass over the target's own completion tells
all that any draft length would come to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..core.types import LayerSet, Prompt, Sampling
from ..decoding.methods import PLAIN
from ..decoding.session import Session
from ..models.rows import Rows
from ..models.runtime import Runtime
from ..models.saved import OnStep, no_step

NEW_TOKENS = 128  # of a prompt that does not say
CHUNK_ROWS = 256  # of a text that go through the model at once


@dataclass(frozen=True, slots=True)
class OwnAcceptance:
    """Per text, whether the draft model predicts each of the completion's tokens after the first."""

    matches: tuple[tuple[bool, ...], ...]

    def counts(self, length: int) -> tuple[int, int, int]:
        """Return rounds, drafted and accepted tokens with `length` draft tokens per round."""
        rounds = drafted = accepted = 0
        for own in self.matches:
            at = 0
            while at < len(own):
                offered = own[at : min(at + length, len(own) - 1)]  # the last token is the target's in any case
                right = offered.index(False) if False in offered else len(offered)
                rounds, drafted, accepted = rounds + 1, drafted + len(offered), accepted + right
                at += right + 1
        return rounds, drafted, accepted

    def rate(self, length: int) -> float:
        """Return accepted / drafted tokens."""
        _, drafted, accepted = self.counts(length)
        return accepted / drafted if drafted else 0.0

    def tokens_per_round(self, length: int) -> float:
        """Return the mean number of tokens that a round commits, the target's own included."""
        rounds, _, _ = self.counts(length)
        return sum(map(len, self.matches)) / rounds if rounds else 1.0


def own_acceptance(
    runtime: Runtime, prompts: Sequence[Prompt], layer_sets: Sequence[LayerSet], on_step: OnStep = no_step
) -> list[OwnAcceptance]:
    """Decode the prompts' first turns plainly and greedily, and see what a draft model of each set says to them.

    Raises: InvalidInput, ContextOverflow: a prompt cannot be decoded on this model.
    """
    session = Session(runtime, Sampling(), NEW_TOKENS)
    found: list[list[tuple[bool, ...]]] = [[] for _ in layer_sets]
    for number, prompt in enumerate(prompts, 1):
        on_step(f"measuring acceptance, prompt {number} of {len(prompts)}")
        first = replace(prompt, turns=prompt.turns[:1])
        (turn,) = session.run(first, PLAIN)
        before = session.encode(first)
        for own, layer_set in zip(found, layer_sets, strict=True):
            own.append(_matches(runtime, before, turn.completion.token_ids, layer_set))
    return [OwnAcceptance(tuple(own)) for own in found]


def _matches(
    runtime: Runtime, before: Sequence[int], completion: Sequence[int], layer_set: LayerSet
) -> tuple[bool, ...]:
    runtime.copies.prepare(layer_set)
    text = [*before, *completion]
    buffer = runtime.new_buffer(len(text))
    said: list[int] = []
    for start in range(0, len(text) - 1, CHUNK_ROWS):
        chunk = text[start : min(start + CHUNK_ROWS, len(text) - 1)]
        wanted = [row for row in range(len(chunk)) if start + row >= len(before)]
        logits = runtime.forward(Rows(chunk, start, variants=(layer_set,)), buffer, wanted or [0])
        said += logits.argmax(dim=-1).tolist() if wanted else []
    return tuple(token == own for token, own in zip(said, completion[1:], strict=True))
