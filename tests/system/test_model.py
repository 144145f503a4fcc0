"""swiftopt in Python: tuning, decoding, streaming, and requests from several threads."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_files import save

import swiftopt
from swiftopt.core.errors import ContextOverflow, SettingsError, StoreError, StreamError, StreamNotFound
from swiftopt.core.events import Event, PromptFinished
from swiftopt.core.requests import CompletionRequest
from swiftopt.decoding.engine import side_by_side
from swiftopt.decoding.events import Generated
from swiftopt.tasks.job import Cancelled
from swiftopt.tasks.model import TURN_SHARE, Ticket
from swiftopt.worker.served_tokens import session_of

TEXTS = [f"w{i + 1} w{i + 2} w{i + 1}" for i in range(8)]


@pytest.fixture
def db(tmp_path: Path) -> str:
    return str(tmp_path / "a.db")


@pytest.fixture
def model(tmp_path: Path, db: str) -> Iterator[swiftopt.Model]:
    with swiftopt.load(save(tmp_path / "model"), dtype="float32", db=Path(db)) as loaded:
        yield loaded


def test_what_was_tuned_is_what_decodes(model: swiftopt.Model, db: str, tmp_path: Path) -> None:
    prompts = [swiftopt.Prompt(f"p{i}", "notes", text=text) for i, text in enumerate(TEXTS)]
    events: list[Event] = []
    settings = swiftopt.SwiftSettings(context_window=8, max_steps=4)
    out, folder = tmp_path / "out.jsonl", Path(model.name)
    [before] = [event for event in side_by_side([model.work(prompts[0])]) if isinstance(event, Generated)]
    result = swiftopt.tune(
        folder,
        prompts,
        db=Path(db),
        on_event=events.append,
        out=out,
        settings=settings,
        max_new_tokens=16,
        concurrency=3,
    )
    [after] = [event for event in side_by_side([model.work(prompts[0])]) if isinstance(event, Generated)]
    assert (before.info.version, after.info.version) == (None, 1)
    assert [task.task for task in result.tasks] == ["notes"] and result.tasks[0].trials
    finished = {event.prompt.id: event.completion for event in events if isinstance(event, PromptFinished)}
    for prompt in prompts:
        assert model.generate(prompt, max_new_tokens=16).text == finished[prompt.id].text
    drafted = model.generate(prompts[0], method="swift", max_new_tokens=16)
    assert drafted.method == "swift" and drafted.layer_set == result.tasks[0].record.layer_set


def test_a_database_that_cannot_be_opened_is_told_before_the_model_is_read(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be opened"):
        swiftopt.load(str(tmp_path / "no model"), db=str(tmp_path))


def test_texts_are_prompts_of_the_task(model: swiftopt.Model, db: str, tmp_path: Path) -> None:
    events: list[Event] = []
    settings = swiftopt.SwiftSettings(context_window=8, max_steps=4)
    more = {"out": tmp_path / "out.jsonl", "settings": settings, "max_new_tokens": 16}
    swiftopt.tune(model.name, TEXTS[:2], task="notes", db=db, on_event=events.append, **more)
    found = [(e.prompt.id, e.prompt.task, e.prompt.text) for e in events if isinstance(e, PromptFinished)]
    assert found == [("1", "notes", TEXTS[0]), ("2", "notes", TEXTS[1])]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (swiftopt.Prompt("7", "t"), "'7' has neither text, messages nor turns"),
        (swiftopt.Prompt("7", "", text="w1"), "the task of prompt '7', '' is not a valid name"),
    ],
)
def test_a_prompt_that_says_nothing_is_refused_in_a_sentence(
    model: swiftopt.Model, db: str, prompt: swiftopt.Prompt, words: str
) -> None:
    with pytest.raises(StreamError, match=words):
        swiftopt.tune(model.name, [prompt], db=db)
    with pytest.raises(StreamError, match=words):
        model.generate(prompt)


def test_a_model_closes_its_database(tmp_path: Path, db: str) -> None:
    with swiftopt.load(save(tmp_path / "model"), dtype="float32", db=db) as model:
        assert model.store is not None and model.generate(TEXTS[0], max_new_tokens=2).n_tokens == 2
        pool = model.store.engine.pool
        assert pool.checkedin()  # type: ignore[attr-defined]
    assert model.store.engine.pool is not pool


def test_stream_is_the_text_in_pieces(model: swiftopt.Model) -> None:
    pieces = list(model.stream(TEXTS[0], max_new_tokens=12))
    assert len(pieces) > 3 and "".join(pieces) == model.generate(TEXTS[0], max_new_tokens=12).text


def test_requests_of_several_threads_get_what_each_gets_alone(model: swiftopt.Model) -> None:
    expected = {text: model.generate(text, max_new_tokens=20).text for text in TEXTS}
    found: dict[str, str] = {}
    with model.engine(concurrency=3) as engine:

        def ask(text: str) -> None:
            found[text] = "".join(engine.submit(text, max_new_tokens=20))

        threads = [threading.Thread(target=ask, args=(text,)) for text in TEXTS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert found == expected


def test_cancelled_and_failed_requests_leave_the_others_alone(model: swiftopt.Model) -> None:
    expected = model.generate(TEXTS[1], max_new_tokens=30).text
    slot = model.runtime.slot_bytes
    with model.engine(concurrency=4, memory=120 * slot) as engine:
        long = engine.submit(TEXTS[0], max_new_tokens=60)
        good = engine.submit(TEXTS[1], max_new_tokens=30)
        too_long = engine.submit(TEXTS[2], max_new_tokens=125)
        unknown = engine.submit(TEXTS[3], method="no such method")
        assert next(iter(long))
        long.cancel()
        assert good.result(60).text == expected
        with pytest.raises(ContextOverflow, match="keys and values"):
            too_long.result(60)
        with pytest.raises(SettingsError, match="method 'no such method' is unknown: use one of plain"):
            unknown.result(60)
        with pytest.raises(Cancelled):
            long.result(60)
        with pytest.raises(SettingsError, match="stop string"):
            engine.submit(TEXTS[0], stop=[""])


def test_ticket_can_be_iterated_again_and_ends(model: swiftopt.Model) -> None:
    with model.engine(concurrency=1) as engine:
        ticket = engine.submit(TEXTS[0], max_new_tokens=12)
        assert "".join(ticket) == ticket.result().text and list(ticket) == list(ticket) == []


def test_numbers_that_make_no_sense_are_refused(model: swiftopt.Model) -> None:
    with pytest.raises(SettingsError, match="concurrency 0 is out of range: use 1 or more"):
        model.engine(concurrency=0)
    with pytest.raises(SettingsError, match="max_new_tokens -1 is out of range: use 0 or more"):
        model.generate(TEXTS[0], max_new_tokens=-1)


def test_stop_may_be_one_text(model: swiftopt.Model) -> None:
    whole = model.generate(TEXTS[0], max_new_tokens=12).text
    stop = whole.split()[3]
    assert model.generate(TEXTS[0], stop=stop, max_new_tokens=12).text == whole[: whole.index(stop)]


def test_tuning_takes_the_first_prompts_of_a_list_and_refuses_none(
    model: swiftopt.Model, db: str, tmp_path: Path
) -> None:
    prompts = [swiftopt.Prompt(f"p{i}", "notes", text=text) for i, text in enumerate(TEXTS)]
    settings = swiftopt.TuningSettings(optimise=False, draft_format="stored")
    found = swiftopt.tune(
        model.name, prompts, db=db, out=str(tmp_path / "o"), limit=3, settings=settings, max_new_tokens=4
    )
    assert len(found.out.read_text().splitlines()) == 3
    with pytest.raises(StreamError, match="no prompt to tune on"):
        swiftopt.tune(model.name, [], db=db)
    with pytest.raises(StreamNotFound):
        swiftopt.tune(model.name, tmp_path / "missing.jsonl", db=db)


def test_text_that_is_to_end_nowhere_ends_where_memory_does(model: swiftopt.Model) -> None:
    """It is not refused because a whole context would exceed the memory; a request for that length is."""
    lengths = []
    for n, memory in ((None, 120), (None, 60), (None, 1000), (30, 120)):
        with model.engine(memory=memory * model.runtime.slot_bytes) as engine:
            asked = CompletionRequest(text=TEXTS[0], max_new_tokens=n, ignore_eos=True)
            ticket, (session, prompt) = Ticket(), session_of(model, asked, engine.memory_tokens)
            engine.run(model.decoding(session, prompt, "prompt-lookup"), ticket)
            done = ticket.result(60)
        assert done.finish_reason == "length"
        lengths.append(done.n_prompt_tokens + len(done.token_ids))
    assert lengths == [90, 45, model.runtime.max_positions, 33]


def test_chat_much_longer_than_the_context_is_refused_by_its_beginning_tools_included(
    model: swiftopt.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "w1 " * 9000
    tool = {"type": "function", "function": {"name": "add", "description": words}}
    monkeypatch.setattr(model.runtime.tokenizer, "chat_template", "{{ messages[-1].content }} {{ tools }}")
    for said, tools in (("w1", [tool]), (words, [])):
        asked = CompletionRequest(messages=({"role": "user", "content": said},), tools=tuple(tools))
        with pytest.raises(
            ContextOverflow, match=r"maximum context length is \d+ tokens, but the prompt has more"
        ) as error:
            session_of(model, asked)
        assert error.value.param == "messages"


def test_closed_engine_gives_up_what_runs_and_takes_nothing_new(model: swiftopt.Model) -> None:
    engine = model.engine(concurrency=1)
    tickets = [engine.submit(text, max_new_tokens=100) for text in TEXTS]
    assert next(iter(tickets[0]))
    engine.close()
    assert all(ticket.is_done for ticket in tickets)
    with pytest.raises(Cancelled):
        tickets[-1].result()
    with pytest.raises(Cancelled, match="closed"):
        engine.submit(TEXTS[0])


def test_result_can_be_waited_for_in_vain(model: swiftopt.Model) -> None:
    with model.engine() as engine, pytest.raises(TimeoutError, match="not done after 0 s"):
        engine.submit(TEXTS[0], max_new_tokens=100).result(0)


def test_turns_are_granted_alone_rarely_beside_requests_and_never_by_a_closed_engine(
    model: swiftopt.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    with model.engine() as engine:
        with engine.turn():
            ticket = engine.submit(TEXTS[0], max_new_tokens=200)
            assert not ticket._done.wait(0.2), "a request waits until the turn is over"
        assert ticket.result(60).text == model.generate(TEXTS[0], max_new_tokens=200).text
        # Each step takes one tick of this clock, and so does each turn.
        monkeypatch.setattr("swiftopt.tasks.model.perf_counter", itertools.count().__next__)
        n_turns, tickets = 0, [engine.submit(text, max_new_tokens=200) for text in TEXTS]
        while not all(ticket.is_done for ticket in tickets):
            n_beside = engine._engine.load.n_beside
            with engine.turn():
                n_turns += 1
                if not all(ticket.is_done for ticket in tickets):
                    assert n_turns == 1 or engine._engine.load.n_beside > n_beside, "its time counts as no round's"
        assert n_turns >= 1 and engine._turns_s - 1 <= TURN_SHARE * engine._decoded_s
    with pytest.raises(Cancelled, match="closed"), engine.turn():
        raise AssertionError("it was granted")


def test_turn_that_waits_when_its_engine_closes_is_refused(model: swiftopt.Model) -> None:
    engine, refused = model.engine(), threading.Event()

    def ask() -> None:
        with pytest.raises(Cancelled), engine.turn():
            raise AssertionError("it was granted")
        refused.set()

    with engine.turn():
        waiting = threading.Thread(target=ask)
        waiting.start()
        closing = threading.Thread(target=engine.close)
        closing.start()
        while not engine._closed:
            time.sleep(0.01)
    for thread in (waiting, closing):
        thread.join(10)
    assert refused.is_set()
