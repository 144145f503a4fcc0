"""How good answers are, by their data set's own measure: code is run, numbers, words and summaries are compared."""

from __future__ import annotations

import re
import secrets
import signal
import string
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from math import comb
from os import killpg
from pathlib import Path
from typing import Any

from ..core.errors import SettingsError
from ..core.templates import Judge
from ..core.types import Prompt

MEASURES: Mapping[Judge, str] = {
    "code": "pass@1",
    "number": "exact match",
    "match": "exact match",
    "summary": "ROUGE-2",
}
PROGRAM_S = 10  # that a program may take
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def measure_of(prompts: Sequence[Prompt]) -> str | None:
    """Return the name of the measure that judges answers to the prompts; None where not all have the same one."""
    found = {prompt.reference.get("judge") for prompt in prompts}
    return MEASURES[found.pop()] if len(found) == 1 and None not in found else None  # type: ignore[index]


def check_judges(prompts: Sequence[Prompt]) -> None:
    """Check that what the prompts are judged with is installed.

    Raises: SettingsError: a library is missing.
    """
    if any(prompt.reference.get("judge") == "summary" for prompt in prompts):
        _rouge()


def quality(prompt: Prompt, text: str) -> float:
    """Return how good an answer to the prompt is, from 0 to 1.

    Code: 1 where the data set's tests pass within some seconds, else 0 (HumanEval, arXiv:2107.03374). Numbers: 1 where
    the last one of the answer is the reference's (GSM8K, arXiv:2110.14168; it may stand behind "####"). Words: 1 where
    they are the reference's but for case, articles and punctuation. Summaries: F of ROUGE-2, with stems.

    Raises: KeyError: the prompt has no reference.
    """
    reference = prompt.reference
    judge = reference["judge"]
    if judge == "code":
        return float(runs(reference["before"] + text + "\n" + reference["after"]))
    if judge == "number":
        return float(_last_number(text) is not None and _last_number(text) == _last_number(reference["answer"]))
    if judge == "match":
        return float(_plain_words(text) == _plain_words(reference["answer"]))
    return float(_rouge().score(reference["text"], text)["rouge2"].fmeasure)


def pass_at(k: int, n: int, n_passed: int) -> float:
    """Return the chance that one of `k` samples passes, by `n` of which `n_passed` did (arXiv:2107.03374, Eq. 1)."""
    return 1.0 - comb(n - n_passed, k) / comb(n, k)


def runs(program: str, seconds: int = PROGRAM_S) -> bool:
    """Return whether a Python program ends without an error, in a confined process of its own."""
    word = secrets.token_hex(8)
    command = [sys.executable, "-I", str(Path(__file__).with_name("judged_program.py")), word, str(seconds)]
    pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=nowhere, cwd=folder, env={}, start_new_session=True
        ) as child,
    ):
        try:
            said, _ = child.communicate(program.encode(errors="replace"), timeout=2 * seconds)
        except subprocess.TimeoutExpired:
            return False
        finally:
            with suppress(ProcessLookupError):
                killpg(child.pid, signal.SIGKILL)  # with whatever it started
    return child.returncode == 0 and said.decode(errors="replace").endswith(f"{word}\n")


def _last_number(text: str) -> float | None:
    found = _NUMBER.findall(text.split("####")[-1])
    return float(found[-1].replace(",", "")) if found else None


def _plain_words(text: str) -> list[str]:
    bare = text.lower().translate(str.maketrans("", "", string.punctuation))
    return _ARTICLES.sub(" ", bare).split()


def _rouge() -> Any:
    try:
        scorer = import_module("rouge_score.rouge_scorer")
    except ImportError as error:
        raise SettingsError("summaries are judged with rouge-score: pip install 'swiftopt[quality]'") from error
    return scorer.RougeScorer(["rouge2"], use_stemmer=True)
