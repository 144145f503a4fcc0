"""Streaming text at a terminal: lines break between words, and no text is lost."""

from __future__ import annotations

import io
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len, set_cell_size

from swiftopt.terminal.output import TextPrinter

WIDTH = 12


class Screen(io.StringIO):
    """A terminal that breaks lines at its edge and knows the two escape sequences in use."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def isatty(self) -> bool:
        return True

    @property
    def lines(self) -> list[str]:
        rows, column = [""], 0
        for part in re.findall(r"\x1b\[\d*[DK]|\n|.", self.getvalue(), re.DOTALL):
            if part.endswith("D") and len(part) > 1:
                column = max(0, min(column, self.width - 1) - int(part[2:-1]))
            elif part.endswith("K") and len(part) > 1:
                rows[-1] = set_cell_size(rows[-1], column)
            elif part == "\n" or column + cell_len(part) > self.width:
                rows.append("" if part == "\n" else part)
                column = cell_len(rows[-1])
            else:
                rows[-1], column = rows[-1] + part, column + cell_len(part)
        return rows


def shown(pieces: list[str], monkeypatch: pytest.MonkeyPatch, width: int = WIDTH) -> list[str]:
    screen = Screen(width)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", screen)
        patched.setenv("COLUMNS", str(width))
        patched.setenv("TERM", "xterm")
        printer = TextPrinter()
        for piece in pieces:
            printer.write(piece)
    return screen.lines


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("one two three four", ["one two ", "three four"]),
        ("exact width! next", ["exact ", "width! next"]),
        ("    indented words go", ["    ", "indented ", "words go"]),
        ("a verylongwordthatfitsnoline b", ["a ", "verylongword", "thatfitsnoli", "ne b"]),
        ("first\n\nsecond", ["first", "", "second"]),
        ("漢字はどこでも折れる", ["漢字はどこ", "でも折れる"]),
    ],
)
def test_lines_break_between_words_however_the_text_comes(
    text: str, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for size in (1, 2, 3, 7, len(text)):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        assert shown(pieces, monkeypatch) == lines, size


@given(st.lists(st.text("ab é漢\n", max_size=9), max_size=12))
def test_words_are_shown_whole_and_in_order_and_lines_fit(pieces: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        lines = shown(pieces, patch)
    assert "".join("".join(lines).split()) == "".join("".join(pieces).split())
    whole = [word for word in re.findall(r"[abé]+", "".join(pieces)) if cell_len(word) < WIDTH]
    assert all(any(re.search(rf"(?<![abé]){word}(?![abé])", line) for line in lines) for word in whole)
    assert max(map(cell_len, lines)) <= WIDTH


@pytest.mark.parametrize("width", [80, 120])
def test_answer_breaks_between_words_at_usual_widths(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [f"{'answer' * (1 + i % 4)}{i}" for i in range(90)]
    pieces = re.findall(r".{1,5}", " ".join(words))  # tokens end within words
    lines = shown(pieces, monkeypatch, width)
    assert [word for line in lines for word in line.split()] == words
    lengths = [len(line.rstrip()) for line in lines]
    assert max(lengths) <= width and min(lengths[:-1]) > width - max(map(len, words)) - 2, "lines are filled"


def test_text_that_is_no_terminals_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    TextPrinter().write("word " * 100)
    assert capsys.readouterr().out == "word " * 100
