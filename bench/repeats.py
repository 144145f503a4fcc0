"""Measures what repeated text saves: drafts from a corpus of answers, and prefixes kept in memory and on disk.

python -m swiftopt.bench.repeats --model qwen2.5-coder-1.5b --length 8000 --length 24000 --max-new-tokens 200
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from ..core.requests import GenerateRequest
from ..core.types import Completion, Prompt, Sampling
from ..decoding.corpus import Corpora
from ..decoding.engine import Engine
from ..decoding.events import Generated, Prefilled
from ..decoding.prefix_files import PrefixFolder
from ..decoding.session import Session
from ..models.costs import machine_name, memory_for_texts
from ..models.runtime import Runtime
from ..tasks.traffic import CORPUS_BYTES, Traffic
from ..terminal import commands, options, program
from ..terminal.commands import measurement
from ..terminal.inputs import decoding_request, load
from ..terminal.output import Result, StepNotes, note
from ..terminal.render import fixed, number, numbers, table
from ..terminal.value_types import positive
from .turn import measured

SCHEMA = "swiftopt.bench-repeats/1"
SOURCES = Path(__file__).parent.parent / "decoding"  # Code that the prompts contain.
N_VERSIONS = 3  # Number of times that a request is repeated, each time with another line of its file changed.
FILE_TOKENS = 1200  # A prompt contains about this many tokens of a file.
GUIDE = "Write a guide to this module for a new colleague, one paragraph per class, in plain English."
AGAIN = "Write the last class again, with a comment above each statement."
DISK_BYTES = 64 << 30
TASK = "code"


@dataclass(slots=True)
class TimedCompletion:
    """A completion, and the seconds until its first token, which include loading of stored prefixes."""

    completion: Completion
    first_token_s: float


@dataclass(slots=True)
class Sums:
    """Sums over completions; first tokens do not count."""

    tokens: int = 0
    decode_s: float = 0.0
    total_s: float = 0.0
    rounds: int = 0
    answers: list[tuple[int, ...]] = field(default_factory=list)

    def add(self, completion: Completion) -> None:
        self.tokens += completion.n_decoded
        self.decode_s += completion.timings.decode_s
        self.total_s += completion.timings.total_s
        self.rounds += completion.target_passes
        self.answers.append(completion.token_ids)

    def to_json(self) -> dict[str, float]:
        return {
            "tokens": self.tokens,
            "decode_s": round(self.decode_s, 3),
            "total_s": round(self.total_s, 3),
            "tokens_per_round": round(self.tokens / max(1, self.rounds), 3),
        }


class Repeats:
    """Runs the measurements on one model; requests run one after the other."""

    def __init__(self, runtime: Runtime, max_new_tokens: int) -> None:
        self.runtime = runtime
        self.session = Session(runtime, Sampling(), max_new_tokens, ignore_eos=True)
        self.memory = memory_for_texts(runtime)
        self.files = [path.read_text(encoding="utf-8") for path in sorted(SOURCES.glob("*.py"))]

    def prompt_ids(self, text: str, question: str) -> list[int]:
        content = f"```python\n{text}\n```\n\n{question}"
        if getattr(self.runtime.tokenizer, "chat_template", None):
            return self.session.encode_chat([{"role": "user", "content": content}])
        return self.session.encode_text(content)

    def ask(self, engine: Engine, traffic: Traffic, token_ids: Sequence[int]) -> TimedCompletion:
        started_s, first_token_s = perf_counter(), 0.0
        engine.add(traffic.work(self.session, Prompt("1", TASK, token_ids=tuple(token_ids)), TASK))
        completion: Completion | None = None
        while engine.requests:
            for event in engine.step():
                if isinstance(event, Prefilled):
                    first_token_s = perf_counter() - started_s
                elif isinstance(event, Generated):
                    completion = event.completion
        assert completion is not None
        return TimedCompletion(completion, first_token_s)

    def corpus(self, n_files: int) -> dict[str, Any]:
        """Return the times of requests with a corpus and without, by repetition."""
        traffics = {
            side: Traffic("bench", self.runtime, None, on_step=StepNotes(), corpora=Corpora(n_bytes))
            for side, n_bytes in (("on", CORPUS_BYTES), ("off", 0))
        }
        engines = {side: Engine(self.memory // 2) for side in traffics}
        texts = [text for text in self.files if len(text) > 3 * FILE_TOKENS][:n_files]
        sums = {side: [Sums() for _ in range(N_VERSIONS)] for side in traffics}
        for version in range(N_VERSIONS):
            for i, text in enumerate(texts):
                lines = text[: 4 * FILE_TOKENS].splitlines()
                lines[(version + 1) * len(lines) // (N_VERSIONS + 1)] = f"# Changed in version {version + 1}."
                token_ids = self.prompt_ids("\n".join(lines), GUIDE)
                for side in sorted(traffics, reverse=bool((version + i) % 2)):
                    sums[side][version].add(self.ask(engines[side], traffics[side], token_ids).completion)
            on, off = sums["on"][version], sums["off"][version]
            note(f"repetition {version + 1}: with the corpus {off.decode_s / on.decode_s:.2f} times as fast as without")
        last_on, last_off = sums["on"][-1], sums["off"][-1]
        return {
            "ratio": round(last_off.decode_s / last_on.decode_s, 3),
            "equal": all(sums["on"][i].answers == sums["off"][i].answers for i in range(N_VERSIONS)),
            "bytes_per_token": round(traffics["on"].corpora.n_bytes / traffics["on"].corpora.n_tokens, 1),
            **{side: [version_sum.to_json() for version_sum in side_sums] for side, side_sums in sums.items()},
        }

    def length(self, n_tokens: int, n_pairs: int) -> dict[str, Any]:
        """Return times to the first token of a long prompt, and the speeds of plain decoding and drafting after it."""
        text = ""
        for source in self.files * (1 + 8 * n_tokens // sum(map(len, self.files))):
            text += source
            if len(text) > 8 * n_tokens:
                break
        prompt_ids = self.session.encode_text(text)[:n_tokens]
        question_ids = self.session.encode_text(f"\n\n{AGAIN}\n\n")
        traffic = Traffic("bench", self.runtime, None, on_step=StepNotes())
        traffic.steer("pin", TASK, "plain")
        with tempfile.TemporaryDirectory(prefix="swiftopt-prefixes-") as folder:
            with closing(PrefixFolder(Path(folder), self.runtime, DISK_BYTES)) as prefixes:
                engine = Engine(self.memory, folder=prefixes)
                first = self.ask(engine, traffic, prompt_ids)
                second_ids = [*prompt_ids, *first.completion.token_ids, *question_ids]
                second = self.ask(engine, traffic, second_ids)
            note(f"{n_tokens} tokens: read in {first.first_token_s:.1f} s, second turn in {second.first_token_s:.2f} s")
            with closing(PrefixFolder(Path(folder), self.runtime, DISK_BYTES)) as prefixes:
                engine = Engine(self.memory, folder=prefixes)
                restarted = self.ask(engine, traffic, second_ids)
        note(f"{n_tokens} tokens: after a restart in {restarted.first_token_s:.2f} s")
        engine.folder, sums = None, {"plain": Sums(), "drafts": Sums()}
        for pair in range(n_pairs):
            # Plain decoding comes first, because it measures the costs of passes in this context.
            for way in sorted(sums, reverse=pair % 2 == 0):
                traffic.steer("pin", TASK, "plain" if way == "plain" else "best")
                # Each pair has another question, so that the corpus contains no answer to it.
                ids = [*second_ids, *self.session.encode_text(f"Question {pair + 1}:\n\n")]
                sums[way].add(self.ask(engine, traffic, ids).completion)
            note(
                f"{n_tokens} tokens: drafts {sums['plain'].decode_s / sums['drafts'].decode_s:.2f} times plain decoding"
            )
        return {
            "tokens": len(prompt_ids),
            "anew_s": round(first.first_token_s, 3),
            "second_turn_s": round(second.first_token_s, 3),
            "second_turn_ratio": round(second.first_token_s / first.first_token_s, 4),
            "restart_s": round(restarted.first_token_s, 3),
            "restart_ratio": round(restarted.first_token_s / first.first_token_s, 4),
            "restart_cached": restarted.completion.n_cached,
            "drafts_ratio": round(sums["plain"].decode_s / sums["drafts"].decode_s, 3),
            "equal": second.completion.token_ids == restarted.completion.token_ids
            and sums["plain"].answers == sums["drafts"].answers,
            **{way: way_sums.to_json() for way, way_sums in sums.items()},
        }


# --- command line


@commands.command(common="model lengths files pairs max_new_tokens as_json")
@options.model
@measurement("--length", "lengths", type=positive, multiple=True, help="Tokens of a long prompt; may be repeated.")
@measurement("--files", type=positive, default=3, help="Number of repeated requests.")
@measurement("--pairs", type=positive, default=3, help="Pairs of plain and drafted answers for each length.")
@options.machine(GenerateRequest, "max_new_tokens", "speed")
@options.json
def command(lengths: tuple[int, ...], files: int, pairs: int, **values: Any) -> Result:
    """Measure what repeated answers and prompts save.

    Each of --files requests is repeated three times, with another line of its file changed, alternately with a corpus
    of answers and without. For each --length a prompt is read once, continued from memory, and continued from disk
    after a restart; then its answers are decoded alternately with plain decoding and with drafts.
    """
    request = decoding_request(values)
    runtime = load(request)
    repeats = Repeats(runtime, request.max_new_tokens)
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "model": request.model,
        "device": machine_name(runtime),
        "dtype": runtime.dtype_name,
        "max_new_tokens": request.max_new_tokens,
        "corpus": repeats.corpus(files),
        "lengths": [repeats.length(n_tokens, pairs) for n_tokens in lengths],
    }
    columns = [fixed("prompt"), *numbers("anew s", "second turn", "restart", "drafts ÷ plain", "equal")]
    rows = [
        (
            f"{row['tokens']:,} tokens",
            *(number(row[name], digits) for name, digits in (("anew_s", 1), ("second_turn_ratio", 3))),
            *(number(row[name], 3) for name in ("restart_ratio", "drafts_ratio")),
            "yes" if row["equal"] else "no",
        )
        for row in report["lengths"]
    ]
    corpus = report["corpus"]
    title = f"{request.model}, {runtime.dtype_name}: a corpus makes third requests {corpus['ratio']:.2f} times as fast"
    return Result(report, [table(columns, rows, lined=True, title=title)])


if __name__ == "__main__":
    measured(lambda: program.main(command, "python -m swiftopt.bench.repeats"))
