"""Multi-token prediction: transformers' module, its drafts round by round, and plain decoding's tokens."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from fakes import cheap_draft_costs, results_of
from families import VOCAB
from mtp_files import VARIANTS, Theirs, saved, theirs, written
from native import quick_runtime, words
from safetensors.torch import load_file, save_file
from transformers.cache_utils import MtpCache

from swiftopt.core.costs import FormatCosts
from swiftopt.core.errors import ModelNotFound, SettingsError
from swiftopt.core.settings import TuningSettings
from swiftopt.core.types import DEFAULT_TASK, Prompt, Sampling
from swiftopt.decoding.context import Ending, TokenRule
from swiftopt.decoding.draft import Draft
from swiftopt.decoding.draft_tree import DraftTree
from swiftopt.decoding.engine import Engine, side_by_side
from swiftopt.decoding.events import Generated, Round
from swiftopt.decoding.loop import decode, decoding
from swiftopt.decoding.methods import PLAIN, Method, Resources, build
from swiftopt.decoding.methods.adaptive import AdaptiveDrafter, AdaptiveSettings
from swiftopt.decoding.methods.chains import ChainDrafter
from swiftopt.decoding.methods.mtp import MtpSettings
from swiftopt.decoding.session import Session
from swiftopt.decoding.work import PassGenerator
from swiftopt.models.block_maps import BlockLinear
from swiftopt.models.loading import load, mtp_of
from swiftopt.models.mtp import MtpRuntime
from swiftopt.models.runtime import Runtime
from swiftopt.models.saved import naming
from swiftopt.tasks.recipes import stored_costs
from swiftopt.tasks.traffic import Traffic

N_NEW = 24
IN_DEFAULT = ("qwen3_5_text", "glm4_moe", "exaone_moe")  # A hybrid, and the two ways to name tensors.
each_type = pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=() if name in IN_DEFAULT else pytest.mark.families) for name in VARIANTS]
)


@cache
def made(variant: str) -> Theirs:
    return theirs(variant)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def folder(variant: str) -> str:
        return str(saved(made(variant), tmp_path_factory.mktemp(variant)))

    return folder


def loaded(folder: str, dtype: str = "float32", speed: Any = "auto") -> tuple[Runtime, MtpRuntime]:
    runtime = load(folder, dtype, "cpu", speed=speed)
    layer = mtp_of(runtime)
    assert layer is not None
    return runtime, layer


@each_type
@pytest.mark.parametrize("speed", ["auto", "eager"])
def test_layer_equals_that_of_transformers(folders: Any, variant: str, speed: str) -> None:
    """The text is read at once, then token by token from the layer's own states."""
    (runtime, layer), ids, them = loaded(folders(variant), speed=speed), words(4, 30), made(variant)
    assert (layer.speed == "eager") == (speed == "eager") and runtime.n_layers == 4
    states, cache = them.states(ids), MtpCache(config=them.model.config.get_mtp_config())
    expected = them.layer(ids[1:25], states[:24], cache, 1)
    buffer = layer.new_buffer(32)
    pass_, out = layer.pass_over(ids[1:25], states[:24], buffer, 0)
    logits = layer.forward_together([pass_])[0]
    close = dict(rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    torch.testing.assert_close(layer.normed(out[0]), expected, **close)
    their_logits = them.mtp.shared_head(expected[-1:])
    torch.testing.assert_close(logits, their_logits, rtol=1e-5, atol=1e-5 * float(their_logits.abs().max()))
    for position in range(24, 28):
        expected = them.layer(ids[position + 1 : position + 2], expected[-1:], cache, position + 1)
        pass_, out = layer.pass_over(ids[position + 1 : position + 2], layer.normed(out[0][-1:]), buffer, position)
        layer.forward_together([pass_])
        torch.testing.assert_close(layer.normed(out[0]), expected, **close)


class Followed(ChainDrafter):
    """Records each round's text and draft, and drafts the target's tokens `truth` instead of its own.

    By the number of the round, none to three of them are right; in other rounds the right token is a side leaf.
    """

    rounds: list[tuple[list[int], list[int]]]
    truth: tuple[int, ...] = ()

    def draft(self, room: int) -> PassGenerator[Draft]:
        draft = yield from super().draft(room)
        context, drafted = self.context, draft.tree.token_ids[1:]
        self.rounds.append((list(context.token_ids), list(drafted)))
        right = self.truth[len(context.generated) :][: len(drafted)]
        if not self.truth or len(right) < len(drafted):
            return draft
        n_right = len(self.rounds) % 5
        if n_right == 4:
            candidates = [((right[0] + 1) % VOCAB, right[0]), (1,), (2,)]
        else:
            candidates = [(token if step < n_right else (token + 1) % VOCAB,) for step, token in enumerate(right)]
        return Draft(DraftTree.grow(context.token_ids[-1], candidates))


def followed(runtime: Runtime, truth: tuple[int, ...], **settings: Any) -> tuple[Method, Followed]:
    method = mtp(runtime, **{"draft_format": "stored", "stop_threshold": None, "max_draft_length": 3, **settings})
    given = method.drafter
    assert isinstance(given, ChainDrafter) and given.model is not None
    drafter = Followed(given.model, given.stop)
    drafter.rounds, drafter.truth, drafter.max_width = [], truth, 2
    return replace(method, drafter=drafter), drafter


def mtp(runtime: Runtime, **settings: Any) -> Method:
    return build("mtp", Resources(runtime), MtpSettings.from_json(settings))


def run(runtime: Runtime, method: Method, seed: int = 0, temperature: float = 0.0, n_new: int = N_NEW) -> Any:
    rule = TokenRule.of(Sampling(temperature=temperature, seed=7), None)
    return decode(runtime, words(seed, 11), method, rule, Ending(n_new))


@each_type
def test_drafts_equal_those_of_transformers_in_each_round(folders: Any, variant: str) -> None:
    """The layer's state depends only on the text: rejected tokens leave no trace, and accepted ones no gap."""
    runtime, _ = loaded(folders(variant))
    plain = run(runtime, PLAIN).token_ids
    method, drafter = followed(runtime, plain)
    done = run(runtime, method)
    assert done.token_ids == plain and len(drafter.rounds) > 8
    assert {*done.by_draft_length[3]} == {0, 1} or sum(done.by_draft_length[3][1:]) > 4
    for text, drafted in drafter.rounds:
        assert drafted == made(variant).draft(text, len(drafted))


IN_FILES = (
    "qwen3_5_text",
    *(pytest.param(name, marks=pytest.mark.families) for name in ("glm4_moe", "qwen3_5_moe_text")),
)


@pytest.mark.parametrize("variant", IN_FILES)
def test_drafts_of_a_gguf_file_are_the_checkpoints(variant: str, tmp_path: Path, new_cache: Path) -> None:
    runtime, layer = loaded(str(written(made(variant), tmp_path / "a.gguf")))
    plain = run(runtime, PLAIN).token_ids
    method, drafter = followed(runtime, plain)
    assert run(runtime, method).token_ids == plain and len(drafter.rounds) > 8
    for text, drafted in drafter.rounds:
        assert drafted == made(variant).draft(text, len(drafted))
    of_layer = {"nextn.eh_proj": "Q4_0", "attn_q": "Q8_0", "attn_output": "Q8_0"}
    kinds = {"output.weight": "Q8_0", **{f"blk.4.{name}.weight": kind for name, kind in of_layer.items()}}
    coded, layer = loaded(str(written(made(variant), tmp_path / "b.gguf", kinds)), "bfloat16")
    for module in (layer.parts["projection"], layer.blocks[0].parts.qkv[0], layer.blocks[0].parts.out):
        assert isinstance(module, BlockLinear) == coded.exact
    done, state = run(coded, mtp(coded, stop_threshold=0.02)), torch.ones(1, 32).bfloat16()
    assert torch.equal(layer.begun([5], state, "int4"), layer.begun([5], state)), "codes are not rounded again"
    assert done.drafted and done.token_ids == run(coded, PLAIN).token_ids


@each_type
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_equal_plain_decoding(folders: Any, variant: str, temperature: float) -> None:
    runtime, _ = loaded(folders(variant), "bfloat16")
    assert runtime.exact
    for settings in ({}, {"stop_threshold": 0.02}, {"draft_format": "stored", "stop_threshold": None}):
        method = mtp(runtime, **settings)
        done = run(runtime, method, 1, temperature)
        assert done.drafted and done.exact and done.method == "mtp"
        assert done.token_ids == run(runtime, PLAIN, 1, temperature).token_ids


def adaptive(runtime: Runtime, **settings: Any) -> Method:
    """Return adaptive drafts that assume the layer to be nearly free."""
    costs = cheap_draft_costs(0.25)
    costs = replace(costs, formats={**costs.formats, "mtp-int4": FormatCosts(0.0, 0.0, 0.0, 0.05, {1: 1.0, 8: 1.5})})
    own = AdaptiveSettings.from_json({"draft_format": "stored", **settings})
    return build("adaptive", Resources(runtime, costs=costs), own)


@pytest.mark.parametrize("draft_format", ["stored", "int4"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_layer_text_and_copies_draft_together(folders: Any, draft_format: str, temperature: float) -> None:
    """With all sources of drafts the tokens equal plain decoding's, even for concurrent requests."""
    runtime, _ = loaded(folders("glm4_moe"), "bfloat16")
    method = adaptive(runtime, draft_format=draft_format)
    rule = Sampling(temperature=temperature, seed=3)
    prompts = [words(seed, 5) * 3 for seed in range(4)]
    works = [decoding(runtime, ids, method, TokenRule.of(rule, None), Ending(40)) for ids in prompts]
    results = results_of(works, 3)
    for ids, done in zip(prompts, results, strict=True):
        assert done.token_ids == decode(runtime, ids, PLAIN, TokenRule.of(rule, None), Ending(40)).token_ids
    drafter = method.drafter
    assert isinstance(drafter, AdaptiveDrafter)
    assert drafter.learned.models["mtp"].acceptance.overall.seen > 0
    assert sum(done.drafted for done in results) > 0


def test_cancelled_and_resumed_requests_give_plain_tokens(folders: Any) -> None:
    """One is interrupted after some rounds and continues in another engine; one is cancelled; one runs beside both."""
    runtime, _ = loaded(folders("glm4_moe"), "bfloat16")
    method, texts = adaptive(runtime), [words(seed, 9) for seed in range(3)]
    rules = [TokenRule.of(Sampling(temperature=0.7, seed=seed), None) for seed in range(3)]
    cut: dict[int, Any] = {}
    with closing(Engine()) as engine:
        requests = [
            engine.add(decoding(runtime, ids, method, rule, Ending(30))) for ids, rule in zip(texts, rules, strict=True)
        ]
        while not requests[2].is_done:
            for event in engine.step():
                if isinstance(event, Round) and len(event.context.generated) > 9:
                    number = texts.index(event.context.token_ids[:9])
                    cut.setdefault(number, event.context.resume_point())
            for number in list(cut):
                if number < 2:
                    engine.cancel(requests[number])
        beside = requests[2].result
    expected = [
        decode(runtime, ids, PLAIN, TokenRule.of(Sampling(temperature=0.7, seed=seed), None), Ending(30)).token_ids
        for seed, ids in enumerate(texts)
    ]
    assert beside.token_ids == expected[2]
    rule = TokenRule.of(Sampling(temperature=0.7, seed=0), None)
    (resumed,) = results_of([decoding(runtime, texts[0], mtp(runtime), rule, Ending(30), cut[0])], 1)
    assert resumed.token_ids == expected[0] and resumed.drafted


def test_layer_sees_the_rest_of_a_prompt_after_a_shared_prefix(folders: Any) -> None:
    """States of a prefix that another request has read are lost, so drafts are those for the rest of the text."""
    runtime, _ = loaded(folders("exaone_moe"))
    prefix, rest = words(1, 40), words(2, 12)
    plain = decode(runtime, [*prefix, *rest], PLAIN, TokenRule.of(Sampling(), None), Ending(N_NEW)).token_ids
    method, drafter = followed(runtime, plain)
    ids = [[*prefix, 5], [*prefix, *rest]]
    works = [decoding(runtime, text, method, TokenRule.of(Sampling(), None), Ending(N_NEW)) for text in ids]
    with closing(Engine(memory=1 << 24)) as engine:
        for work in works:
            request = engine.add(work)
            while not request.is_done:
                list(engine.step())
            done = request.result
    assert done.n_cached == 40 and done.token_ids == plain
    of_second = [(text, drafted) for text, drafted in drafter.rounds if text[: len(ids[1])] == ids[1]]
    assert len(of_second) > 8
    for text, drafted in of_second:
        assert drafted == made("exaone_moe").draft(text, len(drafted), first=40)


def test_long_prompt_is_read_in_pieces(folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swiftopt.decoding.mtp.PREFILL_ROWS", 7)
    runtime, _ = loaded(folders("exaone_moe"))
    method, drafter = followed(runtime, ())
    decode(runtime, words(3, 40), method, TokenRule.of(Sampling(), None), Ending(4))
    for text, drafted in drafter.rounds:
        assert drafted == made("exaone_moe").draft(text, len(drafted))


def test_checkpoint_without_a_layer_is_refused(folders: Any) -> None:
    with pytest.raises(SettingsError, match="hold no multi-token-prediction layer that swiftopt reads"):
        mtp(quick_runtime("llama"))


def test_layer_of_another_size_is_refused(folders: Any, tmp_path: Any) -> None:
    folder = shutil.copytree(folders("exaone_moe"), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["mtp.fc.weight"] = tensors["mtp.fc.weight"][:, :32].contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ModelNotFound, match=r"projection in .* has the shape \[32, 32\], and a model of the multi-token"
    ):
        loaded(str(folder))
    del tensors["mtp.fc.weight"]  # Then there is no layer, and the model decodes without.
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert mtp_of(load(str(folder), "float32", "cpu")) is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_with_late_reads_are_the_same(folders: Any, temperature: float) -> None:
    """On a GPU, each step is read while the next one runs."""
    runtime, _ = loaded(folders("exaone_moe"))
    plain = run(runtime, PLAIN, 2, temperature).token_ids
    fixed = mtp(runtime, stop_threshold=None, draft_format="stored")
    early = run(runtime, fixed, 2, temperature)
    runtime.reads_late = True
    late = run(runtime, fixed, 2, temperature)
    assert late.token_ids == early.token_ids == plain
    assert (late.drafted, late.accepted) == (early.drafted, early.accepted) and late.drafted > 20
    for method in (mtp(runtime), adaptive(runtime), adaptive(runtime, draft_format="int4")):
        assert run(runtime, method, 2, temperature).token_ids == plain


def test_served_requests_draft_with_the_layer_and_give_plain_tokens(folders: Any) -> None:
    """A request without a task gets one when its prompt is read; its method drafts with the layer too."""
    runtime, _ = loaded(folders("exaone_moe"), "bfloat16")
    traffic = Traffic("tiny", runtime, None, TuningSettings(draft_format="int4", context_window=8, max_steps=2))
    session = Session(runtime, Sampling(), 30, ignore_eos=True)
    prompts = [Prompt(str(number), "x", text=text) for number, text in enumerate(("abcabcabc", "xyzzyxyzzy", "hello"))]
    works = [traffic.work(session, prompt, "x" if number else None) for number, prompt in enumerate(prompts)]
    done = [event for event in side_by_side(works, 2, by_time=False) if isinstance(event, Generated)]
    for event in done:
        assert event.completion.token_ids == session.run(event.prompt, PLAIN)[0].completion.token_ids
    assert len(done) == 3 and sum(event.completion.drafted for event in done) > 0
    learned = [cast(Any, traffic.task(name).search.method.drafter).learned.models for name in ("x", DEFAULT_TASK)]
    assert all("mtp" in models for models in learned)
    traffic.close()


def test_layer_of_a_multimodal_checkpoint_is_read(tmp_path: Any) -> None:
    config = {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text", "num_hidden_layers": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    names = ("mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight", "model.language_model.norm.weight", "model.visual.a")
    of_layer, of_model = naming(tmp_path, of_mtp=True), naming(tmp_path)
    assert [of_layer(name) for name in names] == ["projection.weight", "model.layers.0.mlp.up_proj.weight", None, None]
    assert [of_model(name) for name in names] == [None, None, "model.norm.weight", None]


def test_measured_costs_bring_the_layer_into_adaptive_drafts(folders: Any) -> None:
    runtime, _ = loaded(folders("glm4_moe"), "bfloat16")
    costs = stored_costs(runtime, None, 64, formats=["int4"])
    assert {"int4", "mtp-int4"} <= set(costs.formats)
    assert 0 < costs.format_cost("mtp-int4") <= costs.format_cost("mtp-int4", 8)
    for on in (True, False):
        method = build("adaptive", Resources(runtime, costs=costs), AdaptiveSettings.from_json({"mtp_layer": on}))
        run(runtime, method)
        assert isinstance(method.drafter, AdaptiveDrafter) and (method.drafter.mtp is not None) == on
