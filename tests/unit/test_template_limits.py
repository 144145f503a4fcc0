"""Chat templates that run or grow without end."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from swiftopt.core.errors import InvalidInput
from swiftopt.decoding import template_limits
from swiftopt.decoding.chats import ChatPrompt

MESSAGES = [{"role": "user", "content": "hi"}]
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
ENDLESS = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in messages %}{% endfor %}{% endfor %}{% endfor %}"
)
GROWING = "{% set n = namespace(x='abcdefgh') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}"
BAD = {
    "a loop": (ENDLESS, r"runs longer than 0\.3 s"),
    "texts that double": (GROWING, "takes more than .* GiB of memory"),
    "one long text": ("{{ 'a' * 30000000000 }}", "takes more than .* GiB of memory"),
    "a power": ("{{ 9 ** (9 ** 9) }}", "computes with numbers that are too large"),
    "a macro that calls itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself without end"),
}


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "LONGEST_S", 0.3)
    monkeypatch.setattr(template_limits, "MOST_BYTES", 256 << 20)


def tokenizer(template: str) -> Any:
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"hi": 0}, unk_token="hi")))
    made.chat_template = template
    return made


@pytest.mark.parametrize("what", BAD)
def test_a_template_without_an_end_is_one_sentence(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    template, words = BAD[what]
    if "runs longer" not in words:  # On a busy machine 0.3 s may pass before memory is full.
        monkeypatch.setattr(template_limits, "LONGEST_S", 9.0)
    with pytest.raises(InvalidInput, match=f"this model's chat template {words}") as caught:
        ChatPrompt(tokenizer(template + PLAIN), MESSAGES, {})
    assert "\n" not in str(caught.value)
    assert ChatPrompt(tokenizer(PLAIN), MESSAGES, {}).text == "user: hi"  # The next template is unaffected.


def test_a_template_is_stopped_in_any_thread() -> None:
    errors: list[Exception] = []

    def render() -> None:
        try:
            ChatPrompt(tokenizer(ENDLESS + PLAIN), MESSAGES, {})
        except InvalidInput as error:
            errors.append(error)

    threads = [threading.Thread(target=render) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert len(errors) == 2


def test_a_template_cannot_reach_the_machine() -> None:
    reaching = "{{ messages.__class__.__base__.__subclasses__() }}" + PLAIN
    with pytest.raises(InvalidInput, match=r"does not suit this model's chat template .*unsafe"):
        ChatPrompt(tokenizer(reaching), MESSAGES, {})


def test_limits_end_with_the_template() -> None:
    with template_limits.limited():
        time.sleep(0.05)
    until = time.monotonic() + 0.5
    while time.monotonic() < until:  # A late interruption would be raised here.
        time.sleep(0.01)
    assert bytearray(300 << 20)
