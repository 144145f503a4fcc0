"""One task of a served model: timings of plain and drafted rounds, the verdict that they give, and all its figures.

`TaskTraffic.status` computes the figures of a task; pages, `/v1/tuning` and `/metrics` show that record. What each
figure means is a table in docs/serving.md.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from operator import add

from ..core.events import PairKind, SearchStatus, ShiftStatus, TaskTuning, Way
from ..core.plainly import COMPARISON, WhyPlain
from ..core.records import FoundPlan, LayerSetRecord
from ..core.types import Completion, LayerSet, Verdict, VerdictWord
from ..decoding.events import Round
from ..decoding.load import Load
from ..models.runtime import Runtime
from ..optimizer.evaluation import SEARCH_SHARE
from ..optimizer.search import Search
from ..optimizer.shift import AcceptanceChart
from ..optimizer.task_state import TunedTask
from ..optimizer.verdict import Timed, judge, speed

LOOK_MARGIN = 1.5  # The search's share of the time must have room for a look that takes so many times as expected.
MAX_PAIRS = 20  # A verdict is made of so many of the latest pairs.
MIN_PAIRS = 6  # Fewer pairs give no verdict.
JUDGE_EVERY = 2  # There is a look after so many new pairs.
# The error of one look's interval. With no real gain the verdict is "use" in 3 % of runs of 50 requests, and in 5 % of
# runs of 100.
LOOK_ERROR = 0.005
COMPARED_ROUNDS: Mapping[VerdictWord, int] = {"unmeasured": 8, "plain": 4, "use": 2}  # The rounds of one comparison.
UNMEASURED = Verdict("unmeasured")

RoundPair = tuple[Timed, Timed]  # One request's plain rounds, and its drafted ones.


@dataclass(frozen=True, slots=True)
class Judgement:
    """One look at pairs of timings: the verdict, and the tokens per second that its ratio is the quotient of.

    `timed` says what the pairs are of: rounds of served requests, or a job's whole requests.
    """

    verdict: Verdict = UNMEASURED
    timed: PairKind | None = None
    n_pairs: int = 0
    plain_tok_s: float | None = None
    drafted_tok_s: float | None = None

    @classmethod
    def of_rounds(cls, pairs: Sequence[RoundPair]) -> Judgement:
        """Compare the time of drafted tokens with what plain decoding takes for as many of the same requests.

        Plain rounds are about as many in every request, drafted ones as many as it is long: long and short requests, of
        other speeds, would count in other shares on either side.
        """
        drafted = [rounds for _, rounds in pairs]
        plain = [Timed(rounds.tokens, base.seconds * rounds.tokens / base.tokens) for base, rounds in pairs]
        verdict = judge(drafted, plain, None, LOOK_ERROR)
        return cls(verdict, "rounds", len(pairs), speed(plain), speed(drafted))

    @classmethod
    def of_plan(cls, stored: FoundPlan) -> Judgement:
        """Return what a stored plan says of itself; its speeds where its own verdict's runs are stored."""
        plan, record = stored.plan, stored.plan.layer_set
        verdict = Verdict(plan.verdict, plan.measured_speedup, plan.measured_interval)
        if plan.measured_speedup is None:
            return cls(verdict)
        if record is None or not record.evidence or record.measured_speedup != plan.measured_speedup:
            return cls(verdict, "requests")
        runs = [(Timed(int(n), s), Timed(int(m), t)) for n, s, m, t in record.evidence]
        plain, drafted = (speed([pair[way] for pair in runs]) for way in (False, True))
        return cls(verdict, "requests", len(runs), plain, drafted)


@dataclass(frozen=True, slots=True)
class DraftedRounds:
    """What drafts have done: rounds, the tokens and the engine's seconds of these, draft steps, and accepted ones."""

    rounds: int = 0
    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    accepted: int = 0

    def __add__(self, other: DraftedRounds) -> DraftedRounds:
        return DraftedRounds(*map(add, astuple(self), astuple(other)))

    @property
    def acceptance_rate(self) -> float | None:
        """α; None if nothing was drafted."""
        return self.accepted / self.steps if self.steps else None

    @property
    def mean_generated_length(self) -> float | None:
        """M; None without a round."""
        return self.tokens / self.rounds if self.rounds else None


def _no_time() -> list[Timed]:
    return [Timed(0, 0.0), Timed(0, 0.0)]


@dataclass(slots=True)
class RoundTimings:
    """Tokens and seconds of one request's rounds, plain and drafted; `layer_set` is of their drafts.

    `alone` are the rounds beside which nothing was read, with the seconds that the request waited for them. `plain_s`
    and `drafted` are of all rounds, with the request's part of the engine's seconds: those of requests that run at once
    add up to the time that has passed. `is_drafted` is of the current round.

    Args: drafts: whether drafts are in use. compares: whether the request takes part in comparisons.
    """

    drafts: bool
    compares: bool
    layer_set: LayerSet
    alone: list[Timed] = field(default_factory=_no_time)
    plain_s: float = 0.0
    drafted: DraftedRounds = DraftedRounds()
    is_drafted: bool = False
    _n_beside: int = 0

    def begin(self, compared: range, compared_drafts: bool, load: Load) -> None:
        """Choose the way of the next round: in the target's `compared` passes the one that is compared."""
        self.is_drafted = compared_drafts if self.compares and load.n_checks in compared else self.drafts
        self._n_beside = load.n_beside

    def add(self, round_: Round) -> None:
        timed, load = Timed(len(round_.token_ids), round_.draft_s + round_.verify_s), round_.context.load
        seconds = timed.seconds / load.checked
        if self.is_drafted:
            self.drafted += DraftedRounds(1, timed.tokens, seconds, round_.n_steps, round_.n_accepted)
        else:
            self.plain_s += seconds
        if load.n_beside == self._n_beside:
            self.alone[self.is_drafted] += timed

    @property
    def why_plain(self) -> WhyPlain | None:
        """Why nothing was drafted although drafts are in use, as far as these rounds tell."""
        n_drafted, plain = self.drafted.rounds, self.plain_s
        return COMPARISON if self.drafts and plain and not n_drafted else None

    @property
    def pair(self) -> RoundPair | None:
        """The plain and the drafted rounds, where there were both."""
        plain, drafted = self.alone
        return (plain, drafted) if self.compares and plain.tokens and drafted.tokens else None


@dataclass(slots=True)
class TaskTraffic(TunedTask):
    """One task of a served model: what is known of its drafts, and which way is in use.

    `judged` is the latest look at the `pairs`, which are of the drafts of `paired`; `n_unjudged` of them came after it.
    `word` is the verdict on the drafts in use, which stays until the pairs say otherwise. No search begins before the
    plan was `looked_up`. `version` is the stored plan in use, and `best` the version that `best` meant at the latest
    look-up.

    `n_requests` have ended, with `n_tokens`. Their rounds took `seconds` of the engine, `compared_s` of these in rounds
    of the way that is not in use. `drafted` are rounds with the drafts in use, since these or the text changed;
    `saved_before_s` was saved by earlier drafts and on earlier text. The `slowest_look` took so many times as expected.
    `since` is when the way in use was chosen, in seconds since 1970, and `used_at` when the latest request came, in
    those of `time.monotonic`.
    """

    looked_up: bool = False
    version: int | None = None
    best: int | None = None
    word: VerdictWord = "unmeasured"
    judged: Judgement = Judgement()
    pairs: deque[RoundPair] = field(default_factory=lambda: deque(maxlen=MAX_PAIRS))
    paired: LayerSet | None = None
    n_unjudged: int = 0
    pinned: Way | None = None
    n_requests: int = 0
    n_tokens: int = 0
    seconds: float = 0.0
    compared_s: float = 0.0
    drafted: DraftedRounds = DraftedRounds()
    saved_before_s: float = 0.0
    search_s: float = 0.0
    slowest_look: float = LOOK_MARGIN
    stored_for: LayerSet | None = None
    since: float = field(default_factory=time.time)
    used_at: float = 0.0
    shifts: ShiftStatus = field(default_factory=ShiftStatus)

    @property
    def drafts(self) -> bool:
        """Whether drafts are in use: until they are known not to pay."""
        return self.pinned == "best" or (self.pinned is None and self.word != "plain")

    @property
    def why_plain(self) -> WhyPlain | None:
        """Why requests are decoded plainly; None: drafts are in use."""
        if self.drafts:
            return None
        if self.pinned is not None:
            return WhyPlain("pinned", f"the task {self.name!r} is pinned to plain decoding, by POST /v1/tuning:pin")
        words, verdict = f"drafts do not pay for the task {self.name!r}", self.judged.verdict
        if verdict.ratio is not None and verdict.interval is not None:
            low, high = verdict.interval
            words += f": measured at {verdict.ratio:.2f} times plain decoding's speed, {low:.2f} to {high:.2f}"
        return WhyPlain("verdict", words)

    @property
    def is_tuned(self) -> bool:
        """Whether there is something to lose: a stored plan in use, drafts that are known to pay, or a pin."""
        return self.version is not None or self.pinned is not None or self.word == "use"

    @property
    def n_compared_rounds(self) -> int:
        return 0 if self.pinned is not None else COMPARED_ROUNDS[self.word]

    @property
    def saved_s(self) -> float | None:
        """Seconds that plain decoding would have taken longer than the drafts in use; None: they are not judged."""
        ratio = self.judged.verdict.ratio
        return None if ratio is None else self.drafted.seconds * (ratio - 1)

    def may_search(self, expected_s: float) -> bool:
        """Whether the search's share of the time has room for a look that is expected to take so many seconds.

        There must be room for one that takes longer by as much as the slowest so far did.
        """
        has_room = self.search_s + self.slowest_look * expected_s <= SEARCH_SHARE * self.seconds
        return self.looked_up and self.pinned is None and has_room

    def count_look(self, seconds: float, expected_s: float) -> None:
        """Count a look at candidates that took `seconds`."""
        self.search_s += seconds
        self.slowest_look = max(self.slowest_look, seconds / expected_s)

    def count(self, completion: Completion) -> None:
        """Count a request that has ended."""
        self.n_requests += 1
        self.n_tokens += completion.n_tokens

    def count_rounds(self, rounds: RoundTimings) -> None:
        """Count the seconds of a request's rounds."""
        by_way = rounds.plain_s, rounds.drafted.seconds
        self.seconds += sum(by_way)
        self.compared_s += by_way[not rounds.drafts]
        if self.paired in (None, rounds.layer_set):
            self.drafted += rounds.drafted

    def add(self, rounds: RoundTimings) -> bool:
        """Learn from a request's rounds; returns whether the drafts are to be stored."""
        layer_set, pair = self.search.layer_set, rounds.pair
        if self.paired not in (None, layer_set):
            self.drop_pairs()
        self.paired = layer_set
        if pair is None or rounds.layer_set != layer_set:
            return False
        self.pairs.append(pair)
        self.n_unjudged += 1
        if len(self.pairs) < MIN_PAIRS or self.n_unjudged < JUDGE_EVERY:
            return False
        self._judge()
        verdict, before = self.judged.verdict, self.word
        assert verdict.interval is not None
        pays = verdict.word == "use"
        self.word = "use" if pays else "plain" if verdict.interval[1] < 1 else before
        if "plain" in (self.word, before) and self.word != before:
            self.since = time.time()
        return pays and (before != "use" or self.stored_for != layer_set)

    def _judge(self) -> None:
        self.judged, self.n_unjudged = Judgement.of_rounds(self.pairs), 0

    def drop_pairs(self) -> None:
        """Judge anew: another set drafts now, or the text has changed."""
        self.saved_before_s += self.saved_s or 0.0
        self.drafted, self.judged, self.n_unjudged = DraftedRounds(), Judgement(), 0
        self.pairs.clear()

    def use_plan(self, stored: FoundPlan, search: Search) -> None:
        """Use a stored plan's drafts, those of `search`, from the next request on.

        A set that a server stored while it searched is searched and judged further; a job's search is over.
        """
        record = stored.plan.layer_set
        self.search.finish("a stored plan is in use")
        self.search = search
        self.version, self.word, self.stored_for = stored.version, stored.plan.verdict, search.layer_set
        self.drop_pairs()
        self.paired = search.layer_set
        if record is not None and record.job is None and record.evidence:
            self.pairs += [(Timed(int(n), s), Timed(int(m), t)) for n, s, m, t in record.evidence]
            self._judge()
        else:
            self.judged = Judgement.of_plan(stored)
            search.finish("a stored plan is in use")
        self.shift.chart, self.shift.settled = AcceptanceChart(), False  # Requests in progress use the old drafts.

    def record_in_use(self, model: str, runtime: Runtime) -> LayerSetRecord:
        """Describe the drafts in use, with the verdict on them and what it is of; `model` is the name in use."""
        return replace(
            self.record(model, runtime, self.judged.verdict, self.pairs),
            acceptance_rate=_rounded(self.drafted.acceptance_rate, 4),
            mean_generated_length=_rounded(self.drafted.mean_generated_length, 4),
        )

    def status(self) -> TaskTuning:
        """Return the task's object of `GET /v1/tuning`."""
        judged, search = self.judged, self.search
        interval = judged.verdict.interval
        return TaskTuning(
            task=self.name,
            in_use="drafts" if self.drafts else "plain",
            since=round(self.since, 3),
            verdict=self.word,
            version=self.version,
            pinned=self.pinned,
            layer_set=search.layer_set,
            pairs=len(self.pairs) if judged.timed is None else judged.n_pairs,
            timed=judged.timed,
            ratio=_rounded(judged.verdict.ratio, 4),
            interval=None if interval is None else (round(interval[0], 4), round(interval[1], 4)),
            shifts=self.shifts,
            requests=self.n_requests,
            tokens=self.n_tokens,
            seconds=round(self.seconds, 3),
            compared_s=round(self.compared_s, 3),
            drafted_s=round(self.drafted.seconds, 3),
            saved_s=_rounded(self.saved_s, 3),
            saved_before_s=round(self.saved_before_s, 3),
            plain_tok_s=_rounded(judged.plain_tok_s, 4),
            drafted_tok_s=_rounded(judged.drafted_tok_s, 4),
            acceptance_rate=_rounded(self.drafted.acceptance_rate, 4),
            mean_generated_length=_rounded(self.drafted.mean_generated_length, 4),
            search=SearchStatus(
                trials=len(search.trials),
                seconds=round(self.search_s, 3),
                share=round(self.search_s / self.seconds, 4) if self.seconds else 0.0,
                matchness=search.matchness,
                ended=search.stopped_because or None,
                latest=search.trials[-1] if search.trials else None,
            ),
        )


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
