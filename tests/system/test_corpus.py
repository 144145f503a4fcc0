"""Drafts from finished answers: they save passes, change no token, and carry nothing across keys, salts and tasks."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from fakes import cheap_draft_costs
from families import VOCAB
from native import quick_runtime
from tiny_files import save

import swiftopt
from swiftopt.core.types import Completion, Prompt, Sampling
from swiftopt.decoding.context import Ending, TokenRule
from swiftopt.decoding.corpus import Corpora
from swiftopt.decoding.engine import side_by_side
from swiftopt.decoding.events import Generated, Prefilled, Round, WorkEvent
from swiftopt.decoding.loop import decoding
from swiftopt.decoding.methods import PLAIN, Method, Resources, build
from swiftopt.decoding.methods.adaptive import AdaptiveSettings
from swiftopt.decoding.session import Session
from swiftopt.decoding.work import Work, subscribed
from swiftopt.tasks.traffic import Traffic

N_NEW, PLENTY = 80, 1 << 22
HOT = Sampling(temperature=1.5, seed=2)  # So hot that the text does not repeat itself.
PROMPT = [5, 9, 11, 2, 7]


def method(draft_format: str = "stored") -> Method:
    resources = Resources(quick_runtime("llama"), costs=cheap_draft_costs())
    return build("adaptive", resources, AdaptiveSettings.from_json({"draft_format": draft_format}))


def ask(
    method: Method,
    corpora: Corpora,
    salt: str = "",
    task: str = "code",
    ids: Sequence[int] = PROMPT,
    sampling: Sampling = HOT,
) -> tuple[Completion, list[Round]]:
    """Decode a prompt by itself with the corpus of that salt and task, and add the answer to it."""
    runtime, done, rounds = quick_runtime("llama"), list[Completion](), list[Round]()

    def on_event(event: WorkEvent) -> None:
        if isinstance(event, Prefilled):
            event.context.corpus = corpora.of(salt, task)
        if isinstance(event, Round):
            rounds.append(event)

    def work() -> Work[None]:
        rule = TokenRule.of(sampling, None, len(ids))
        done.append((yield from subscribed(decoding(runtime, list(ids), method, rule, Ending(N_NEW)), on_event)))

    for _ in side_by_side([work()]):
        pass
    corpora.add(salt, task, ids, done[0].token_ids)
    return done[0], rounds


def drafted_from(rounds: Sequence[Round], source: str) -> int:
    """Accepted draft tokens from a source."""
    return sum(token.source == source for each in rounds for token in each.traced)


def figures(rounds: Sequence[Round]) -> list[tuple[int, int, int]]:
    """What took the time of each round: its steps, its rows, and its tokens."""
    return [(each.n_steps, each.n_rows, len(each.token_ids)) for each in rounds]


@pytest.mark.parametrize("draft_format", ["stored", "int4"])
@pytest.mark.parametrize("sampling", [HOT, Sampling()], ids=["hot", "greedy"])
def test_repeated_answer_saves_passes_with_equal_tokens(draft_format: str, sampling: Sampling) -> None:
    corpora, drafts = Corpora(PLENTY), method(draft_format)
    plain, _ = ask(PLAIN, Corpora(0), sampling=sampling)
    done = [ask(drafts, corpora, sampling=sampling) for _ in range(3)]
    assert [completion.token_ids for completion, _ in done] == [plain.token_ids] * 3
    if sampling == HOT:
        first, again = done[0], done[1:]
        assert drafted_from(first[1], "corpus") == 0
        for completion, rounds in again:
            n_drafted = drafted_from(rounds, "corpus") + drafted_from(rounds, "draft")
            assert n_drafted > 0.6 * N_NEW and completion.target_passes < 0.5 * first[0].target_passes
        assert draft_format != "stored" or drafted_from(again[1][1], "corpus") > 0.6 * N_NEW


def test_changed_token_affects_only_the_drafts_around_it() -> None:
    corpora, drafts = Corpora(PLENTY), method()
    plain, _ = ask(PLAIN, Corpora(0))
    changed = [*plain.token_ids[:40], (plain.token_ids[40] + 1) % VOCAB, *plain.token_ids[41:]]
    corpora.add("", "code", PROMPT, changed)
    first, rounds = ask(drafts, corpora)
    assert first.token_ids == plain.token_ids
    assert drafted_from(rounds, "corpus") > 0.5 * N_NEW and first.target_passes < 0.6 * plain.target_passes


@pytest.mark.parametrize(("salt", "task"), [("other:", "code"), ("ci:other", "code"), ("ci:", "chat")])
def test_drafts_and_rounds_reveal_no_other_text(salt: str, task: str) -> None:
    """A request runs the very passes that it would run if the other's answers had never been kept."""
    taken = []
    for corpora in (Corpora(PLENTY), Corpora(0)):
        drafts = method()
        ask(drafts, corpora, "ci:", "code")
        completion, rounds = ask(drafts, corpora, salt, task)
        assert drafted_from(rounds, "corpus") == 0
        assert not any(source == "corpus" for each in rounds for source in [each.drafter])
        taken.append((completion.token_ids, figures(rounds)))
    assert taken[0] == taken[1]


def test_misleading_answers_soon_stop_being_drafted() -> None:
    """Answers that agree with the text for some tokens and then never: drafts of them stop by their hit rates."""
    rng = random.Random(5)
    prompts = [[rng.randrange(2, VOCAB) for _ in range(5)] for _ in range(6)]
    plain = [ask(PLAIN, Corpora(0), ids=ids)[0].token_ids for ids in prompts]
    costs = dict[str, float]()
    for name in ("junk", "none"):
        corpora, drafts, costs[name] = Corpora(PLENTY), method(), 0.0
        if name == "junk":
            for answer in plain:
                for place in range(4, N_NEW, 2):
                    junk = [rng.randrange(2, VOCAB) for _ in range(30)]
                    corpora.add("", "code", (), [*answer[place - 4 : place], (answer[place] + 1) % VOCAB, *junk])
        for ids, token_ids in zip(prompts, plain, strict=True):
            salt_of_answers = "" if name == "junk" else "none"
            completion, _ = ask_without_adding(drafts, corpora, salt_of_answers, ids)
            assert completion.token_ids == token_ids
            costs[name] += completion.estimated_cost or 0.0
    # Without drafts a token costs a plain pass.
    assert costs["junk"] < 1.03 * max(costs["none"], len(prompts) * (N_NEW - 1))
    corpus = corpora.of("", "chat")
    assert corpus is not None and not corpus.generations, "a neighbouring task has none of it"


def ask_without_adding(
    drafts: Method, corpora: Corpora, salt: str, ids: Sequence[int]
) -> tuple[Completion, list[Round]]:
    corpus = corpora.of(salt, "code")
    kept = Corpora(PLENTY)
    assert corpus is not None
    kept._corpora["", "code"] = corpus
    added, corpus.generations = corpus.generations, list(corpus.generations)
    try:
        return ask(drafts, kept, ids=ids)
    finally:
        corpus.generations = added


def test_served_requests_of_a_task_draft_from_its_answers(tmp_path: object) -> None:
    """By the hidden salt of the key, and by task; a request that is not to be learnt from leaves nothing."""
    runtime = swiftopt.load(str(save(tmp_path)), dtype="float32").runtime  # type: ignore[arg-type]
    traffic = Traffic("tiny", runtime, None)
    session = Session(runtime, Sampling(temperature=1.5, seed=3), 60, ignore_eos=True)

    def answer(salt: str, task: str, learn: bool = True) -> Generated:
        work = traffic.work(session, Prompt("1", "x", text="w1 w2 w3"), task, learn, salt=salt)
        return next(event for event in side_by_side([work]) if isinstance(event, Generated))

    def n_kept(salt: str, task: str) -> int:
        corpus = traffic.corpora.of(salt, task)
        assert corpus is not None
        return corpus.n_tokens

    answer("ci:", "code", learn=False)
    assert traffic.corpora.n_tokens == 0
    done = [answer("ci:", "code") for _ in range(2)]
    assert n_kept("ci:", "code") > 60 and n_kept("ci:x", "code") == n_kept("cd:", "code") == n_kept("ci:", "chat") == 0
    assert done[0].completion.token_ids == done[1].completion.token_ids
    assert any(figures.drafter == "corpus" for figures in done[1].info.rounds.first)
    assert not any(figures.drafter == "corpus" for figures in done[0].info.rounds.first)
    other = answer("cd:", "code")
    assert not any(figures.drafter == "corpus" for figures in other.info.rounds.first)
