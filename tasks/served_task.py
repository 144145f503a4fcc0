"""One task of a served model: timings of plain and drafted rounds, the verdict on its drafts, and its figures.

`TaskTraffic.status` computes the figures of a task, which pages, `/v1/tuning` and `/metrics` show. docs/serving.md
defines each figure.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from operator import add

from ..core.events import PairKind, SearchStatus, ShiftStatus, TaskTuning, Way
from ..core.layer_sets import LayerSet
from ..core.plainly import COMPARISON, WhyPlain
from ..core.records import FoundPlan, LayerSetRecord
from ..core.types import Completion, TokenSource, Verdict, VerdictWord
from ..decoding.draft import Draft, Drafter, Outcome
from ..decoding.events import Round
from ..decoding.load import Load
from ..decoding.methods import PLAIN, Method
from ..decoding.work import PassGenerator
from ..models.coded_slots import SlotCoding
from ..models.runtime import Runtime
from ..optimizer.evaluation import SEARCH_TIME_SHARE
from ..optimizer.search import Search
from ..optimizer.shift import AcceptanceChart
from ..optimizer.task_state import TunedTask
from ..optimizer.verdict import Timed, judge, speed

INITIAL_OVERRUN = 1.5  # Initial safety factor on the expected time of scoring candidates, see `TaskTraffic.may_search`.
MAX_PAIRS = 20  # Verdicts use at most this many of the latest pairs of timings.
MIN_PAIRS = 6  # Pairs of timings that a verdict needs.
JUDGE_EVERY = 2  # New pairs of timings between two verdicts.
# Error probability of a single verdict's interval. It is small because verdicts are repeated as pairs arrive: without a
# real gain, one of them is "use" in 3 % of runs of 50 requests and in 5 % of runs of 100.
VERDICT_ERROR = 0.005
COMPARED_ROUNDS: Mapping[VerdictWord, int] = {"unmeasured": 8, "plain": 4, "use": 2}  # Rounds per comparison.
UNMEASURED = Verdict("unmeasured")

RoundPair = tuple[Timed, Timed]  # (plain rounds, drafted rounds) of one request.


class SwitchedDrafter(Drafter):
    """Drafts with `method` if `is_drafted()` is true when a round begins, else decodes the round plainly.

    `method` may be replaced until the prompt is read.
    """

    def __init__(self, method: Method, is_drafted: Callable[[], bool]) -> None:
        self.method, self._is_drafted = method, is_drafted

    @property
    def layer_set(self) -> LayerSet | None:
        return self.method.layer_set

    @property
    def slot_bytes(self) -> int:
        return self.method.drafter.slot_bytes

    def coding(self, runtime: Runtime, capacity: int) -> SlotCoding | None:
        return self.method.drafter.coding(runtime, capacity)

    @property
    def reads_states(self) -> bool:
        return self.method.drafter.reads_states

    def attach(self, runtime: Runtime) -> None:
        self.method.drafter.attach(runtime)

    def max_rows(self, room: int) -> int:
        return self.method.drafter.max_rows(room)

    def start(self) -> None:
        self.attach(self.context.runtime)  # The method may have been replaced since the last call.
        self._drafter, self._plain = (method.drafter.begin(self.context) for method in (self.method, PLAIN))
        self._current = self._plain

    def draft(self, room: int) -> PassGenerator[Draft]:
        self._current = self._drafter if self._is_drafted() else self._plain
        return (yield from self._current.draft(room))

    def guesses_behind(self, token_ids: Sequence[int], room: int) -> Sequence[tuple[int, TokenSource]]:
        return self._drafter.guesses_behind(token_ids, room) if self._is_drafted() else ()

    def observe(self, outcome: Outcome) -> None:
        self._current.observe(outcome)


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict on pairs of timings, with both speeds in tokens per second; its ratio is their quotient."""

    verdict: Verdict = UNMEASURED
    timed: PairKind | None = None  # What a pair timed: rounds of a served request, or whole requests of a job.
    n_pairs: int = 0
    plain_tok_s: float | None = None
    drafted_tok_s: float | None = None

    @classmethod
    def of_rounds(cls, pairs: Sequence[RoundPair]) -> Judgement:
        """Compare the time of the drafted tokens with plain decoding's time for as many tokens of the same requests.

        Both sides are weighted by drafted tokens. All requests have about the same number of plain rounds, while the
        number of drafted rounds grows with the length: sums of the plain rounds would weight long requests, whose speed
        differs, less than sums of the drafted rounds do.
        """
        drafted_timings = [drafted for _, drafted in pairs]
        plain_timings = [
            Timed(drafted.tokens, plain.seconds * drafted.tokens / plain.tokens) for plain, drafted in pairs
        ]
        verdict = judge(drafted_timings, plain_timings, None, VERDICT_ERROR)
        return cls(verdict, "rounds", len(pairs), speed(plain_timings), speed(drafted_timings))

    @classmethod
    def of_plan(cls, stored_plan: FoundPlan) -> Judgement:
        """Return the verdict of a stored plan, with its speeds if its runs are stored."""
        plan, record = stored_plan.plan, stored_plan.plan.layer_set
        verdict = Verdict(plan.verdict, plan.measured_speedup, plan.measured_interval)
        if plan.measured_speedup is None:
            return cls(verdict)
        if record is None or not record.evidence or record.measured_speedup != plan.measured_speedup:
            return cls(verdict, "requests")
        plain, drafted = zip(*_pairs_of(record), strict=True)
        return cls(verdict, "requests", len(plain), speed(plain), speed(drafted))


@dataclass(frozen=True, slots=True)
class DraftedRounds:
    """Totals of drafted rounds: their number, tokens, engine seconds, draft steps and accepted draft tokens."""

    rounds: int = 0
    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    accepted: int = 0

    def __add__(self, other: DraftedRounds) -> DraftedRounds:
        return DraftedRounds(*map(add, astuple(self), astuple(other)))

    @property
    def acceptance_rate(self) -> float | None:
        """Acceptance rate α; None if nothing was drafted."""
        return self.accepted / self.steps if self.steps else None

    @property
    def mean_generated_length(self) -> float | None:
        """Tokens per round, M; None without a round."""
        return self.tokens / self.rounds if self.rounds else None


def _no_time() -> list[Timed]:
    return [Timed(0, 0.0), Timed(0, 0.0)]


@dataclass(slots=True)
class RoundTimings:
    """Tokens and seconds of one request's rounds, plain and drafted.

    `alone` counts the rounds during which the engine read no prompt and scored no candidate, with the seconds that the
    request waited for them. `plain_s` and `drafted` count all rounds, with the request's share of the engine's seconds:
    the shares of concurrent requests add up to the elapsed time.
    """

    drafts: bool  # Whether drafts are in use.
    compares: bool  # Whether the request takes part in comparisons.
    layer_set: LayerSet  # Of the drafts.
    alone: list[Timed] = field(default_factory=_no_time)  # Plain rounds, drafted rounds.
    plain_s: float = 0.0
    drafted: DraftedRounds = DraftedRounds()
    is_drafted: bool = False  # Whether the current round drafts.
    context_bucket: int = 0  # Of the request's prompt.
    _n_beside: int = 0  # `Load.n_beside` when the current round began.

    def begin(self, compared_passes: range, compared_drafts: bool, load: Load) -> None:
        """Choose whether the next round drafts; during the target's `compared_passes`, the comparison decides."""
        self.is_drafted = compared_drafts if self.compares and load.n_checks in compared_passes else self.drafts
        self._n_beside = load.n_beside

    def add(self, round_: Round) -> None:
        """Count the current round, which has finished."""
        timing = Timed(len(round_.token_ids), round_.draft_s + round_.verify_s)
        if self.is_drafted:
            self.drafted += DraftedRounds(1, timing.tokens, round_.shared_s, round_.n_steps, round_.n_accepted)
        else:
            self.plain_s += round_.shared_s
        if round_.context.load.n_beside == self._n_beside:
            self.alone[self.is_drafted] += timing

    @property
    def why_plain(self) -> WhyPlain | None:
        """Why no round drafted although drafts are in use: all were the plain rounds of a comparison."""
        return COMPARISON if self.drafts and self.plain_s and not self.drafted.rounds else None

    @property
    def pair(self) -> RoundPair | None:
        """Timings of the plain and of the drafted rounds, if there were both and the request takes part."""
        plain, drafted = self.alone
        return (plain, drafted) if self.compares and plain.tokens and drafted.tokens else None


@dataclass(slots=True)
class ContextVerdicts:
    """Verdicts on drafts by context bucket, for buckets with enough timed requests."""

    pairs: dict[int, deque[RoundPair]] = field(default_factory=dict)  # The latest pairs.
    words: dict[int, VerdictWord] = field(default_factory=dict)
    n_added: dict[int, int] = field(default_factory=dict)  # Number of pairs added so far.

    def add(self, bucket: int, pair: RoundPair) -> None:
        """Add a request's pair of timings; judge the bucket's latest pairs after every `JUDGE_EVERY` of them."""
        pairs = self.pairs.setdefault(bucket, deque(maxlen=MAX_PAIRS))
        pairs.append(pair)
        self.n_added[bucket] = self.n_added.get(bucket, 0) + 1
        if len(pairs) < MIN_PAIRS or self.n_added[bucket] % JUDGE_EVERY:
            return
        verdict = Judgement.of_rounds(pairs).verdict
        if verdict.word == "use":
            self.words[bucket] = "use"
        elif verdict.interval is not None and verdict.interval[1] < 1:
            self.words[bucket] = "plain"


@dataclass(slots=True)
class TaskTraffic(TunedTask):
    """One task of a served model: its drafts, the verdict on them, and its figures."""

    # Whether the stored plan was looked up; no search begins before.
    looked_up: bool = False
    version: int | None = None  # The stored plan in use.
    best: int | None = None  # The version that the alias `best` meant at the latest lookup.
    stored_set: LayerSet | None = None  # The layer set of the stored plan in use.
    pinned: Way | None = None

    # The verdict in force for the drafts in use, until newer pairs contradict it.
    word: VerdictWord = "unmeasured"
    judged: Judgement = Judgement()  # The latest verdict on `pairs`.
    pairs: deque[RoundPair] = field(default_factory=lambda: deque(maxlen=MAX_PAIRS))
    paired: LayerSet | None = None  # The layer set with which the pairs were timed.
    n_unjudged: int = 0  # Pairs since the latest verdict.
    by_context: ContextVerdicts = field(default_factory=ContextVerdicts)

    n_requests: int = 0  # Requests that have ended.
    n_tokens: int = 0  # Their tokens.
    seconds: float = 0.0  # Engine seconds of their rounds.
    compared_s: float = 0.0  # Of these, seconds of rounds in the mode (drafted or plain) that is not in use.
    drafted: DraftedRounds = DraftedRounds()  # With the drafts in use, since these or the text changed.
    saved_before_s: float = 0.0  # Seconds saved by earlier drafts and on earlier text.
    search_s: float = 0.0  # Seconds of scoring candidates.
    max_overrun: float = INITIAL_OVERRUN  # Largest ratio of measured to expected seconds of scoring candidates.
    since: float = field(default_factory=time.time)  # When the mode in use was chosen, in seconds since 1970.
    used_at: float = 0.0  # When the latest request came, on the monotonic clock.
    shifts: ShiftStatus = field(default_factory=ShiftStatus)

    @property
    def drafts(self) -> bool:
        """Whether drafts are in use; they are until they are measured not to pay."""
        return self._allows_drafts(self.word)

    def _allows_drafts(self, word: VerdictWord) -> bool:
        return self.pinned == "best" or (self.pinned is None and word != "plain")

    def word_at(self, bucket: int) -> VerdictWord:
        """Return the verdict for contexts of that bucket, or the verdict for all contexts if the bucket has none."""
        return self.by_context.words.get(bucket, self.word)

    def drafts_at(self, bucket: int) -> bool:
        """Tell whether drafts are in use in contexts of that bucket."""
        return self._allows_drafts(self.word_at(bucket))

    def compared_rounds_at(self, bucket: int) -> int:
        """Return how many rounds a comparison has in contexts of that bucket."""
        return 0 if self.pinned is not None else COMPARED_ROUNDS[self.word_at(bucket)]

    def why_plain_at(self, bucket: int) -> WhyPlain | None:
        """Return why requests in contexts of that bucket are decoded without drafts; None if drafts are in use."""
        if self.drafts_at(bucket):
            return None
        if self.pinned is None and self.word != "plain":
            place = f"the task {self.name!r} in contexts of up to {bucket:,} tokens"
            return WhyPlain("verdict", f"drafts do not pay for {place}, as measured")
        return self.why_plain

    @property
    def why_plain(self) -> WhyPlain | None:
        """Why requests are decoded without drafts; None if drafts are in use."""
        if self.drafts:
            return None
        if self.pinned is not None:
            return WhyPlain("pinned", f"the task {self.name!r} is pinned to plain decoding, by POST /v1/tuning:pin")
        reason, verdict = f"drafts do not pay for the task {self.name!r}", self.judged.verdict
        if verdict.ratio is not None and verdict.interval is not None:
            lowest, highest = verdict.interval
            reason += f": measured at {verdict.ratio:.2f} times plain decoding's speed, {lowest:.2f} to {highest:.2f}"
        return WhyPlain("verdict", reason)

    @property
    def is_tuned(self) -> bool:
        """Whether the task has state worth keeping: a stored plan in use, drafts that pay, or a pin."""
        return self.version is not None or self.pinned is not None or self.word == "use"

    @property
    def saved_s(self) -> float | None:
        """Seconds that the drafts in use saved against plain decoding; None without a verdict on them."""
        ratio = self.judged.verdict.ratio
        return None if ratio is None else self.drafted.seconds * (ratio - 1)

    def saved_by(self, rounds: RoundTimings) -> float:
        """Return the seconds that a request's drafts saved, by the current ratio; 0 without a verdict on them."""
        ratio = self.judged.verdict.ratio if rounds.layer_set == self.search.layer_set else None
        return 0.0 if ratio is None else rounds.drafted.seconds * (ratio - 1)

    def may_search(self, expected_s: float) -> bool:
        """Tell whether the search's share of the time allows scoring candidates for `expected_s` seconds.

        The expected time is multiplied by the largest overrun so far.
        """
        fits_share = self.search_s + self.max_overrun * expected_s <= SEARCH_TIME_SHARE * self.seconds
        return self.looked_up and self.pinned is None and fits_share

    def count_scoring(self, seconds: float, expected_s: float) -> None:
        """Record that scoring candidates took `seconds`, where `expected_s` were expected."""
        self.search_s += seconds
        self.max_overrun = max(self.max_overrun, seconds / expected_s)

    def count(self, completion: Completion) -> None:
        """Count a request that has ended."""
        self.n_requests += 1
        self.n_tokens += completion.n_tokens

    def count_rounds(self, rounds: RoundTimings) -> None:
        """Count the seconds of a request's rounds."""
        plain_and_drafted_s = rounds.plain_s, rounds.drafted.seconds
        self.seconds += sum(plain_and_drafted_s)
        self.compared_s += plain_and_drafted_s[not rounds.drafts]
        if self.paired in (None, rounds.layer_set):
            self.drafted += rounds.drafted

    def add(self, rounds: RoundTimings) -> bool:
        """Add a request's rounds to the verdict; return whether to store the drafts as a new version."""
        layer_set, pair = self.search.layer_set, rounds.pair
        if self.paired not in (None, layer_set):
            self.drop_pairs()
        self.paired = layer_set
        if pair is None or rounds.layer_set != layer_set:
            return False
        self.pairs.append(pair)
        self.by_context.add(rounds.context_bucket, pair)
        self.n_unjudged += 1
        if len(self.pairs) < MIN_PAIRS or self.n_unjudged < JUDGE_EVERY:
            return False
        self._judge()
        verdict, previous_word = self.judged.verdict, self.word
        assert verdict.interval is not None
        is_faster = verdict.word == "use"
        self.word = "use" if is_faster else "plain" if verdict.interval[1] < 1 else previous_word
        if "plain" in (self.word, previous_word) and self.word != previous_word:
            self.since = time.time()
        return is_faster and (previous_word != "use" or self.stored_set != layer_set)

    def _judge(self) -> None:
        self.judged, self.n_unjudged = Judgement.of_rounds(self.pairs), 0

    def drop_pairs(self) -> None:
        """Discard the timings: another layer set drafts now, or the text has changed."""
        self.saved_before_s += self.saved_s or 0.0
        self.drafted, self.judged, self.n_unjudged = DraftedRounds(), Judgement(), 0
        self.pairs.clear()
        self.by_context = ContextVerdicts()

    def use_plan(self, stored_plan: FoundPlan, search: Search) -> None:
        """Use a stored plan from the next request on; `search` begins with its layer set.

        If a server stored the plan, search and verdicts go on. A plan from a job is used unchanged.
        """
        record = stored_plan.plan.layer_set
        self.search.finish("a stored plan is in use")
        self.search = search
        self.version, self.word, self.stored_set = stored_plan.version, stored_plan.plan.verdict, search.layer_set
        self.drop_pairs()
        self.paired = search.layer_set
        if record is not None and record.job is None and record.evidence:
            self.pairs += _pairs_of(record)
            self._judge()
        else:
            self.judged = Judgement.of_plan(stored_plan)
            search.finish("a stored plan is in use")
        # Requests in progress still use the old drafts, whose acceptance must not count in the new chart.
        self.shift.chart, self.shift.settled = AcceptanceChart(), False

    def record_in_use(self, model: str, runtime: Runtime) -> LayerSetRecord:
        """Return the record of the drafts in use with their verdict and its timings; `model` is the served name."""
        return replace(
            self.record(model, runtime, self.judged.verdict, self.pairs),
            acceptance_rate=_round(self.drafted.acceptance_rate, 4),
            mean_generated_length=_round(self.drafted.mean_generated_length, 4),
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
            ratio=_round(judged.verdict.ratio, 4),
            interval=None if interval is None else (round(interval[0], 4), round(interval[1], 4)),
            shifts=self.shifts,
            requests=self.n_requests,
            tokens=self.n_tokens,
            seconds=round(self.seconds, 3),
            compared_s=round(self.compared_s, 3),
            drafted_s=round(self.drafted.seconds, 3),
            saved_s=_round(self.saved_s, 3),
            saved_before_s=round(self.saved_before_s, 3),
            plain_tok_s=_round(judged.plain_tok_s, 4),
            drafted_tok_s=_round(judged.drafted_tok_s, 4),
            acceptance_rate=_round(self.drafted.acceptance_rate, 4),
            mean_generated_length=_round(self.drafted.mean_generated_length, 4),
            search=SearchStatus(
                trials=len(search.trials),
                seconds=round(self.search_s, 3),
                share=round(self.search_s / self.seconds, 4) if self.seconds else 0.0,
                matchness=search.matchness,
                ended=search.stopped_because or None,
                latest=search.trials[-1] if search.trials else None,
            ),
        )


def _pairs_of(record: LayerSetRecord) -> list[RoundPair]:
    """Return the stored timings that the verdict of a layer set is based on."""
    return [
        (Timed(int(plain_tokens), plain_s), Timed(int(drafted_tokens), drafted_s))
        for plain_tokens, plain_s, drafted_tokens, drafted_s in record.evidence
    ]


def _round(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
