"""One task of a served model: timings of plain and drafted rounds, the verdict on drafting, and its figures.

`TaskTraffic.status` computes the figures of a task; pages, `/v1/tuning` and `/metrics` show that record. What each
figure means is a table in docs/serving.md.
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

LOOK_MARGIN = 1.5  # Initial safety factor on the expected time of scoring candidates, see `TaskTraffic.may_search`.
MAX_PAIRS = 20  # Verdicts use at most this many of the latest pairs of timings.
MIN_PAIRS = 6  # Pairs of timings that a verdict needs.
JUDGE_EVERY = 2  # New pairs of timings between two verdicts.
# Error probability of the confidence interval of a single verdict. Verdicts are repeated as pairs arrive: with no real
# gain, one of them is "use" in 3 % of runs of 50 requests and in 5 % of runs of 100.
LOOK_ERROR = 0.005
COMPARED_ROUNDS: Mapping[VerdictWord, int] = {"unmeasured": 8, "plain": 4, "use": 2}  # Rounds per comparison.
UNMEASURED = Verdict("unmeasured")

RoundPair = tuple[Timed, Timed]  # (plain rounds, drafted rounds) of one request.


class SwitchedDrafter(Drafter):
    """Drafts with `method` if `drafts()` is true when a round begins, else decodes the round plainly.

    `method` may be replaced until the prompt is read.
    """

    def __init__(self, method: Method, drafts: Callable[[], bool]) -> None:
        self.method, self._drafts = method, drafts

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
        self.attach(self.context.runtime)  # The method may be another one than before the prompt was read.
        self._drafter, self._plain = (method.drafter.begin(self.context) for method in (self.method, PLAIN))
        self._current = self._plain

    def draft(self, room: int) -> PassGenerator[Draft]:
        self._current = self._drafter if self._drafts() else self._plain
        return (yield from self._current.draft(room))

    def guesses_behind(self, token_ids: Sequence[int], room: int) -> Sequence[tuple[int, TokenSource]]:
        return self._drafter.guesses_behind(token_ids, room) if self._drafts() else ()

    def observe(self, outcome: Outcome) -> None:
        self._current.observe(outcome)


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict on pairs of timings, with both speeds in tokens per second, whose quotient is its ratio.

    `timed` says what each pair timed: rounds of a served request, or a job's whole request.
    """

    verdict: Verdict = UNMEASURED
    timed: PairKind | None = None
    n_pairs: int = 0
    plain_tok_s: float | None = None
    drafted_tok_s: float | None = None

    @classmethod
    def of_rounds(cls, pairs: Sequence[RoundPair]) -> Judgement:
        """Compare the time of drafted tokens with plain decoding's time for as many tokens of the same requests.

        Weight both sides by drafted tokens: every request has about as many plain rounds, but drafted rounds grow with
        its length. Plain totals would give long requests, whose speed differs, another weight than drafted totals.
        """
        drafted_timings = [rounds for _, rounds in pairs]
        plain_timings = [
            Timed(rounds.tokens, plain_rounds.seconds * rounds.tokens / plain_rounds.tokens)
            for plain_rounds, rounds in pairs
        ]
        verdict = judge(drafted_timings, plain_timings, None, LOOK_ERROR)
        return cls(verdict, "rounds", len(pairs), speed(plain_timings), speed(drafted_timings))

    @classmethod
    def of_plan(cls, stored_plan: FoundPlan) -> Judgement:
        """Return a stored plan's own verdict, with its speeds if its runs are stored."""
        plan, record = stored_plan.plan, stored_plan.plan.layer_set
        verdict = Verdict(plan.verdict, plan.measured_speedup, plan.measured_interval)
        if plan.measured_speedup is None:
            return cls(verdict)
        if record is None or not record.evidence or record.measured_speedup != plan.measured_speedup:
            return cls(verdict, "requests")
        runs = [(Timed(int(n), s), Timed(int(m), t)) for n, s, m, t in record.evidence]
        plain_tok_s, drafted_tok_s = (speed([pair[is_drafted] for pair in runs]) for is_drafted in (False, True))
        return cls(verdict, "requests", len(runs), plain_tok_s, drafted_tok_s)


@dataclass(frozen=True, slots=True)
class DraftedRounds:
    """Totals of drafted rounds: rounds, their tokens and engine seconds, draft steps, accepted draft tokens."""

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
    """Tokens and seconds of one request's rounds, plain and drafted; `layer_set` is of their drafts.

    `alone` are rounds during which no prompt was read, with the seconds that the request waited for them. `plain_s` and
    `drafted` cover all rounds, with the request's share of the engine's seconds: the shares of concurrent requests add
    up to the elapsed time. `is_drafted` describes the current round.

    Args: drafts: whether drafts are in use. compares: whether the request takes part in comparisons. context_bucket: of
          the request's prompt.
    """

    drafts: bool
    compares: bool
    layer_set: LayerSet
    alone: list[Timed] = field(default_factory=_no_time)
    plain_s: float = 0.0
    drafted: DraftedRounds = DraftedRounds()
    is_drafted: bool = False
    context_bucket: int = 0
    _n_beside: int = 0

    def begin(self, compared_passes: range, compared_drafts: bool, load: Load) -> None:
        """Choose whether the next round drafts; during the target's `compared_passes`, the comparison decides."""
        self.is_drafted = compared_drafts if self.compares and load.n_checks in compared_passes else self.drafts
        self._n_beside = load.n_beside

    def add(self, finished_round: Round) -> None:
        timing, load = (
            Timed(len(finished_round.token_ids), finished_round.draft_s + finished_round.verify_s),
            finished_round.context.load,
        )
        seconds = finished_round.shared_s
        if self.is_drafted:
            self.drafted += DraftedRounds(1, timing.tokens, seconds, finished_round.n_steps, finished_round.n_accepted)
        else:
            self.plain_s += seconds
        if load.n_beside == self._n_beside:
            self.alone[self.is_drafted] += timing

    @property
    def why_plain(self) -> WhyPlain | None:
        """Why nothing was drafted although drafts are in use, judging by these rounds."""
        n_drafted, plain_s = self.drafted.rounds, self.plain_s
        return COMPARISON if self.drafts and plain_s and not n_drafted else None

    @property
    def pair(self) -> RoundPair | None:
        """The plain and the drafted rounds; None unless there were both."""
        plain, drafted = self.alone
        return (plain, drafted) if self.compares and plain.tokens and drafted.tokens else None


@dataclass(slots=True)
class ContextVerdicts:
    """Verdicts on drafts by context bucket, where enough requests of one were timed."""

    pairs: dict[int, deque[RoundPair]] = field(default_factory=dict)
    words: dict[int, VerdictWord] = field(default_factory=dict)
    n_added: dict[int, int] = field(default_factory=dict)  # Pairs added so far.

    def add(self, bucket: int, pair: RoundPair) -> None:
        """Add a request's pair of timings; with every `JUDGE_EVERY` of a context, judge its latest ones."""
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
    """One task of a served model: what is known of its drafts, and whether they are in use.

    `judged` is the latest verdict on the `pairs`, timed with layer set `paired`; `n_unjudged` pairs are newer.
    `word` is the verdict in force for the drafts in use, until newer pairs contradict it. No search begins before the
    plan was `looked_up`. `version` is the stored plan in use, and `best` the version that `best` meant at the latest
    lookup.

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
    by_context: ContextVerdicts = field(default_factory=ContextVerdicts)

    @property
    def drafts(self) -> bool:
        """Whether drafts are in use, which they are until measured not to pay."""
        return self._uses(self.word)

    def _uses(self, word: VerdictWord) -> bool:
        return self.pinned == "best" or (self.pinned is None and word != "plain")

    def word_at(self, bucket: int) -> VerdictWord:
        """Return the verdict in contexts of that bucket: their own, or else that of all."""
        return self.by_context.words.get(bucket, self.word)

    def drafts_at(self, bucket: int) -> bool:
        """Return whether drafts are in use in contexts of that bucket."""
        return self._uses(self.word_at(bucket))

    def compared_rounds_at(self, bucket: int) -> int:
        """Return how many rounds of a request in such a context to compare."""
        return 0 if self.pinned is not None else COMPARED_ROUNDS[self.word_at(bucket)]

    def why_plain_at(self, bucket: int) -> WhyPlain | None:
        """Return why requests in contexts of that bucket are decoded without drafts; None: drafts are in use."""
        if self.drafts_at(bucket):
            return None
        if self.pinned is None and self.word != "plain":
            place = f"the task {self.name!r} in contexts of up to {bucket:,} tokens"
            return WhyPlain("verdict", f"drafts do not pay for {place}, as measured")
        return self.why_plain

    @property
    def why_plain(self) -> WhyPlain | None:
        """Why requests are decoded without drafts; None: drafts are in use."""
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
        """Seconds saved against plain decoding by the drafts in use; None: there is no verdict on them."""
        ratio = self.judged.verdict.ratio
        return None if ratio is None else self.drafted.seconds * (ratio - 1)

    def saved_by(self, rounds: RoundTimings) -> float:
        """Seconds that a request's drafts saved, by the ratio known now; 0 if there is no verdict on them yet."""
        ratio = self.judged.verdict.ratio if rounds.layer_set == self.search.layer_set else None
        return 0.0 if ratio is None else rounds.drafted.seconds * (ratio - 1)

    def may_search(self, expected_s: float) -> bool:
        """Whether the search's share of the time allows scoring candidates for `expected_s` seconds.

        The expected seconds are multiplied by the largest overrun so far.
        """
        has_room = self.search_s + self.slowest_look * expected_s <= SEARCH_TIME_SHARE * self.seconds
        return self.looked_up and self.pinned is None and has_room

    def count_look(self, seconds: float, expected_s: float) -> None:
        """Record that scoring candidates took `seconds`."""
        self.search_s += seconds
        self.slowest_look = max(self.slowest_look, seconds / expected_s)

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
        """Learn from a request's rounds; return whether to store the drafts as a new version."""
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
        return is_faster and (previous_word != "use" or self.stored_for != layer_set)

    def _judge(self) -> None:
        self.judged, self.n_unjudged = Judgement.of_rounds(self.pairs), 0

    def drop_pairs(self) -> None:
        """Discard the timings: another layer set drafts now, or the text has changed."""
        self.saved_before_s += self.saved_s or 0.0
        self.drafted, self.judged, self.n_unjudged = DraftedRounds(), Judgement(), 0
        self.pairs.clear()
        self.by_context = ContextVerdicts()

    def use_plan(self, stored_plan: FoundPlan, search: Search) -> None:
        """Use a stored plan's drafts, those of `search`, from the next request on.

        A plan stored by a server is searched and judged further; a plan from a job is used as it is.
        """
        record = stored_plan.plan.layer_set
        self.search.finish("a stored plan is in use")
        self.search = search
        self.version, self.word, self.stored_for = stored_plan.version, stored_plan.plan.verdict, search.layer_set
        self.drop_pairs()
        self.paired = search.layer_set
        if record is not None and record.job is None and record.evidence:
            self.pairs += [(Timed(int(n), s), Timed(int(m), t)) for n, s, m, t in record.evidence]
            self._judge()
        else:
            self.judged = Judgement.of_plan(stored_plan)
            search.finish("a stored plan is in use")
        # Start a new chart: requests in progress still use the old drafts, whose acceptance must not count.
        self.shift.chart, self.shift.settled = AcceptanceChart(), False

    def record_in_use(self, model: str, runtime: Runtime) -> LayerSetRecord:
        """Describe the drafts in use, with their verdict and its timings; `model` is the served model's name."""
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


def _round(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
