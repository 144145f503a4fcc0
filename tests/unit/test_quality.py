"""Judging of answers: code runs in a confined process; numbers, words and summaries are compared with a reference."""

from __future__ import annotations

import itertools
import socket
import sys
from contextlib import closing
from math import comb
from pathlib import Path

import pytest

from swiftopt.core.templates import TEMPLATES
from swiftopt.core.types import Prompt
from swiftopt.tasks.measures import measure_of, pass_at, program_passes, quality
from swiftopt.tasks.report import qualities

ADD = {"prompt": "def add(a, b):\n", "test": "def check(f):\n    assert f(1, 2) == 3\n", "entry_point": "add"}


def of(template: str, row: dict[str, object]) -> Prompt:
    return Prompt("1", "t", text="q", reference=TEMPLATES[template].reference(row, "here"))


@pytest.mark.parametrize(
    ("answer", "passes"),
    [
        ("    return a + b\n", 1.0),
        ("    return a - b\n", 0.0),
        ("    return a +\n", 0.0),
        ("    while True:\n        pass\n", 0.0),
        ("    return 3\nimport sys\nsys.exit(0)\n", 0.0),  # ends before the tests
        ("    return 3\nimport os\nos._exit(0)\n", 0.0),
        ("    return [0] * 10**10\n", 0.0),  # more memory than it may have
    ],
)
def test_code_passes_where_its_tests_do(answer: str, passes: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_passes, "__defaults__", (2,))
    assert quality(of("humaneval", ADD), answer) == passes


def test_program_that_waits_is_ended() -> None:
    assert not program_passes("import time\ntime.sleep(60)\n", seconds=1)


def test_program_writes_no_file_and_removes_none(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    kept, new = tmp_path / "kept", tmp_path / "new"
    kept.write_text("text")
    kept.chmod(0o666)
    program_passes(f"open({str(new)!r}, 'w').write('x' * 10)\n")
    program_passes(f"open({str(kept)!r}, 'w').write('')\n")
    assert not new.exists() or new.read_text() == ""
    assert kept.exists() and kept.stat().st_size in (0, 4)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="namespaces are Linux's")
def test_program_has_no_network() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
        own = Path("/proc/self/ns/net").readlink()
        if not program_passes(f"import os\nassert os.readlink('/proc/self/ns/net') != {str(own)!r}\n"):
            pytest.skip("this kernel gives an unprivileged process no network of its own")
        assert not program_passes(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=2)\n")


@pytest.mark.parametrize(
    ("answer", "right"),
    [(" 3 + 4 = 7\n#### 7", 1.0), (" It is $7.00.", 1.0), (" 7, I think; or 8", 0.0), (" no idea", 0.0)],
)
def test_number_is_the_last_one(answer: str, right: float) -> None:
    assert quality(of("gsm8k", {"question": "?", "answer": "3 + 4 = 7\n#### 7"}), answer) == right


def test_number_of_thousands_is_that_number() -> None:
    assert quality(of("gsm8k", {"question": "?", "answer": "#### 1,200"}), "so 1200 in all") == 1.0


@pytest.mark.parametrize(("answer", "right"), [("Ada.", 1.0), (" the ada", 1.0), ("Ada Byron", 0.0), ("", 0.0)])
def test_words_are_the_reference_but_for_case_articles_and_punctuation(answer: str, right: float) -> None:
    assert quality(of("natural-questions", {"question": "?", "answer": ["Ada"]}), answer) == right


def test_summary_is_judged_by_pairs_of_words() -> None:
    pytest.importorskip("rouge_score")
    prompt = of("xsum", {"document": "?", "summary": "the cat sat on the mat"})
    assert quality(prompt, "the cat sat on the mat") == pytest.approx(1.0)
    # pairs: the cat, cat sat, sat on | of 5 in the reference and 3 in the answer
    assert quality(prompt, "the cat sat on") == pytest.approx(2 * 1.0 * 0.6 / 1.6)
    assert quality(prompt, "dogs bark") == 0.0


def test_measure_is_that_of_all_prompts_or_none() -> None:
    code, number = of("humaneval", ADD), of("gsm8k", {"question": "?", "answer": "#### 7"})
    assert measure_of([code, code]) == "pass@1" and measure_of([number]) == "exact match"
    assert measure_of([code, number]) is measure_of([code, Prompt("1", "t", text="q")]) is None


@pytest.mark.parametrize(("k", "n", "passed"), [(1, 4, 1), (2, 4, 1), (2, 5, 2), (3, 5, 0), (2, 4, 4), (5, 5, 1)])
def test_pass_at_k_is_the_share_of_choices_that_hold_a_passing_sample(k: int, n: int, passed: int) -> None:
    choices = list(itertools.combinations([True] * passed + [False] * (n - passed), k))
    assert pass_at(k, n, passed) == pytest.approx(sum(map(any, choices)) / comb(n, k))


def test_quality_of_a_method_is_the_mean_over_prompts_of_their_samples() -> None:
    scores = {0: 1.0, 1: 0.0, 2: 1.0, 3: 1.0, 4: 0.0}  # two samples each; the last prompt has only one
    found = qualities(scores, 2)
    assert found["quality"] == 0.75 and found["pass_at_10"] is None
    low, high = found["quality_interval"]
    assert (low, high) == (0.0, 1.0)  # two prompts: 0.75 ± 12.7 * 0.25, within what a share can be
    low, high = qualities({number: float(number % 4 > 0) for number in range(40)}, 1)["quality_interval"]
    assert (low, high) == pytest.approx((0.75 - 0.14024, 0.75 + 0.14024), abs=1e-5)
    assert qualities({0: 1.0}, 1)["quality_interval"] is None
    many = qualities({number: float(number % 10 == 0) for number in range(30)}, 10)
    assert many["quality"] == pytest.approx(0.1) and many["pass_at_10"] == 1.0
    assert qualities({}, 1) == {}
