"""Kept prefixes: eviction when memory is short, and reading from disk with the bits of a new prefill."""

from __future__ import annotations

import random
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from native import native, parts, quick_runtime, words
from numpy.typing import NDArray

from swiftopt.core.errors import SettingsError
from swiftopt.core.types import Completion, Sampling
from swiftopt.decoding import prefixes
from swiftopt.decoding.context import Ending, TokenRule
from swiftopt.decoding.engine import Engine, Request
from swiftopt.decoding.events import Prefilled
from swiftopt.decoding.loop import decoding
from swiftopt.decoding.methods import PLAIN
from swiftopt.decoding.prefix_files import PrefixFolder
from swiftopt.decoding.prefixes import Prefix, PrefixCache, ReadCosts
from swiftopt.decoding.work import Slots
from swiftopt.models.buffer import KVBuffer
from swiftopt.models.rows import Pass, Rows
from swiftopt.models.runtime import SNAPSHOT_BEFORE, Runtime

FAMILIES = [
    "llama",
    "gemma3",
    "lfm2",
    "qwen3_5_text",
    *(
        pytest.param(family, marks=pytest.mark.families)
        for family in ("gpt2", "phi3-window", "qwen2-window", "qwen3_next", "granitemoehybrid", "falcon_h1", "mamba2")
    ),
]
BLOCK, PLENTY = 16, 1 << 30


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swiftopt.decoding.prefix_files.BLOCK_TOKENS", BLOCK)


@contextmanager
def folder_of(path: Path, runtime: Runtime, max_bytes: int = PLENTY) -> Iterator[PrefixFolder]:
    folder = PrefixFolder(path, runtime, max_bytes)
    try:
        yield folder
    finally:
        folder.close()


def start(engine: Engine, runtime: Runtime, ids: Sequence[int], salt: str = "", n_new: int = 6) -> Request[Completion]:
    rule, ending = TokenRule.of(Sampling(), None, len(ids)), Ending(n_new)
    return engine.add(decoding(runtime, ids, PLAIN, rule, ending, salt=salt, with_state=True))


def ask(
    engine: Engine, runtime: Runtime, ids: Sequence[int], salt: str = ""
) -> tuple[Completion, NDArray[np.uint8], NDArray[np.float32]]:
    """Decode a prompt alone; return its answer, the bytes of its keys and values, and the mean state of the prompt."""
    request, read = start(engine, runtime, ids, salt), list[tuple[NDArray[np.uint8], NDArray[np.float32]]]()
    while engine.requests:
        for event in engine.step():
            if isinstance(event, Prefilled):
                assert event.state is not None
                buffer = event.context.buffer
                states = np.frombuffer(b"" if buffer.states is None else buffer.saved_states(len(ids)), np.uint8)
                read.append((np.concatenate((buffer.saved(0, len(ids)), states)), event.state.numpy()))
    return request.result, *read[0]


def n_read(folder: PrefixFolder | None, runtime: Runtime, ids: Sequence[int], salt: str = "") -> int:
    """Return the number of tokens that a request in a new engine need not read."""
    return ask(Engine(PLENTY, folder=folder), runtime, ids, salt)[0].n_cached


@pytest.mark.parametrize("family", [*FAMILIES, "gemma4_text"])
def test_text_read_from_disk_has_the_bits_of_a_new_prefill(tmp_path: Path, family: str) -> None:
    runtime, ids = native(family), words(1, 3 * BLOCK + 7)
    anew, anew_bytes, anew_state = ask(Engine(PLENTY), runtime, ids)
    with folder_of(tmp_path, runtime) as folder:
        stored = ask(Engine(PLENTY, folder=folder), runtime, ids)
        assert stored[0].n_cached == 0
    with folder_of(tmp_path, runtime) as folder:  # as after a restart
        again, again_bytes, again_state = ask(Engine(PLENTY, folder=folder), runtime, ids)
        # Whole blocks, or where the states are known: before the prompt's end, and behind all that was read.
        n_stored = len(ids) - SNAPSHOT_BEFORE if runtime.recurrent else 3 * BLOCK
        assert (again.n_cached, folder.n_read) == (n_stored, n_stored)
        longer = [*ids, *again.token_ids, *words(2, 9)]
        n_stored = len(ids) + len(again.token_ids) - 1
        n_stored -= 0 if runtime.recurrent else n_stored % BLOCK
        folder.wait()
        assert n_read(folder, runtime, longer) == n_stored, "the answer is stored, too"
    assert again.token_ids == anew.token_ids
    assert (again_bytes == anew_bytes).all()
    assert np.dot(again_state, anew_state) > 0.9 * np.linalg.norm(again_state) * np.linalg.norm(anew_state)


def test_texts_with_a_common_prefix_share_its_blocks_on_disk(tmp_path: Path) -> None:
    runtime, head = parts("llama").runtime, words(1, 2 * BLOCK)
    with folder_of(tmp_path, runtime) as folder:
        for seed in range(3):
            n_read(folder, runtime, [*head, *words(seed, BLOCK)])
            folder.wait()
    assert len(list(tmp_path.rglob("*.block"))) == 2 + 3


def test_blocks_belong_to_a_salt_model_and_dtype(tmp_path: Path) -> None:
    runtime, ids = quick_runtime("llama"), words(1, 4 * BLOCK)
    with folder_of(tmp_path, runtime) as folder:
        n_read(folder, runtime, ids, "ci:")
        folder.wait()
        found = [n_read(folder, runtime, ids, salt) for salt in ("ci:", "ci:x", "cd:", "")]
        assert found == [3 * BLOCK, 0, 0, 0]
        with pytest.raises(SettingsError, match=r"another server keeps files of this model in .*--keep-prefixes"):
            PrefixFolder(tmp_path, runtime, PLENTY)
        other = quick_runtime("gemma3")
        assert n_read(folder, other, ids, "ci:") == 0
        with folder_of(tmp_path, other) as of_other:
            assert n_read(of_other, other, ids, "ci:") == 0
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


def test_prefixes_of_a_key_are_removed_with_it(tmp_path: Path) -> None:
    runtime, ids = parts("llama").runtime, words(1, 4 * BLOCK)
    with folder_of(tmp_path, runtime) as folder:
        engine = Engine(PLENTY, folder=folder)
        for salt in ("ci:", "ci:x", "cd:"):
            ask(engine, runtime, ids, salt)
        folder.wait()
        engine.forget_owners(lambda owner: owner == "ci")
        assert [ask(engine, runtime, ids, salt)[0].n_cached for salt in ("ci:", "ci:x")] == [0, 0]
        assert ask(engine, runtime, ids, "cd:")[0].n_cached == len(ids) - 1
        folder.wait()
        engine.forget_owners(lambda owner: owner == "ci")
    assert {path.parent.name for path in tmp_path.rglob("*.block")} == {"key-cd"}


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "missing", "unfinished"])
def test_damaged_block_is_computed_again(tmp_path: Path, damage: str) -> None:
    runtime, ids = parts("llama").runtime, words(1, 4 * BLOCK)
    with folder_of(tmp_path, runtime) as folder:
        expected = ask(Engine(PLENTY, folder=folder), runtime, ids)
    blocks = sorted(tmp_path.rglob("*.block"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    content, third = blocks[2].read_bytes(), blocks[2]  # The first of a text is the latest used.
    if damage == "unfinished":  # as of a process that was killed
        third.rename(third.with_suffix(".tmp"))
    with folder_of(tmp_path, runtime) as folder:
        if damage == "missing":
            third.unlink()
        elif damage != "unfinished":
            flipped = bytes([*content[:-1], content[-1] ^ 1])
            third.write_bytes({"cut": content[:-9], "flipped": flipped, "empty": b""}[damage])
        done = ask(Engine(PLENTY, folder=folder), runtime, ids)
        assert done[0].n_cached == 2 * BLOCK and done[0].token_ids == expected[0].token_ids
        assert (done[1] == expected[1]).all()
        folder.wait()
        assert n_read(folder, runtime, ids) == 3 * BLOCK, "it is stored again"
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("damage", ["cut", "longer", "missing"])
def test_text_continues_from_an_earlier_position_if_states_are_damaged(tmp_path: Path, damage: str) -> None:
    """A chat's second turn: of the first one, the states before and after its answer are stored."""
    runtime, ids = parts("qwen3_5_text").runtime, words(1, 4 * BLOCK)
    with folder_of(tmp_path, runtime) as folder:
        first = ask(Engine(PLENTY, folder=folder), runtime, ids)[0]
    turn = [*ids, *first.token_ids, *words(2, 9)]
    anew, anew_bytes, _ = ask(Engine(PLENTY), runtime, turn)
    with folder_of(tmp_path, runtime) as folder:
        [_, latest] = sorted(tmp_path.rglob(f"{'?' * 72}.block"), key=lambda path: path.stem[64:])
        content = latest.read_bytes()
        if damage == "missing":
            latest.unlink()
        else:
            latest.write_bytes(content[:-9] if damage == "cut" else content + b"\0")
        again, again_bytes, _ = ask(Engine(PLENTY, folder=folder), runtime, turn)
        assert (again.n_cached, again.token_ids) == (len(ids) - SNAPSHOT_BEFORE, anew.token_ids)
        assert (again_bytes == anew_bytes).all()


def test_disk_keeps_the_most_recently_used_blocks(tmp_path: Path) -> None:
    runtime = parts("llama").runtime
    texts = [words(seed, 4 * BLOCK) for seed in range(6)]
    with folder_of(tmp_path, runtime) as folder:
        n_read(folder, runtime, texts[0])
        folder.wait()
        text_bytes = folder.n_bytes
    max_bytes = int(3.5 * text_bytes)
    with folder_of(tmp_path, runtime, max_bytes) as folder:
        for number in (1, 0, 2, 3):
            n_read(folder, runtime, texts[number])
            folder.wait()
            assert folder.n_bytes <= max_bytes
        found = [n_read(folder, runtime, texts[number]) for number in (0, 2, 3, 1)]
        assert found[:3] == [3 * BLOCK] * 3 and found[3] < 3 * BLOCK
    with folder_of(tmp_path, runtime, int(1.5 * text_bytes)) as folder:
        assert 0 < folder.n_bytes <= 1.5 * text_bytes, "the oldest go where less is allowed at the next start"


def test_other_requests_continue_while_a_text_is_read_from_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swiftopt.decoding.engine.READ_S", 0.0)  # two blocks a step
    runtime, ids = parts("llama").runtime, words(1, 6 * BLOCK)
    with folder_of(tmp_path, runtime) as folder:
        n_read(folder, runtime, ids)
        folder.wait()
        engine = Engine(PLENTY, folder=folder)
        other = start(engine, runtime, words(2, 5), n_new=40)
        for _ in range(3):
            list(engine.step())
        late, n_passes = start(engine, runtime, ids), 0
        while late.pass_ is None:
            before = other.pending
            list(engine.step())
            n_passes += other.pending is not before
        assert n_passes >= 2
        engine.cancel(late)
        late = start(engine, runtime, ids)
        while engine.requests:
            list(engine.step())
        assert late.result.n_cached == 5 * BLOCK


# --- in memory


def test_often_used_text_outlives_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReadCosts, "learn", lambda *_: None)  # a token is a second
    runtime, texts = parts("llama").runtime, [words(seed, 30) for seed in range(50)]
    engine = Engine(4 * 40 * runtime.slot_bytes)
    for _ in range(6):
        ask(engine, runtime, texts[0])
    for text in texts[1:12]:
        ask(engine, runtime, text)
    assert texts[0] in [prefix.token_ids[:30].tolist() for prefix in engine.prefixes]
    for text in texts[12:]:  # no longer used
        ask(engine, runtime, text)
    assert texts[0] not in [prefix.token_ids[:30].tolist() for prefix in engine.prefixes]


def test_text_with_a_shared_prefix_is_evicted_first() -> None:
    """Its beginning need not be read again."""
    runtime, head = parts("llama").runtime, words(1, 40)
    alike, other = [[*head, *words(seed, 4)] for seed in (2, 3)], words(4, 44)
    engine = Engine(4 * 52 * runtime.slot_bytes)
    for text in (other, *alike):
        ask(engine, runtime, text)
    ask(engine, runtime, words(5, 60))
    kept = [tuple(prefix.token_ids[:44].tolist()) for prefix in engine.prefixes]
    assert tuple(other) in kept and sum(tuple(text) in kept for text in alike) == 1


def test_cost_of_prefill_is_learnt_by_depth() -> None:
    runtime, costs = parts("llama").runtime, ReadCosts()
    assert costs.of(10, 30) == 20
    for first_slot in (0, 300, 600, 1100, 2100):
        rows = Rows([1] * 4, first_slot)
        for _ in range(60):
            costs.learn([Pass(runtime, rows, None, kind="beside")], 4 * (1.0 + first_slot / 1024))  # type: ignore[arg-type]
    assert costs.of(0, 256) == pytest.approx(256)
    assert costs.of(0, 2048) > 2 * costs.of(0, 1024) > 4 * costs.of(0, 512)
    assert costs.of(1024, 2048) == pytest.approx(costs.of(0, 2048) - costs.of(0, 1024))


@pytest.mark.parametrize("seed", range(3))
def test_kept_prefixes_never_exceed_the_memory(seed: int) -> None:
    runtime, rng = parts("llama").runtime, random.Random(seed)
    engine = Engine(150 * runtime.slot_bytes)
    for _ in range(30):
        ask(engine, runtime, words(rng.randrange(6), rng.randrange(2, 60)))
        assert engine.n_bytes + engine.kept_bytes <= 150 * runtime.slot_bytes


def prefix_of(text: Sequence[int], buffer: KVBuffer) -> Prefix:
    slots = Slots(parts("llama").runtime, len(text), len(text), text)
    return Prefix(slots, buffer, np.array(text, np.int64))


@pytest.mark.parametrize("seed", range(3))
def test_eviction_order_equals_that_of_an_exhaustive_comparison(seed: int) -> None:
    """Checked after each text and each eviction: shared tokens, the reused prefix, and the next eviction."""
    rng, cache, buffer = random.Random(seed), PrefixCache(), parts("llama").runtime.new_buffer(8)

    def made() -> list[int]:
        return [rng.randrange(2) for _ in range(rng.randrange(1, 9))]

    for _ in range(150):
        cache.add(prefix_of(made(), buffer))
        kept, text = list(cache), np.array(made(), np.int64)
        for each in kept:
            shared = [other.common(each.slots, each.token_ids) for other in kept if other is not each]
            assert each.n_shared == max(shared, default=0)
        longest = max(each.common(each.slots, text) for each in kept)
        best = [each for each in kept if each.common(each.slots, text) == longest]
        latest = max(best, key=lambda each: each.use_number)
        assert cache.longest(latest.slots, text) == ((longest, latest) if longest else (0, None))
        cache.use(latest, longest)
        if len(cache) > rng.randrange(40):
            left = list(cache)
            for _ in range(rng.randrange(1, 4)):
                left.remove(min(left, key=lambda each: (cache._value(each), each.use_number)))
                cache.evict(1)
                assert sorted(map(id, cache)) == sorted(map(id, left))
                if not left:
                    break


def test_evictions_compare_no_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new text is compared with 11 of 2,000; the number of their common tokens is stored."""
    n_kept, n_compared = 2000, 0
    compare = prefixes.common_length

    def counting(*args: Any) -> int:
        nonlocal n_compared
        n_compared += 1
        return compare(*args)

    monkeypatch.setattr(prefixes, "common_length", counting)
    head, rng = words(1, 40), random.Random(2)
    cache, buffer = PrefixCache(), parts("llama").runtime.new_buffer(8)
    for _ in range(n_kept):
        cache.add(prefix_of([*head, *(rng.randrange(50) for _ in range(20))], buffer))
    [prefix, *_] = cache
    assert len(cache) == n_kept and n_compared <= 2 * 11 * n_kept
    n_compared = 0
    assert cache.longest(prefix.slots, prefix.token_ids).prefix is prefix
    assert n_compared <= 11
    n_compared = 0
    cache.evict(500 * prefix.n_bytes)
    assert len(cache) == n_kept - 500 and n_compared == 0
