"""What a tuning run knows of its tasks and of the prompt in flight, and all of it as the JSON of a checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ..core.errors import LayerSetError, SettingsError
from ..core.types import Completion, Prompt, Timings, Trial
from ..decoding.context import Begun, Context, Tally
from ..decoding.loop import Round
from ..decoding.session import n_turns
from .search import Search
from .shift import ShiftWatch
from .verdict import Pair, turns_done

VERSION = 2
COUNTERS = ("tokens", "seconds", "drafted", "accepted", "rounds", "n_prompts", "n_tokens")
TALLIED = ("rounds", "drafted", "accepted", "optimise_s", "draft_s", "verify_s", "prefill_s", "elapsed_s")


@dataclass(slots=True)
class TaskState:
    """One task of the stream: its search, the sums over its completions, its phase, and its verdict's pairs so far.

    `shift` watches whether its text becomes another kind; `learnt` is what the verdict's drafts had learnt with its
    latest pair.
    """

    name: str
    search: Search
    held_out: list[tuple[int, Prompt]]  # with their places in the stream
    shift: ShiftWatch = field(default_factory=ShiftWatch)
    phase: Any = ""
    tokens: int = 0
    seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0
    rounds: int = 0
    timings: Timings = field(default_factory=Timings)
    n_prompts: int = 0
    n_tokens: int = 0
    pairs: list[Pair] = field(default_factory=list)  # in the order of the turns, the second look behind the first
    learnt: dict[str, Any] | None = None

    def count(self, round_: Round) -> None:
        """Add a round to the sums."""
        self.tokens += len(round_.token_ids)
        self.drafted += round_.n_steps
        self.accepted += round_.n_accepted
        self.rounds += 1
        self.seconds += round_.draft_s + round_.verify_s

    def count_completion(self, completion: Completion) -> None:
        """Add what was decoded while tuning."""
        self.timings += completion.timings
        self.n_prompts += 1
        self.n_tokens += completion.n_tokens

    def to_json(self) -> dict[str, Any]:
        """Inverse of `restore`. Texts are kept only of the turns that a later turn of their prompt will see."""
        prompts = [prompt for _, prompt in self.held_out]
        n_with_text = turns_done(prompts * 2, len(self.pairs))[1]
        first = len(self.pairs) - n_with_text
        return {
            **{name: getattr(self, name) for name in COUNTERS},
            "timings": self.timings.to_json(),
            "search": self.search.state(),
            "shift": self.shift.to_json(),
            "learnt": self.learnt,
            "pairs": [_pair_to_json(pair, number >= first) for number, pair in enumerate(self.pairs)],
        }

    def restore(self, values: Mapping[str, Any], trials: Sequence[Trial]) -> None:
        """Go on from `to_json` of the same task, and its trials in their order."""
        for name in COUNTERS:
            setattr(self, name, values[name])
        self.timings = Timings.from_json(values["timings"])
        self.pairs = [Pair(*map(Completion.from_json, pair)) for pair in values["pairs"]]
        self.learnt = values["learnt"]
        self.search.restore(values["search"], trials)
        self.shift.restore(values["shift"])


@dataclass(slots=True)
class Flight:
    """The prompt that is being decoded: the answers of its finished turns, and where the turn after them is.

    `begun` is where that turn was cut in an earlier life, `context` the turn as it goes on now.
    """

    answers: list[str] = field(default_factory=list)
    begun: Begun | None = None
    context: Context | None = None

    def answered(self, text: str) -> None:
        """A turn is finished."""
        self.answers.append(text)
        self.begun = self.context = None

    def to_json(self) -> dict[str, Any]:
        """Inverse of `from_json`."""
        begun = self.context.begun() if self.context is not None else self.begun
        return {"answers": list(self.answers), "begun": None if begun is None else _begun_to_json(begun)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any], prompt: Prompt) -> Flight:
        """Where another life of this run left `prompt`."""
        answers, begun = list(values["answers"]), values["begun"]
        if len(answers) >= n_turns(prompt):
            raise ValueError("the prompt in flight has no turn left")
        return cls(answers, None if begun is None else _begun_from_json(begun))


@contextmanager
def reading() -> Iterator[None]:
    """Say in a sentence that a checkpoint cannot be read, whatever is wrong with it."""
    try:
        yield
    except SettingsError:
        raise
    except (AttributeError, IndexError, KeyError, LayerSetError, TypeError, ValueError) as error:
        raise SettingsError(f"the checkpoint of this run cannot be read ({error!r}): start the run anew") from error


def check(start: Mapping[str, Any], n_layers: int, n_prompts: int, tasks: Collection[str]) -> None:
    """Raises: SettingsError: the checkpoint is of another format, model or stream."""
    if start["version"] != VERSION:
        raise SettingsError(
            f"the checkpoint of this run has version {start['version']!r}, and this swiftopt reads version {VERSION}:"
            " start the run anew"
        )
    if start["n_layers"] != n_layers:
        raise SettingsError(
            f"the checkpoint of this run is of a model with {start['n_layers']} layers, but this one has {n_layers}:"
            " go on with the model that the run began with"
        )
    names = [*start["concluded"], *start["tasks"]]
    if start["n_prompts"] != n_prompts or sorted(names) != sorted(tasks):
        raise SettingsError(
            f"the checkpoint of this run is of a stream of {start['n_prompts']} prompts in the tasks {sorted(names)},"
            f" but this one has {n_prompts} in {sorted(tasks)}: go on with the stream that the run began with"
        )


def _pair_to_json(pair: Pair, with_text: bool) -> list[dict[str, Any]]:
    runs = [pair.plain.to_json(), pair.tuned.to_json()]
    return runs if with_text else [{**run, "text": ""} for run in runs]


def _begun_to_json(begun: Begun) -> dict[str, Any]:
    tally = begun.tally
    return {
        "token_ids": list(begun.token_ids),
        "searched": begun.searched,
        "finish": begun.finish,
        "tally": {
            **{name: getattr(tally, name) for name in TALLIED},
            "widths": {str(n_rows): count for n_rows, count in tally.widths.items()},
            "per_position": list(tally.per_position),
            "refused": tally.refused,
            "reckoned": tally.reckoned,
        },
    }


def _begun_from_json(values: Mapping[str, Any]) -> Begun:
    if not values["token_ids"]:
        raise ValueError("a prompt that was begun has no tokens")
    counts = values["tally"]
    tally = Tally(
        **{name: counts[name] for name in TALLIED},
        widths={int(n_rows): count for n_rows, count in counts["widths"].items()},
        per_position=list(counts["per_position"]),
        refused=counts["refused"],
        reckoned=counts["reckoned"],
    )
    return Begun(tuple(values["token_ids"]), tally, values["searched"], values["finish"])
