"""Measures how many tokens of recorded answers of coding agents each drafter predicts.

The target is forced to choose the recorded tokens, so every drafter is measured on the same real text. Its passes still
run, because drafts of the model itself read its keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from ..core.settings import STORED
from ..core.types import Completion, Sampling
from ..decoding.context import TokenRule
from ..decoding.corpus import LEAD_TOKENS, Corpora
from ..decoding.engine import Engine
from ..decoding.events import Prefilled, WorkEvent
from ..decoding.loop import decoding
from ..decoding.methods import Method, build
from ..decoding.methods.adaptive import AdaptiveSettings
from ..decoding.session import Session
from ..decoding.work import subscribed
from ..models.costs import memory_for_texts
from ..models.runtime import Runtime
from ..store import Store
from ..tasks.recipes import Recipes
from ..tasks.traffic import CORPUS_BYTES
from .conversations import RecordedConversation, RecordedTurn

TASK = "agents"


class RecordedText(LogitsProcessor):
    """Allows only the recorded token at each position; it is applied to the target and not to drafts."""

    def __init__(self, n_prompt: int, answer_ids: Sequence[int]) -> None:
        self.n_prompt, self.answer_ids = n_prompt, answer_ids

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores (1, vocab) that are finite only at the recorded token after `input_ids` (1, tokens).

        A draft may reach beyond the end of the recorded answer, where scores are returned unchanged.
        """
        position = input_ids.shape[1] - self.n_prompt
        if position >= len(self.answer_ids):
            return scores
        return torch.full_like(scores, float("-inf")).index_fill_(1, torch.tensor([self.answer_ids[position]]), 0.0)


def recorded_rule(turn: RecordedTurn) -> TokenRule:
    """Return a rule by which the target chooses the recorded tokens, and drafts choose freely."""
    processors = LogitsProcessorList([RecordedText(len(turn.prompt_ids), turn.answer_ids)])
    return TokenRule(Sampling(), processors, LogitsProcessorList())


MethodOf = Callable[[], Method]  # Makes a new method, which has learnt nothing.


def drafters(runtime: Runtime, store: Store | None, on_step: Callable[[str], None]) -> Mapping[str, MethodOf]:
    """Return the drafters by name: prompt lookup, earlier text alone, and text with a 4-bit copy of the model.

    The latter two choose drafts by measured costs, as for a task without a stored plan.
    """
    formats = {"text": STORED, "text and model": AdaptiveSettings().draft_format}
    settings = {name: AdaptiveSettings(draft_format=format_name) for name, format_name in formats.items()}
    recipe = Recipes(runtime, store, on_step=on_step).of("adaptive", TASK, settings={"draft_format": "int4"})
    adaptive = {name: partial(build, "adaptive", recipe.parts, chosen) for name, chosen in settings.items()}
    return {"prompt lookup": partial(build, "prompt-lookup", recipe.parts), **adaptive}


@dataclass(frozen=True, slots=True)
class DraftedAnswer:
    """How a drafter predicted a recorded answer: the `tokens` after the first one took `rounds` of the target.

    `drafted` tokens were proposed, of which `accepted` were right. `seconds`: duration of the rounds.
    """

    conversation: str
    length: int
    turn: int
    n_prompt: int
    tokens: int
    rounds: int
    drafted: int
    accepted: int
    seconds: float

    @classmethod
    def of(cls, conversation: RecordedConversation, turn: int, completion: Completion) -> DraftedAnswer:
        n_tokens, timings = len(completion.token_ids) - 1, completion.timings
        counts = completion.target_passes, completion.drafted, completion.accepted
        seconds = timings.draft_s + timings.verify_s
        return cls(
            *(conversation.id, conversation.length, turn, completion.n_prompt_tokens, n_tokens),
            *counts,
            round(seconds, 4),
        )


def measure(
    runtime: Runtime,
    conversations: Sequence[RecordedConversation],
    methods: Mapping[str, MethodOf],
    max_tokens: int,
    results: Mapping[str, list[DraftedAnswer]],
    on_run: Callable[[str], None],
) -> None:
    """Run each drafter on every turn, cut at `max_tokens` tokens, and append the outcomes to its list in `results`.

    A drafter starts anew with each conversation and learns from its turns. As for a served task, its corpus contains
    the finished answers of all conversations so far.
    """
    engine = Engine(memory_for_texts(runtime), at_once=1)
    session = Session(runtime, Sampling(), 1, ignore_eos=True)
    corpora = {name: Corpora(CORPUS_BYTES) for name in methods}
    for conversation in conversations:
        for name, method_of in methods.items():
            method = method_of()

            def give_corpus(event: WorkEvent, name: str = name) -> None:
                if isinstance(event, Prefilled):
                    event.context.corpus = corpora[name].of("", TASK)

            for i, recorded in enumerate(conversation.turns):
                turn = RecordedTurn(recorded.prompt_ids, recorded.answer_ids[:max_tokens])
                ending = session.ending(len(turn.answer_ids))
                work = decoding(runtime, turn.prompt_ids, method, recorded_rule(turn), ending)
                request = engine.add(subscribed(work, give_corpus))
                while engine.requests:
                    list(engine.step())
                completion = request.result
                assert completion.token_ids == turn.answer_ids
                corpora[name].add("", TASK, turn.prompt_ids[-LEAD_TOKENS:], turn.answer_ids)
                results[name].append(DraftedAnswer.of(conversation, i, completion))
                on_run(f"{conversation.id}, turn {i + 1}, {name}: {rate_words(results[name][-1:])}")


def figures(runs: Sequence[DraftedAnswer]) -> dict[str, Any]:
    """Return sums over the runs, tokens per round, and the shares of tokens and of drafted tokens that were right.

    "foreseen" is the share of the answers' tokens that were drafted.
    """
    tokens, rounds = sum(run.tokens for run in runs), sum(run.rounds for run in runs)
    drafted, accepted = sum(run.drafted for run in runs), sum(run.accepted for run in runs)
    return {
        "answers": len(runs),
        "tokens": tokens,
        "tokens_per_round": round(tokens / rounds, 4) if rounds else None,
        "foreseen": round(accepted / tokens, 4) if tokens else None,
        "acceptance": round(accepted / drafted, 4) if drafted else None,
        "seconds": round(sum(run.seconds for run in runs), 3),
    }


def rate_words(runs: Sequence[DraftedAnswer]) -> str:
    rates = figures(runs)
    if not rates["tokens"]:
        return "one token"
    return f"{rates['tokens_per_round']:.2f} tokens per round, {rates['foreseen']:.0%} foreseen"


def latter_half(runs: Sequence[DraftedAnswer]) -> list[DraftedAnswer]:
    """Return the runs on the second half of each conversation's turns."""
    n_turns: dict[tuple[str, int], int] = {}
    for run in runs:
        key = run.conversation, run.length
        n_turns[key] = max(n_turns.get(key, 0), run.turn + 1)
    return [run for run in runs if 2 * run.turn >= n_turns[run.conversation, run.length]]
