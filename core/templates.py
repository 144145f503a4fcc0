"""Templates that turn rows of common data sets into prompts: wording, examples, stop strings, judging."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from .errors import StreamError, look_up

# How `tasks.measures` compares an answer with its reference.
Judge = Literal["code", "number", "match", "summary"]

JUDGES: tuple[str, ...] = get_args(Judge)

_CODE_ENDS = ("\ndef ", "\nclass ", "\nif ", "\nprint(", "\n#", "\n@", "\n```", '\n"""')
_STEPS = re.compile(r"<<[^>]*>>")  # Calculator annotations in GSM8K answers: <<48/2=24>>.


@dataclass(frozen=True, slots=True)
class Template:
    """How a row becomes a prompt: `question` and `answer` are format strings over the row's fields.

    An example is a question with its answer; by default `shots` of them precede the question. `words` is the number of
    words after which the question's fields are cut. `references` are the values that `judge` compares with, by name. A
    completion ends before one of `stop`, or after `max_new_tokens` if the caller sets no length.

    Raises: StreamError: in every method, if the row lacks a field.
    """

    question: str
    answer: str
    shots: int = 0
    stop: tuple[str, ...] = ()
    max_new_tokens: int = 512
    judge: Judge | None = None
    references: Mapping[str, str] = field(default_factory=dict)
    words: int | None = None

    def ask(self, row: Mapping[str, Any], where: str) -> str:
        """Return the question of a row."""
        return _fill(self.question, self._cut_words(row), where)

    def example(self, row: Mapping[str, Any], where: str) -> str:
        """Return question and answer of a row, as an example for other rows."""
        return self.ask(row, where) + _STEPS.sub("", _fill(self.answer, row, where))

    def reference(self, row: Mapping[str, Any], where: str) -> dict[str, str]:
        """Return the reference by which an answer to the row is judged; empty if answers are not judged."""
        if self.judge is None:
            return {}
        return {"judge": self.judge, **{name: _fill(text, row, where) for name, text in self.references.items()}}

    def _cut_words(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        if self.words is None:
            return row
        return {
            key: " ".join(value.split()[: self.words]) if isinstance(value, str) else value
            for key, value in row.items()
        }


TEMPLATES: Mapping[str, Template] = {
    "humaneval": Template(
        "{prompt}",
        "{canonical_solution}\n",
        stop=_CODE_ENDS,
        judge="code",
        references={"before": "{prompt}", "after": "{test}\ncheck({entry_point})\n"},
    ),
    "mbpp": Template(
        '"""\n{text}\nYour code should pass this test:\n{test_list[0]}\n"""\n',
        "{code}\n\n",
        shots=3,
        stop=(*_CODE_ENDS[2:], "\nassert "),
        judge="code",
        references={"before": "{test_setup_code}\n", "after": "{test_list}"},
    ),
    "gsm8k": Template(
        "Question: {question}\nAnswer:",
        " {answer}\n\n",
        shots=5,
        stop=("\nQuestion:",),
        max_new_tokens=256,
        judge="number",
        references={"answer": "{answer}"},
    ),
    "cnn-dm": Template(
        "Article: {article}\nSummary:",
        " {highlights}\n\n",
        shots=1,
        stop=("\nArticle:", "\n\n"),
        max_new_tokens=64,
        judge="summary",
        references={"text": "{highlights}"},
    ),
    "xsum": Template(
        "Article: {document}\nSummary in one sentence:",
        " {summary}\n\n",
        shots=1,
        stop=("\n",),
        max_new_tokens=64,
        judge="summary",
        references={"text": "{summary}"},
    ),
    "tinystories": Template("{text}", "", max_new_tokens=128, words=24),
    "alpaca": Template(
        "Instruction: {instruction}\n{input}\nResponse:", " {output}\n\n", shots=1, stop=("\nInstruction:",)
    ),
    "wmt14-de-en": Template(
        "German: {translation[de]}\nEnglish:",
        " {translation[en]}\n",
        shots=3,
        stop=("\n",),
        max_new_tokens=128,
    ),
    "natural-questions": Template(
        "Question: {question}\nAnswer:",
        " {answer[0]}\n",
        shots=5,
        stop=("\n",),
        max_new_tokens=32,
        judge="match",
        references={"answer": "{answer[0]}"},
    ),
}


def template_of(name: str) -> Template:
    """Return a template by name; errors as in `look_up`."""
    return look_up("template", name, TEMPLATES)


def _fill(text: str, row: Mapping[str, Any], where: str) -> str:
    try:
        return text.format_map({key: _Lines(value) if isinstance(value, list) else value for key, value in row.items()})
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise StreamError(
            f"{where} has no field for {text!r} ({error}): use a file of the template's data set"
        ) from error


class _Lines(list[Any]):
    """A list that is formatted line by line."""

    def __format__(self, spec: str) -> str:
        return "\n".join(map(str, self))
