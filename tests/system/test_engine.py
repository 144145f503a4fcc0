"""The laws of the engine: a request gives what it gives alone, whatever runs beside it, and gives back what it held."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from families import tiny_runtime
from hypothesis import given
from hypothesis import strategies as st
from native import native, parts, repeating, words
from tiny_files import save
from torch import Tensor

from swiftopt.cli.main import run
from swiftopt.core.methods import METHODS
from swiftopt.core.types import Completion, LayerSet, Sampling
from swiftopt.decoding.context import Context, Ending
from swiftopt.decoding.draft import Draft, Drafting
from swiftopt.decoding.engine import Engine, PassGenerator, Request, alone, side_by_side
from swiftopt.decoding.loop import decode, decoding
from swiftopt.decoding.method import PLAIN, Method
from swiftopt.decoding.methods import Parts, build
from swiftopt.decoding.rule import TokenRule
from swiftopt.models.buffer import KVBuffer
from swiftopt.models.rows import Pass, Rows
from swiftopt.models.runtime import Runtime

N_NEW = 20
SAMPLINGS = [Sampling(), Sampling(temperature=0.9, top_p=0.9, seed=5), Sampling(temperature=0.8, seed=11)]
FAMILIES = ("llama", "gemma3", "gpt2", "phi3-window")


@cache
def in_float64(family: str) -> Parts:
    """What methods are made of, on torch's operations, whose bits depend on the number of rows."""
    own = parts(family)
    assert own.heads is not None
    return Parts(tiny_runtime(family), own.layer_set, None, None, tiny_runtime(family, seed=1), own.costs)


def methods_of(own: Parts, names: Sequence[str]) -> list[Method]:
    """One of each, with a state of its own."""
    return [build(name, own) for name in names]


def request(
    own: Parts, method: Method, ids: list[int], sampling: Sampling, n_new: int = N_NEW
) -> PassGenerator[Completion]:
    return decoding(own.runtime, ids, method, TokenRule.of(sampling, None), Ending(n_new))


def by_itself(own: Parts, method: Method, ids: list[int], sampling: Sampling, n_new: int = N_NEW) -> tuple[int, ...]:
    return alone(request(own, method, ids, sampling, n_new)).token_ids


def buffers() -> int:
    """Buffers that something still holds."""
    gc.collect()
    return sum(type(each) is KVBuffer for each in gc.get_objects())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("at_once", [2, 5, 40])
def test_every_method_beside_every_other_gives_the_tokens_it_gives_alone(family: str, at_once: int) -> None:
    """Lossy ones too, by bits in bfloat16: what a row's logits are depends on nothing beside it."""
    own = parts(family, with_model=True)
    names = [name for name in METHODS for _ in range(2)]
    asked = [(words(i, 3 + 5 * (i % 3)) * 2, SAMPLINGS[i % 3]) for i in range(len(names))]
    expected = [
        by_itself(own, method, ids, sampling)
        for method, (ids, sampling) in zip(methods_of(own, names), asked, strict=True)
    ]
    works = (
        request(own, method, ids, sampling)
        for method, (ids, sampling) in zip(methods_of(own, names), asked, strict=True)
    )
    assert [done.token_ids for done in side_by_side(works, at_once)] == expected


@given(st.data())
def test_tokens_do_not_depend_on_arrivals_and_cancels(data: st.DataObject) -> None:
    own = data.draw(st.sampled_from([parts("llama"), parts("gemma3"), in_float64("llama")]))
    names = ["plain", "swift", "adaptive", "prompt-lookup", "lookahead", "jacobi"]
    engine, running, cancelled = Engine(), list[tuple[Request[Completion], tuple[int, ...]]](), set[int]()
    for _ in range(data.draw(st.integers(3, 25))):
        act = data.draw(st.sampled_from(["add", "step", "step", "cancel"]))
        if act == "add":
            name, seed = data.draw(st.sampled_from(names)), data.draw(st.integers(0, 5))
            n_new, sampling = data.draw(st.sampled_from([1, 7, 16])), SAMPLINGS[seed % 2]
            ids = repeating(seed)
            expected = decode(own.runtime, ids, PLAIN, TokenRule.of(sampling, None), Ending(n_new)).token_ids
            running.append((engine.add(request(own, build(name, own), ids, sampling, n_new)), expected))
        elif act == "cancel" and running:
            at = data.draw(st.integers(0, len(running) - 1))
            if not running[at][0].is_done:
                engine.cancel(running[at][0])
                cancelled.add(at)
        else:
            engine.step()
    while engine.requests:
        engine.step()
    for i, (one, expected) in enumerate(running):
        assert one.is_done != (i in cancelled)
        if one.is_done:
            assert one.result.token_ids == expected


class _Failing:
    """Drafts twice, then raises; or asks for a pass that cannot be run."""

    layer_set: LayerSet | None = None

    def __init__(self, bad_pass: bool) -> None:
        self.bad_pass = bad_pass

    def begin(self, context: Context) -> Drafting:
        self.context, self.drafting = context, PLAIN.drafter.begin(context)
        return self

    def draft(self, room: int) -> PassGenerator[Draft]:
        if len(self.context.generated) == 3:
            if not self.bad_pass:
                raise RuntimeError("no more ideas")
            runtime, buffer = self.context.runtime, self.context.buffer
            yield Pass(runtime, Rows([1], buffer.capacity), buffer, drafts=True)
        return (yield from self.drafting.draft(room))

    def observe(self, outcome: object) -> None:
        pass

    def max_rows(self, room: int) -> int:
        return 1


@pytest.mark.parametrize("bad_pass", [False, True])
def test_request_that_fails_takes_no_other_along(bad_pass: bool) -> None:
    own, engine = parts("llama"), Engine()
    ids, expected = repeating(1), by_itself(parts("llama"), PLAIN, repeating(1), SAMPLINGS[0])
    good = [engine.add(request(own, PLAIN, ids, SAMPLINGS[0])) for _ in range(3)]
    bad = engine.add(request(own, Method("failing", _Failing(bad_pass)), ids, SAMPLINGS[0]))
    while engine.requests:
        engine.step()
    assert [one.result.token_ids for one in good] == [expected] * 3
    with pytest.raises(ValueError if bad_pass else RuntimeError, match="do not fit" if bad_pass else "no more ideas"):
        _ = bad.result


def test_draft_passes_share_a_pass_and_the_target_waits_for_them() -> None:
    """Two requests that draft and one that does not: the target's weights are read once for all three."""
    own = parts("llama")
    seen: list[list[bool]] = []

    class Watched(Runtime):
        def forward_together(self, passes: Sequence[Pass]) -> list[Tensor]:
            seen.append([each.drafts for each in passes])
            return super().forward_together(passes)

    runtime = own.runtime
    before, runtime.__class__ = runtime.__class__, Watched
    try:
        works = [request(own, build(name, own), repeating(2), SAMPLINGS[0]) for name in ("self-sd", "self-sd", "plain")]
        results = list(side_by_side(works, 3))
    finally:
        runtime.__class__ = before
    assert len({done.token_ids for done in results}) == 1
    assert seen[0] == [False] * 3  # the prompts
    assert [True, True] in seen and [False] * 3 in seen[1:]
    assert all(len(set(drafts)) == 1 for drafts in seen)


def test_drafts_get_shorter_as_requests_come_and_longer_as_they_go() -> None:
    """Where rows of the target get dear, adaptive drafting stops under load; alone again, it goes on."""
    own, ids = parts("llama"), repeating(2)
    assert own.costs is not None
    whole = own.costs.pass_s[1]
    dear = replace(own.costs, pass_s={1: whole, 4: 1.1 * whole, 8: 4 * whole, 64: 32 * whole})

    def drafted(at_once: int) -> list[int]:
        works = [
            request(own, build("adaptive", replace(own, costs=dear)), ids, SAMPLINGS[0], n_new=60 if i == 0 else 12)
            for i in range(6)
        ]
        done = list(side_by_side(works, at_once))
        assert [each.token_ids[:12] for each in done] == [done[0].token_ids[:12]] * 6
        return [each.drafted for each in done]

    alone_, together = drafted(1), drafted(6)
    assert sum(together[1:]) < 0.5 * sum(alone_[1:])
    assert 0 < together[0] <= alone_[0]  # most of its tokens come when the others are done


def test_buffers_of_requests_are_given_back() -> None:
    """Done, cancelled at any pass, or failed: nothing of them is held."""
    own, engine = parts("gemma3"), Engine()
    names = [name for name in METHODS if not METHODS[name].lossy]
    alone(request(own, PLAIN, words(1, 5), SAMPLINGS[0]))
    before = buffers()
    for i in range(150):
        one = engine.add(request(own, build(names[i % len(names)], own), words(i, 4), SAMPLINGS[i % 3], 1 + i % 9))
        for _ in range(i % 4):
            engine.step()
        if i % 3 == 0 and not one.is_done:
            engine.cancel(one)
        if i % 10 == 0:
            failing = Method("failing", _Failing(bad_pass=bool(i % 20)))
            engine.add(request(own, failing, words(i, 4), SAMPLINGS[0]))
        del one
    while engine.requests:
        engine.step()
    del engine, failing
    assert buffers() == before


def test_results_come_in_order_and_what_nobody_waits_for_is_given_up() -> None:
    own, begun = parts("llama"), list[int]()

    def works() -> Iterator[PassGenerator[Completion]]:
        for i in range(6):
            begun.append(i)
            yield request(own, PLAIN, words(i, 4), SAMPLINGS[0], n_new=20 if i == 0 else 3)

    before = buffers()
    results = side_by_side(works(), 2)
    assert len(next(results).token_ids) == 20
    assert begun == [0, 1, 2, 3, 4, 5]  # others went on beside the long one
    results.close()  # type: ignore[attr-defined]
    del results
    assert buffers() == before


def test_error_of_a_request_comes_in_its_turn() -> None:
    own = parts("llama")
    works = [
        request(own, method, words(3, 4), SAMPLINGS[0], n_new=n_new)
        for method, n_new in ((PLAIN, 12), (Method("failing", _Failing(bad_pass=False)), 12), (PLAIN, 2))
    ]
    results = side_by_side(works, 3)
    assert len(next(results).token_ids) == 12
    with pytest.raises(RuntimeError, match="no more ideas"):
        next(results)
    with suppress(StopIteration):
        pytest.fail(f"{next(results)} came behind an error")


def test_prompt_longer_than_a_pass_is_read_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pieces ride along in the passes of those that decode."""
    for name in ("PREFILL_ROWS", "PREFILL_ROWS_BESIDE"):
        monkeypatch.setattr(f"swiftopt.models.runtime.{name}", 8)
    own = parts("llama")
    asked = [(words(5, 60), 4), (words(6, 5), 12), (words(7, 33), 3)]
    works = [request(own, PLAIN, ids, SAMPLINGS[0], n_new) for ids, n_new in asked]
    found = [done.token_ids for done in side_by_side(works, 3)]
    monkeypatch.undo()
    assert found == [by_itself(own, PLAIN, ids, SAMPLINGS[0], n_new) for ids, n_new in asked]
    assert native("llama") is own.runtime


def test_stream_decoded_several_prompts_at_once_is_that_of_one_after_the_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, stream = str(save(tmp_path / "model")), tmp_path / "stream.jsonl"
    texts = [f"w{i + 1} w{i + 2} w{i + 1}" for i in range(9)]
    prompts = [{"prompt": text, "id": f"p{i}", "max_new_tokens": 4 + 3 * (i % 4)} for i, text in enumerate(texts)]
    stream.write_text("".join(json.dumps(each) + "\n" for each in prompts))

    def lines(*options: str) -> list[tuple[str, str, str]]:
        args = ["generate", "--model", model, "--stream", str(stream), "--method", "prompt-lookup", "--json", *options]
        assert run(args) == 0
        told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        return [(each["id"], each["text"], each["finish_reason"]) for each in told]

    found = lines("--concurrency", "4")
    assert [each[0] for each in found] == [f"p{i}" for i in range(9)]
    assert found == lines()
