"""Messages between a server and an engine's process arrive unchanged, or are refused with a reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
from fakes import READY
from hypothesis import given
from hypothesis import strategies as st

from swiftopt.core import errors, messages
from swiftopt.core.errors import ContextOverflow, InvalidInput, SettingsError, SwiftoptError
from swiftopt.core.events import ModelTuning
from swiftopt.core.messages import (
    KINDS,
    AnswerDone,
    AnswerText,
    Cancel,
    Decode,
    Detokenize,
    Failed,
    FromEngine,
    FromServer,
    Keys,
    Loading,
    PromptRead,
    PromptTokens,
    Ready,
    Serve,
    Steer,
    TemplateInputs,
    Tokenize,
    TokensText,
    TuningNow,
    encode,
    from_engine,
    from_server,
)
from swiftopt.core.plainly import NO_GAIN
from swiftopt.core.requests import CompletionRequest, ServedModel
from swiftopt.core.rounds import RequestRounds, RoundFigures
from swiftopt.core.types import Completion, Sampling, Timings, TokenSource

COUNTS = st.integers(0, 99)
IDS, TEXT, TOKENS = st.integers(0, 2**62), st.text(), st.lists(st.integers(0, 2**40), max_size=4).map(tuple)
PIECES = st.text() | st.lists(st.integers(0, 255), max_size=4)
LOGPROBS = st.floats(-9999, 0)
TOPS = st.lists(st.tuples(PIECES, LOGPROBS), max_size=3).map(tuple)
PIECE_LOGPROBS = st.lists(st.tuples(PIECES, st.none() | LOGPROBS, TOPS), max_size=3).map(tuple)
TRACES = st.lists(
    st.tuples(PIECES, st.sampled_from(["target", "draft", "text"]), TOKENS.map(lambda ids: tuple(map(str, ids)))),
    max_size=3,
)
REQUESTS = st.builds(
    CompletionRequest,
    text=TEXT,
    messages=st.lists(st.dictionaries(TEXT, TEXT | st.none() | st.lists(TEXT), max_size=3), max_size=3).map(tuple),
    token_ids=TOKENS,
    task=st.none() | TEXT,
    sampling=st.builds(Sampling, st.floats(0, 2)),
    stop=st.lists(TEXT, max_size=2).map(tuple),
    json_schema=st.none() | st.dictionaries(TEXT, st.integers(-5, 5), max_size=2),
)
COMPLETIONS = st.builds(
    Completion, TOKENS, TEXT, st.just("stop"), st.just("plain"), timings=st.builds(Timings, st.floats(0, 9))
)
ROUND = st.builds(RoundFigures, COUNTS, COUNTS, COUNTS, st.sampled_from(get_args(TokenSource)))
ROUNDS = st.builds(
    RequestRounds,
    IDS,
    IDS,
    st.floats(0, 9),
    IDS,
    st.floats(0, 9),
    st.floats(0, 9),
    st.lists(ROUND, max_size=3).map(tuple),
)
MESSAGES: dict[type[Any], st.SearchStrategy[Any]] = {
    Serve: st.builds(Serve, st.builds(ServedModel, TEXT, TEXT, db=st.none() | TEXT)),
    Decode: st.builds(Decode, REQUESTS, IDS),
    Cancel: st.builds(Cancel, IDS),
    Tokenize: st.builds(Tokenize, REQUESTS, IDS),
    Detokenize: st.builds(Detokenize, TOKENS, IDS),
    Steer: st.builds(
        Steer, st.sampled_from([None, "pause", "pin"]), st.none() | TEXT, st.sampled_from([None, "best"]), IDS
    ),
    Keys: st.builds(Keys, st.lists(TEXT).map(tuple)),
    Loading: st.builds(Loading, TEXT),
    Ready: st.sampled_from([READY, replace(READY, template=TemplateInputs(("tools",), ("role", "content")))]),
    Failed: st.builds(Failed, st.none() | IDS, TEXT, TEXT, st.none() | TEXT),
    PromptRead: st.builds(
        PromptRead, IDS, IDS, TEXT, st.none() | PIECES, st.lists(TEXT).map(tuple), st.none() | IDS, st.booleans()
    ),
    AnswerText: st.builds(AnswerText, IDS, TEXT, IDS, PIECE_LOGPROBS, st.none() | PIECE_LOGPROBS, TRACES.map(tuple)),
    AnswerDone: st.builds(
        AnswerDone,
        *(IDS, st.floats(0, 9), TEXT, COMPLETIONS, TEXT, st.none() | IDS, st.sampled_from([None, NO_GAIN])),
        st.floats(-9, 9),
        st.sampled_from([None, "use", "plain"]),
        ROUNDS,
    ),
    PromptTokens: st.builds(PromptTokens, IDS, TOKENS, IDS),
    TokensText: st.builds(TokensText, IDS, TEXT),
    TuningNow: st.builds(TuningNow, IDS, st.builds(ModelTuning, st.booleans(), unavailable=st.none() | TEXT)),
}


def test_every_message_is_generated_here() -> None:
    assert set(MESSAGES) == {*get_args(FromServer), *get_args(FromEngine)} == set(KINDS.values())


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_message_arrives_as_it_was_sent(kind: type[Any]) -> None:
    @given(MESSAGES[kind])
    def arrives(message: Any) -> None:
        line = encode(message)
        assert line.count(b"\n") == 1 and line.endswith(b"\n")
        assert (from_server if kind in get_args(FromServer) else from_engine)(line) == message

    arrives()


@pytest.mark.parametrize("text", ["\ud83d", "half \udc00 of one"])
def test_half_of_a_character_is_refused_in_words(text: str) -> None:
    with pytest.raises(InvalidInput, match="half of a character"):
        encode(Decode(CompletionRequest(text=text)))


def test_objects_that_are_nested_too_deeply_are_refused_in_words() -> None:
    deep: dict[str, Any] = {}
    for _ in range(10_000):
        deep = {"a": deep}
    with pytest.raises(InvalidInput, match="nested too deeply"):
        encode(Decode(CompletionRequest(json_schema=deep)))


@pytest.mark.parametrize(
    "line", [b"", b"\n", b"nonsense {}\n", b"loading\n", b"loading {}\n", b'loading {"step": 1}\n', b"\xff {}\n"]
)
def test_line_of_another_swiftopt_is_told(line: bytes) -> None:
    with pytest.raises(SettingsError, match="restart the server"):
        from_engine(line)


def test_message_of_the_wrong_side_or_version_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match="Cancel to the server"):
        from_engine(encode(Cancel(1)))
    with pytest.raises(SettingsError, match="Loading to the engine"):
        from_server(encode(Loading("x")))
    newer = encode(replace(READY, version=messages.VERSION + 1))
    with pytest.raises(SettingsError, match=rf"\(version {messages.VERSION + 1}, not {messages.VERSION}\): restart"):
        from_engine(newer)


@pytest.mark.parametrize("error", [ContextOverflow("too long", "messages"), SwiftoptError("so"), errors.Busy("full")])
def test_error_is_the_same_on_the_other_side(error: SwiftoptError) -> None:
    failed = from_engine(encode(Failed.of(3, error)))
    assert isinstance(failed, Failed) and failed.id == 3
    assert (type(failed.error), str(failed.error), failed.error.param) == (type(error), str(error), error.param)
