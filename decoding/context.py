"""What a request has committed so far, and when it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

from torch import Tensor

from ..core.types import FinishReason
from ..models.buffer import KVBuffer
from ..models.rows import Load
from ..models.runtime import Runtime
from .rule import TokenRule


@dataclass(slots=True)
class Tally:
    """Counts and seconds of a completion while it grows.

    `elapsed_s` is what passed before `started`, a reading of `perf_counter`: in a request that was cut and taken up
    again, the seconds of its earlier life.
    """

    rounds: int = 0  # passes of the target after the prefill
    drafted: int = 0
    accepted: int = 0
    widths: dict[int, int] = field(default_factory=dict)
    per_position: list[int] = field(default_factory=list)
    by_draft_length: dict[int, list[int]] = field(default_factory=dict)  # rounds by the tokens accepted
    refused: int = 0
    estimated: float | None = None  # cost of the rounds by the drafter's own estimate, in plain passes
    optimise_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    prefill_s: float = 0.0
    accepted_prediction: int = 0  # of the drafted tokens that came from the request's prediction
    rejected_prediction: int = 0
    n_cached: int = 0  # tokens of the prompt that an earlier request had read
    elapsed_s: float = 0.0
    started: float = field(default_factory=perf_counter)

    @property
    def total_s(self) -> float:
        """Seconds until now."""
        return self.elapsed_s + perf_counter() - self.started

    def add(self, n_steps: int, n_nodes: int, n_accepted: int, n_passes: int = 1) -> None:
        """Count a round and the passes of the target that it took."""
        self.rounds += n_passes
        self.drafted += n_steps
        self.accepted += n_accepted
        if n_nodes:  # a drafter that ran the target itself had passes of several widths
            self.widths[n_nodes] = self.widths.get(n_nodes, 0) + 1
        self.per_position += [0] * (n_steps - len(self.per_position))
        for position in range(n_accepted):
            self.per_position[position] += 1
        if n_steps:
            self.by_draft_length.setdefault(n_steps, [0] * (n_steps + 1))[n_accepted] += 1

    def copied(self, elapsed_s: float) -> Tally:
        """A copy whose clock goes on now from `elapsed_s`."""
        widths, per_position = dict(self.widths), list(self.per_position)
        by_draft_length = {n: list(rounds) for n, rounds in self.by_draft_length.items()}
        return replace(
            self,
            widths=widths,
            per_position=per_position,
            by_draft_length=by_draft_length,
            elapsed_s=elapsed_s,
            started=perf_counter(),
        )


@dataclass(frozen=True, slots=True)
class Begun:
    """A request that was cut between two passes: all that is needed to go on with it, in another process too.

    `token_ids` are those generated so far, at least one; `searched` says that the search of the round in progress is
    done; `finish` that nothing is left to decode.
    """

    token_ids: tuple[int, ...]
    tally: Tally
    searched: bool = False
    finish: FinishReason | None = None


@dataclass(slots=True)
class Context:
    """A request in flight.

    Slots 0 … n-2 of `buffer` hold the target's keys and values of `token_ids`; the last token, the root of the next
    draft, is not in it yet and will go to slot n-1, behind which drafts and scratch rows are written. `searched` and
    `finish` are as in `Begun`. `logprobs` says how many alternatives are wanted beside each token's log probability;
    None: not even that. `prediction` are tokens that the caller expects behind the prompt.
    """

    runtime: Runtime
    buffer: KVBuffer
    rule: TokenRule
    token_ids: list[int]
    n_prompt: int
    tally: Tally = field(default_factory=Tally)
    load: Load = field(default_factory=Load)  # of the engine that it runs in
    logprobs: int | None = None
    prediction: Sequence[int] = ()
    searched: bool = False
    finish: FinishReason | None = None

    @property
    def root_slot(self) -> int:
        """Where the last committed token's keys and values go."""
        return len(self.token_ids) - 1

    @property
    def generated(self) -> list[int]:
        """Tokens committed after the prompt."""
        return self.token_ids[self.n_prompt :]

    def scores(self, drafted: Sequence[int], logits: Tensor) -> Tensor:
        """`TokenRule.scores` of `logits` (vocab,) behind the committed tokens and the `drafted` ones."""
        return self.rule.scores([*self.token_ids, *drafted] if self.rule.processors else (), logits)

    def noisy_scores(self, drafted: Sequence[int], logits: Tensor) -> Tensor:
        """What the target's token behind the `drafted` ones would be the argmax of, were `logits` (vocab,) its own."""
        return self.rule.noisy(self.scores(drafted, logits), len(self.token_ids) + len(drafted))

    def later_choice(self, n_drafted: int, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the token after so many drafted ones and its log probability, both of shape () and on the device.

        They are those of `noisy_scores` of `logits` (vocab,), of a rule that reads no text.
        """
        scores = self.rule.noisy(self.rule.scores((), logits), len(self.token_ids) + n_drafted)
        top, token_id = scores.max(dim=-1)
        return token_id, top - scores.logsumexp(-1)

    def begun(self) -> Begun:
        """The request as it stands: to be asked for by those who watch, between the passes of a round."""
        return Begun(tuple(self.generated), self.tally.copied(self.tally.total_s), self.searched, self.finish)


@dataclass(frozen=True, slots=True)
class Ending:
    """When a completion is over: a stop token, a stop string, or the length.

    Neither stop tokens nor stop strings count before they end behind the first `min_new_tokens` tokens.
    """

    max_new_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    to_text: Callable[[Sequence[int]], str] | None = field(default=None, repr=False)
    min_new_tokens: int = 0

    def crop(self, generated: Sequence[int], block: Sequence[int]) -> tuple[list[int], FinishReason | None]:
        """As much of `block` as belongs to the completion, and why it ended there; None if it goes on."""
        room = self.max_new_tokens - len(generated)
        for n, token_id in enumerate(block[:room], 1):
            if len(generated) + n <= self.min_new_tokens:
                continue
            if token_id in self.stop_token_ids:
                return list(block[:n]), "stop"
            if self.stop_strings and self._has_stop([*generated, *block[:n]]):
                return list(block[:n]), "stop_string"
        return list(block[:room]), "length" if len(block) >= room else None

    def text(self, token_ids: Sequence[int]) -> str:
        """The completion as text, cut where the first stop string that counts begins; "" without a tokenizer."""
        if self.to_text is None:
            return ""
        text = self.to_text(token_ids)
        return text[: self._find(text, token_ids[: self.min_new_tokens])]

    def _find(self, text: str, free: Sequence[int]) -> int | None:
        """Where the first stop string begins that does not end within the text of the tokens `free`."""
        n_free = 0
        if self.stop_strings and free:
            assert self.to_text is not None  # built together with stop_strings
            n_free = len(self.to_text(free))
        found = [text.find(stop, max(0, n_free - len(stop) + 1)) for stop in self.stop_strings]
        return min((at for at in found if at >= 0), default=None)

    def _has_stop(self, token_ids: Sequence[int]) -> bool:
        """Whether the end of the text holds a stop string that counts, which its last token has completed."""
        assert self.to_text is not None  # built together with stop_strings
        # A token that shows is at least a byte of UTF-8; 8 more for special tokens and characters cut at the start.
        reach = max(len(stop.encode(errors="surrogatepass")) for stop in self.stop_strings) + 8
        tail = token_ids[-reach:]
        n_free = max(0, self.min_new_tokens - (len(token_ids) - len(tail)))
        return self._find(self.to_text(tail), tail[:n_free]) is not None
