"""Completions conform to their grammar, and drafting changes none of their tokens."""

from __future__ import annotations

import copy
import json
import re
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from fakes import WordTokenizer, letter_tokenizer, worded_runtime
from families import VOCAB, tiny_runtime
from hypothesis import given
from hypothesis import strategies as st
from mtp_files import with_layer
from native import native_runtime, parts

from swiftopt.core.errors import InvalidInput, SettingsError
from swiftopt.core.types import Completion, Prompt, Sampling
from swiftopt.decoding.engine import Engine
from swiftopt.decoding.events import Round
from swiftopt.decoding.grammar import Grammar, GrammarMask
from swiftopt.decoding.loop import decoding
from swiftopt.decoding.methods import METHODS, PLAIN, Resources, build
from swiftopt.decoding.session import Session
from swiftopt.decoding.verify import TargetWalk
from swiftopt.models.loading import load
from swiftopt.models.rows import Rows

N_NEW = 60
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["true", "a", "tea"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "sizes", "ok"],
    "additionalProperties": False,
}
DATE = r"[0-9]{4}-[0-9]{2}(-[0-9]{2})?"
GRAMMARS = {
    "schema": Grammar.json_schema(SCHEMA),
    "object": Grammar.json_object(),
    "regex": Grammar.regex(DATE),
    "endless": Grammar.regex("(true|tree|[a-c])*"),
}
LOSSLESS = [name for name, info in METHODS.items() if not info.lossy]
PROMPT = Prompt("1", "t", text='sizes of "tea": {"name": "tea", "sizes": [1, 22], "ok": true} and 2026-11')


@cache
def lettered(family: str = "llama") -> Resources:
    """Return the parts of methods on the native kernels, with a tokenizer for grammars."""
    runtime, draft = with_layer(native_runtime(family)), native_runtime(family, seed=1)
    runtime.tokenizer = draft.tokenizer = letter_tokenizer()
    return replace(parts(family), runtime=runtime, draft_runtime=draft)


def run(name: str, grammar: Grammar | None, sampling: Sampling, n_new: int = N_NEW, **options: Any) -> Completion:
    own = lettered()
    session = Session(own.runtime, sampling, n_new, grammar=grammar, **options)
    return session.run(PROMPT, build(name, own))[0].completion


SAMPLINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=1.2, top_p=0.95, seed=3),
    "hot": Sampling(temperature=2.0, min_p=0.01, seed=4),
}
CASES = [
    (name, sampling, list(GRAMMARS)[(i + j) % len(GRAMMARS)])
    for i, name in enumerate(LOSSLESS)
    for j, sampling in enumerate(SAMPLINGS)
]


@pytest.mark.parametrize(("name", "kind", "grammar"), CASES)
def test_drafted_text_equals_plain_decoding_under_a_grammar(name: str, kind: str, grammar: str) -> None:
    """Methods that draw their drafts give other tokens for a seed, which also conform to the grammar."""
    sampling = SAMPLINGS[kind]
    done = run(name, GRAMMARS[grammar], sampling)
    if sampling.greedy or isinstance(build(name, lettered()).verifier, TargetWalk):
        assert done.token_ids == token_by_token(grammar, sampling)
    if done.finish_reason == "stop":
        assert keeps[grammar](done.text)
    assert 1 not in done.token_ids[:-1] and (done.finish_reason == "stop") == (done.token_ids[-1] == 1)


@cache
def token_by_token(grammar: str, sampling: Sampling) -> tuple[int, ...]:
    """Return the rule's choices of separate passes over the text, with a new grammar for every token."""
    runtime = lettered().runtime
    session = Session(runtime, sampling, N_NEW, grammar=GRAMMARS[grammar])
    prompt_ids = session.encode(PROMPT)
    text, rule = list(prompt_ids), session.rule(len(prompt_ids))
    while len(text) < len(prompt_ids) + N_NEW and text[-1] != 1:
        logits = runtime.forward(Rows(text, 0), runtime.new_buffer(len(text)))[-1]
        anew = session.rule(len(prompt_ids))
        scores = anew.scores(text, logits)
        text.append(int(rule.noisy(scores, len(text)).argmax()))
    return tuple(text[len(prompt_ids) :])


def of_schema(text: str) -> bool:
    found = json.loads(text)
    in_range = all(isinstance(size, int) and 0 <= size <= 99 for size in found["sizes"])
    known = found["name"] in ("true", "a", "tea") and isinstance(found["ok"], bool)
    return set(found) == {"name", "sizes", "ok"} and in_range and len(found["sizes"]) <= 3 and known


keeps: dict[str, Callable[[str], bool]] = {
    "schema": of_schema,
    "object": lambda text: isinstance(json.loads(text), dict),
    "regex": lambda text: re.fullmatch(DATE, text) is not None,
    "endless": lambda text: re.fullmatch("(true|tree|[a-c])*", text) is not None,
}


def test_grammars_are_finished_and_drafts_accepted_under_them() -> None:
    """Guards the law above, which must include finished texts and accepted tokens."""
    finished, accepted = set(), 0
    for grammar in GRAMMARS:
        for seed in range(4):
            done = run("spd", GRAMMARS[grammar], Sampling(temperature=1.0, seed=seed), 180)
            accepted += done.accepted
            finished |= {grammar} if done.finish_reason == "stop" else set()
    assert finished >= {"schema", "regex", "endless"} and accepted > 0


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=2)], ids=["greedy", "sampled"])
def test_forced_text_of_a_grammar_is_drafted_for_free(sampling: Sampling) -> None:
    """The letters of a schema's names are drafted even in plain decoding, and the number of draws stays the same."""
    names = {f"{name}_of_it": {"type": "null"} for name in ("length", "colour")}
    grammar = Grammar.json_schema(
        {"type": "object", "properties": names, "required": [*names], "additionalProperties": False}
    )
    done = run("plain", grammar, sampling, 100)
    assert done.accepted > 12 and done.accepted == done.drafted
    assert done.target_passes == done.n_tokens - 1 - done.accepted
    assert run("plain", grammar, sampling, done.n_tokens - 1).token_ids == done.token_ids[:-1]


@pytest.mark.parametrize("name", ["prompt-lookup", "adaptive"])
def test_earlier_arguments_are_drafted_after_forced_text(name: str) -> None:
    """A repeated call takes fewer passes than it has free tokens."""
    city = {"type": "string", "minLength": 8, "maxLength": 12}
    arguments = {"type": "object", "properties": {"city": city}, "required": ["city"], "additionalProperties": False}
    properties = {"name": {"const": "look_up"}, "arguments": arguments, "then": {"const": "report_it"}}
    grammar = Grammar.json_schema(
        {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    )
    own, sampling = lettered(), Sampling(temperature=1.5, seed=5)
    session = Session(own.runtime, sampling, 100, grammar=grammar)
    ids = session.encode_text("Go")

    def decoded(name: str, prediction: Sequence[int] = ()) -> tuple[Completion, list[Round]]:
        rule, ending, rounds = session.rule(len(ids)), session.ending(100), list[Round]()
        work = decoding(own.runtime, ids, build(name, own), rule, ending, prediction=prediction)
        engine = Engine()
        request = engine.add(work)
        while engine.requests:
            rounds += [event for event in engine.step() if isinstance(event, Round)]
        return request.result, rounds

    plain, by_grammar = decoded("plain")
    again, rounds = decoded(name, plain.token_ids)
    assert again.token_ids == plain.token_ids and again.target_passes < 0.7 * plain.target_passes
    assert {event.drafter for event in by_grammar} == {"grammar", "target"}
    sources = [{token.source for token in event.traced} for event in rounds]
    assert any({"grammar", "prediction"} <= of_round for of_round in sources)


def test_only_the_stop_token_follows_a_finished_text() -> None:
    done = run("plain", Grammar.regex("[a-c]{2}"), Sampling(temperature=1.0))
    assert re.fullmatch("[a-c]{2}", done.text) and done.n_tokens == 3 and done.finish_reason == "stop"
    longer = run("plain", Grammar.regex("[a-c]{2}"), Sampling(temperature=1.0), min_new_tokens=5)
    assert longer.text == done.text  # there is nothing else to say, whatever the least length


def test_stop_string_can_end_the_text_of_a_grammar() -> None:
    stop = lettered().runtime.tokenizer.convert_tokens_to_ids("-")
    done = run("plain", GRAMMARS["regex"], Sampling(temperature=1.0), stop_token_ids=[stop])
    assert re.fullmatch("[0-9]{4}-", done.text)
    assert re.fullmatch("[0-9]{4}", run("plain", GRAMMARS["regex"], Sampling(temperature=1.0), stop_strings=["-"]).text)


def fresh(grammar: Grammar) -> GrammarMask:
    return grammar.mask(lettered().runtime.tokenizer, VOCAB, 0, [1])


@given(st.data())
def test_masks_do_not_depend_on_earlier_queries(data: st.DataObject) -> None:
    """Texts of a tree are drawn under their masks in any order; some violate the grammar at their end."""
    grammar = GRAMMARS[data.draw(st.sampled_from(sorted(GRAMMARS)))]
    asked, texts = fresh(grammar), [[]]  # type: GrammarMask, list[list[int]]
    for _ in range(data.draw(st.integers(1, 12))):
        text = data.draw(st.sampled_from(texts))
        expected = fresh(grammar).allowed(text, VOCAB)
        assert torch.equal(asked.allowed(text, VOCAB), expected)
        texts.append([*text, data.draw(st.sampled_from(expected.nonzero()[:, 0].tolist()))])
        if data.draw(st.booleans()):
            asked.allowed([*text, data.draw(st.integers(0, VOCAB - 1)), 5], VOCAB)


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_tokens_read_for_a_mask_do_not_grow_with_the_text(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, allowed = list[int](), GrammarMask.allowed

    def noting(mask: GrammarMask, generated: Sequence[int], *options: Any) -> torch.Tensor:
        lengths.append(len(generated))
        return allowed(mask, generated, *options)

    monkeypatch.setattr(GrammarMask, "allowed", noting)
    done = run("swift", GRAMMARS["endless"], SAMPLINGS[kind], min_new_tokens=N_NEW)
    assert done.n_tokens == N_NEW < len(lengths) and max(lengths) <= 25


def test_fully_masked_scores_leave_the_grammars_tokens() -> None:
    mask, digits = fresh(Grammar.regex("[0-9]")), lettered().runtime.tokenizer.convert_tokens_to_ids(list("0123456789"))
    scores = torch.zeros(1, VOCAB)
    assert mask(torch.tensor([[]], dtype=torch.long), scores)[0].isfinite().nonzero()[:, 0].tolist() == sorted(digits)
    scores[0, digits] = float("-inf")
    assert mask(torch.tensor([[]], dtype=torch.long), scores)[0].isfinite().nonzero()[:, 0].tolist() == sorted(digits)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: Grammar.json_schema({"type": "objekt"}),
            r"^the JSON schema cannot be used, at #: change or simplify this part \(llguidance: .*objekt.*\)$",
        ),
        (
            lambda: Grammar.json_schema({"type": "object", "properties": {"a": {"type": "string", "pattern": "(odd"}}}),
            r"cannot be used, at #/properties/a: change or simplify this part \(llguidance: .*odd.*\)$",
        ),
        (
            lambda: Grammar.json_schema(
                {"$defs": {"b": {"anyOf": [{"type": "null"}, {"uniqueItems": True}]}}, "items": {"$ref": "#/$defs/b"}}
            ),
            r"the JSON schema cannot be used, at #/\$defs/b/anyOf/1: .*uniqueItems",
        ),
        (lambda: Grammar.json_schema({"$ref": "#/nowhere"}), "the JSON schema cannot be used, at #: .*nowhere"),
        (lambda: Grammar.json_schema({"minimum": 10**400}), "the JSON schema cannot be used: .*below 2\\^64"),
        (lambda: Grammar.json_schema({"maximum": 10**30}), "the JSON schema cannot be used: .*below 2\\^64"),
        (
            lambda: Grammar.regex("[a-"),
            r"^the regular expression cannot be used: correct or simplify it \(llguidance: .*\)$",
        ),
    ],
)
def test_grammar_that_cannot_be_compiled_is_refused_in_one_sentence(make: Callable[[], Grammar], words: str) -> None:
    with pytest.raises(InvalidInput, match=words) as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Grammar.json_schema({"properties": {f"p{i}": {"type": "string"} for i in range(3000)}}), "too big"),
        (lambda: Grammar.json_schema({"enum": ["a" * 100] * 3000}), "more than 262144 characters"),
        (lambda: Grammar.regex("a" * 300_000), "more than 262144 characters"),
        (
            lambda: Grammar.json_schema(
                {
                    "$defs": {"big": {"properties": {f"p{i}": {"type": "string"} for i in range(1000)}}},
                    "anyOf": [{"$ref": "#/$defs/big"}] * 200 + [{"type": "objekt"}],
                }
            ),
            "objekt",
        ),
        (lambda: fresh(Grammar.regex("(a{1000}){1000}")).allowed([], VOCAB), None),
    ],
)
def test_grammar_that_compiles_slowly_is_refused(make: Callable[[], object], words: str | None) -> None:
    """Other requests wait while it is compiled or a mask is computed."""
    with nullcontext() if words is None else pytest.raises(InvalidInput, match=words):
        began = time.thread_time()
        try:
            make()
        finally:
            assert time.thread_time() - began < 1.5


def test_grammar_that_becomes_too_slow_ends_the_text() -> None:
    """A failed matcher accepts no token, like one whose text violates the grammar."""
    mask = fresh(Grammar.json_schema({"type": "string", "pattern": "^a{100000}$"}))
    quote, letter = (letter_tokenizer().convert_tokens_to_ids(token) for token in '"a')
    assert mask.allowed([], VOCAB).nonzero().tolist() == [[quote]]
    for ask in (lambda: mask.allowed([quote], VOCAB), lambda: mask.allowed([quote, letter], VOCAB)):
        with pytest.raises(InvalidInput, match=r"further: use a simpler schema or expression \(.*too many expressions"):
            ask()


def test_grammar_is_refused_if_it_cannot_be_enforced() -> None:
    grammar = GRAMMARS["regex"]
    worded: Any = worded_runtime()
    worded.tokenizer = WordTokenizer()
    with pytest.raises(InvalidInput, match=r"this model's tokenizer: decode without a grammar \(llguidance: "):
        Session(worded, Sampling(), 8, grammar=grammar)
    endless = tiny_runtime("llama")
    tokenizer = copy.deepcopy(letter_tokenizer())
    tokenizer.eos_token = None
    endless.tokenizer = tokenizer
    with pytest.raises(InvalidInput, match="no stop token"):
        Session(endless, Sampling(), 8, grammar=grammar)
    for name in METHODS:
        if METHODS[name].lossy:
            with pytest.raises(SettingsError, match=f"method {name} is lossy"):
                run(name, grammar, Sampling())


def test_grammar_is_compiled_once_for_a_tokenizer() -> None:
    from swiftopt.decoding import grammar

    before = grammar._matcher.cache_info().misses
    for _ in range(3):
        fresh(Grammar.json_schema({"type": "object", "properties": {"once": {"type": "null"}}}))
    assert grammar._matcher.cache_info().misses == before + 1


@pytest.mark.model
def test_real_model_satisfies_a_schema_with_any_method() -> None:
    runtime = load("smollm2-135m", "bfloat16", "cpu", speed="auto")
    own = replace(lettered(), runtime=runtime, layer_set=None, draft_runtime=None)
    prompt = Prompt("1", "t", text="A person as JSON: ")
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 120}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    session = Session(runtime, Sampling(), 80, grammar=Grammar.json_schema(schema))
    plain, fast = (session.run(prompt, method)[0].completion for method in (PLAIN, build("prompt-lookup", own)))
    assert plain.token_ids == fast.token_ids and plain.finish_reason == "stop"
    assert set(json.loads(plain.text)) == {"name", "age"}
