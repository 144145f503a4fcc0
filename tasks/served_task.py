"""One task of a served model: timings of plain and drafted rounds, and the verdict on its drafts that they give."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..core.events import SearchStatus, ShiftStatus, TaskTuning, Way
from ..core.records import FoundPlan
from ..core.types import LayerSet, Verdict, VerdictWord
from ..decoding.loop import Round
from ..models.rows import Load
from ..optimizer.search import Search
from ..optimizer.shift import AcceptanceChart
from ..optimizer.task_state import TunedTask
from ..optimizer.verdict import Timed, judge, speed

SEARCH_SHARE = 0.03  # of the time spent decoding, that searches may take
MAX_PAIRS = 20  # that a verdict is made of: the latest ones
MIN_PAIRS = 6  # below, there is no verdict
JUDGE_EVERY = 2  # requests
LOOK_ERROR = 0.005  # of one look's interval: drafts without a gain come to "use" in 3 % of 50 requests, 5 % of 100
COMPARED_ROUNDS: Mapping[VerdictWord, int] = {"unmeasured": 8, "plain": 4, "use": 2}  # of one comparison, by verdict
UNMEASURED = Verdict("unmeasured")


def _no_time() -> list[Timed]:
    return [Timed(0, 0.0), Timed(0, 0.0)]


@dataclass(slots=True)
class RoundTimings:
    """Tokens and seconds of one request's rounds, plain and drafted; `layer_set` is of their drafts.

    Args: drafts: whether drafts are in use. compares: whether the request takes part in comparisons.
    """

    drafts: bool
    compares: bool
    layer_set: LayerSet
    spent: list[Timed] = field(default_factory=_no_time)
    alone: list[Timed] = field(default_factory=_no_time)  # of `spent`, with nothing read beside them
    drafted: bool = False  # the current round
    _n_beside: int = 0

    def begin(self, compared: range, compared_drafts: bool, load: Load) -> None:
        """Choose the way of the next round: in the target's `compared` passes the one that is compared."""
        self.drafted = compared_drafts if self.compares and load.n_checks in compared else self.drafts
        self._n_beside = load.n_beside

    def add(self, round_: Round) -> None:
        own = Timed(len(round_.token_ids), round_.draft_s + round_.verify_s)
        self.spent[self.drafted] += own
        if round_.context.load.n_beside == self._n_beside:
            self.alone[self.drafted] += own

    @property
    def pair(self) -> tuple[Timed, Timed] | None:
        """The plain and the drafted rounds, where there were both."""
        plain, drafted = self.alone
        return (plain, drafted) if self.compares and plain.tokens and drafted.tokens else None


@dataclass(slots=True)
class TaskTraffic(TunedTask):
    """One task of a served model: what is known of its drafts, and which way is in use.

    `verdict` is that of the latest `pairs`, plain and drafted rounds of one request each; `word` the verdict on the
    drafts in use, which stays until the pairs say otherwise. No search begins before the plan was `looked_up`.
    """

    looked_up: bool = False
    version: int | None = None  # of the stored plan in use
    best: int | None = None  # version that `best` meant at the latest look-up
    word: VerdictWord = "unmeasured"
    verdict: Verdict = UNMEASURED
    pairs: deque[tuple[Timed, Timed]] = field(default_factory=lambda: deque(maxlen=MAX_PAIRS))
    paired: LayerSet | None = None  # whose drafts the pairs are of
    pinned: Way | None = None
    n_requests: int = 0
    n_tokens: int = 0
    seconds: float = 0.0
    search_s: float = 0.0
    compared_s: float = 0.0  # of the rounds of the way that is not in use
    saved_s: float = 0.0  # that plain decoding would have taken longer, by the ratio known then
    stored_for: LayerSet | None = None
    since: float = field(default_factory=time.time)  # when the way in use was chosen; seconds since 1970
    used_at: float = 0.0  # by the latest request, as `time.monotonic` counts
    shifts: ShiftStatus = field(default_factory=ShiftStatus)

    @property
    def drafts(self) -> bool:
        """Whether drafts are in use: until they are known not to pay."""
        return self.pinned == "best" or (self.pinned is None and self.word != "plain")

    @property
    def is_tuned(self) -> bool:
        """Whether there is something to lose: a stored plan in use, drafts that are known to pay, or a pin."""
        return self.version is not None or self.pinned is not None or self.word == "use"

    @property
    def n_compared_rounds(self) -> int:
        return 0 if self.pinned is not None else COMPARED_ROUNDS[self.word]

    def may_search(self, pass_s: float) -> bool:
        """Whether the search's share of the time has room for a pass of so many seconds."""
        has_room = self.search_s + pass_s <= SEARCH_SHARE * self.seconds
        return self.looked_up and self.pinned is None and has_room

    def count(self, rounds: RoundTimings, n_tokens: int) -> None:
        """Count a request of so many tokens; its first one came with the prompt, in no round."""
        self.n_requests += 1
        self.n_tokens += n_tokens
        self.seconds += sum(own.seconds for own in rounds.spent)
        self.compared_s += rounds.spent[not rounds.drafts].seconds
        if self.verdict.ratio is not None:
            self.saved_s += rounds.spent[True].seconds * (self.verdict.ratio - 1)

    def add(self, rounds: RoundTimings) -> bool:
        """Learn from a request's rounds; returns whether the drafts are to be stored."""
        layer_set, pair = self.search.layer_set, rounds.pair
        if self.paired != layer_set:
            self.drop_pairs()
            self.paired = layer_set
        if pair is None or rounds.layer_set != layer_set:
            return False
        self.pairs.append(pair)
        if len(self.pairs) < MIN_PAIRS or self.n_requests % JUDGE_EVERY:
            return False
        self._judge()
        assert self.verdict.interval is not None
        pays, before = self.verdict.word == "use", self.word
        self.word = "use" if pays else "plain" if self.verdict.interval[1] < 1 else before
        if "plain" in (self.word, before) and self.word != before:
            self.since = time.time()
        return pays and (before != "use" or self.stored_for != layer_set)

    def _judge(self) -> None:
        """Compare the time of drafted tokens with what plain decoding takes for as many of the same requests.

        Plain rounds are about as many in every request, drafted ones as many as it is long: long and short requests, of
        other speeds, would count in other shares on either side.
        """
        alike = [Timed(drafted.tokens, plain.seconds * drafted.tokens / plain.tokens) for plain, drafted in self.pairs]
        self.verdict = judge([drafted for _, drafted in self.pairs], alike, None, LOOK_ERROR)

    def drop_pairs(self) -> None:
        """Judge anew: another set drafts now, or the text has changed."""
        self.pairs.clear()
        self.verdict = UNMEASURED

    def use_plan(self, stored: FoundPlan, search: Search) -> None:
        """Use a stored plan's drafts, those of `search`, from the next request on.

        A set that a server stored while it searched is searched and judged further; a job's search is over.
        """
        plan, record = stored.plan, stored.plan.layer_set
        self.search.finish("a stored plan is in use")
        self.search = search
        self.version, self.word, self.stored_for = stored.version, plan.verdict, search.layer_set
        self.pairs.clear()
        self.paired = search.layer_set
        if record is not None and record.job is None and record.evidence:
            self.pairs += [(Timed(int(n), s), Timed(int(m), t)) for n, s, m, t in record.evidence]
            self._judge()
        else:
            self.verdict = Verdict(plan.verdict, plan.measured_speedup, plan.measured_interval)
            search.finish("a stored plan is in use")
        self.shift.chart, self.shift.settled = AcceptanceChart(), False  # requests in progress have the old drafts

    def status(self) -> TaskTuning:
        """Return the task's object of `GET /v1/tuning`."""
        ratio, interval, search = self.verdict.ratio, self.verdict.interval, self.search
        return TaskTuning(
            task=self.name,
            in_use="drafts" if self.drafts else "plain",
            since=round(self.since, 3),
            verdict=self.word,
            version=self.version,
            pinned=self.pinned,
            layer_set=search.layer_set,
            pairs=len(self.pairs),
            ratio=None if ratio is None else round(ratio, 4),
            interval=None if interval is None else (round(interval[0], 4), round(interval[1], 4)),
            shifts=self.shifts,
            requests=self.n_requests,
            tokens=self.n_tokens,
            seconds=round(self.seconds, 3),
            compared_s=round(self.compared_s, 3),
            saved_s=round(self.saved_s, 3),
            plain_tok_s=self._speed(0),
            drafted_tok_s=self._speed(1),
            search=SearchStatus(
                trials=len(search.trials),
                seconds=round(self.search_s, 3),
                share=round(self.search_s / self.seconds, 4) if self.seconds else 0.0,
                matchness=search.matchness,
                ended=search.stopped_because or None,
                latest=search.trials[-1] if search.trials else None,
            ),
        )

    def _speed(self, way: int) -> float | None:
        """Tokens per second of the pairs' plain (0) or drafted (1) rounds."""
        return round(speed([pair[way] for pair in self.pairs]), 2) if self.pairs else None
