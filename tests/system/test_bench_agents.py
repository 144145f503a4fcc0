"""`bench agents`: recordings become turns, drafters predict recorded answers, and servers replay turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_files import save_bytes

from swiftopt.bench import agents
from swiftopt.bench.agents import Agents, AgentsRequest, ReplayedTurn, WayRuns, summary
from swiftopt.bench.conversations import conversations, read_cases, repeated_share
from swiftopt.bench.recorded_answers import latter_half
from swiftopt.core.errors import FileNotFound, InvalidInput
from swiftopt.core.requests import GenerateRequest
from swiftopt.models.loading import load_tokenizer

FIELDS = ("prompt_tokens", "answer_tokens", "seconds", "first_s", "cached_tokens", "repeated")
CODE = "def add(a, b):\n    return a + b\n"


def case(name: str, n_turns: int) -> dict[str, Any]:
    """Return a session in lucebench's form, whose answers repeat the code that they read."""
    messages = [{"role": "user", "content": f"Read {name}.py"}]
    for i in range(n_turns):
        messages += [{"role": "assistant", "content": f"It says: {CODE}"}, {"role": "user", "content": f"{i}: {CODE}"}]
    session = {"id": f"{name}-{n_turns}", "source": "codex", "source_session_id": name, "messages": messages}
    return {**session, "reference_response": f"It said: {CODE}", "context_tokens_approx": 20 * n_turns}


@pytest.fixture
def recordings(tmp_path: Path) -> Path:
    file = tmp_path / "recordings.json"
    file.write_text(json.dumps({"cases": [case("a", 12), case("b", 4), case("a", 3)]}))
    return file


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return save_bytes(tmp_path / "tiny")


def test_conversations_are_cut_after_an_answer_and_come_from_different_sessions(recordings: Path, tiny: Path) -> None:
    cases, tokenizer = read_cases(recordings), load_tokenizer(tiny)
    recorded = list(conversations(cases, tokenizer, [800, 400], 2, 3))
    assert [conversation.length for conversation in recorded] == [400, 400, 800] and recorded[-1].id == "a-12"
    # The longest recording of each session.
    assert {conversation.id for conversation in recorded[:2]} == {"a-12", "b-4"}
    for conversation in recorded:
        assert len(conversation.turns) == 3
        assert 0.75 * conversation.length <= conversation.n_tokens <= conversation.length
        for before, turn in zip(conversation.turns, conversation.turns[1:], strict=False):
            prefix = [*before.prompt_ids, *before.answer_ids]
            assert list(turn.prompt_ids[: len(prefix)]) == prefix
        assert CODE in tokenizer.decode(conversation.turns[-1].answer_ids)
    with pytest.raises(InvalidInput, match="no recorded conversation has 90000 tokens"):
        list(conversations(cases, tokenizer, [90000], 2, 3))
    recordings.write_text("{}")
    with pytest.raises(FileNotFound, match="has no recorded conversations"):
        read_cases(recordings)


def test_repeated_share_is_high_only_for_text_that_repeats_itself() -> None:
    assert repeated_share(range(40)) == 0 and repeated_share([1, 2] * 40) > 0.9 and repeated_share([1, 2, 3]) == 0


@pytest.mark.parametrize("parts", [("recorded",), pytest.param(("recorded", "replay"), marks=pytest.mark.slow)])
def test_turns_are_measured(recordings: Path, tiny: Path, parts: tuple[str, ...], own_cache: Path) -> None:
    """The target chooses the recorded answers; text drafts predict them, because they repeat the prompt."""
    request = GenerateRequest(str(tiny), dtype="float32", max_new_tokens=40)
    ways = ("swiftopt/plain", "swiftopt/best")
    report = Agents(AgentsRequest(request, None, (800,), 1, 3, parts, ways, str(recordings), None), print).run()
    assert json.loads(json.dumps(report)) == report and report["schema"] == agents.SCHEMA
    assert [result["drafter"] for result in report["recorded"]] == ["prompt lookup", "text", "text and model"]
    for result in report["recorded"]:
        assert (result["all"]["answers"], result["all"]["tokens"]) == (3, 3 * 39)
        assert result["second_half"]["answers"] == 1
        assert result["all"]["tokens_per_round"] >= 1 and 0 <= result["all"]["foreseen"] <= 1
    looked_up = report["recorded"][0]["all"]  # The others may draft nothing, because they go by measured costs.
    assert looked_up["foreseen"] > 0.2 and looked_up["tokens_per_round"] > 1.3
    if "replay" in parts:
        for result in report["replay"]:
            assert result["reason"] is None and len(result["turns"]) == 3
            assert all(turn["cached_tokens"] > 0.5 * turn["prompt_tokens"] for turn in result["turns"][1:])
            assert all(0 < turn["first_s"] <= turn["seconds"] for turn in result["turns"])


def test_summary_compares_turns_that_every_way_has_answered() -> None:
    def turn(number: int, seconds: float) -> ReplayedTurn:
        return ReplayedTurn(
            "a", 800, number, **dict(zip(FIELDS, (700, 40, seconds, seconds / 2, 350, 0.1), strict=True))
        )

    results = [
        WayRuns("swiftopt/best", [turn(0, 10), turn(1, 1), turn(2, 1)], 5),
        WayRuns("llama.cpp/cache", [turn(0, 20), turn(1, 6), turn(2, 100)], 5),
        WayRuns("llama.cpp/ngram-mod", [turn(0, 22), turn(1, 3)], 5, "it ended"),
        WayRuns("swiftopt/plain", [], 0, "it did not start"),
    ]
    rows = {row["way"]: row for row in summary(results)}
    assert set(rows) == {way_runs.way for way_runs in results[:3]}
    best = rows["swiftopt/best"]
    # The faster way of llama.cpp is the first over all turns, and the second over the later turns.
    assert (best["turns"], best["whole_ratio"], best["later_ratio"]) == (2, round(25 / 11, 4), 3.0)
    assert (best["first_token_s"], best["later_first_token_s"], best["cached"]) == (5, 0.5, 0.5)


def test_latter_half_is_taken_of_each_conversation() -> None:
    class Run:
        def __init__(self, conversation: str, turn: int) -> None:
            self.conversation, self.length, self.turn = conversation, 800, turn

    runs: Any = [Run("a", i) for i in range(4)] + [Run("b", i) for i in range(3)]
    assert [(run.conversation, run.turn) for run in latter_half(runs)] == [("a", 2), ("a", 3), ("b", 2)]
