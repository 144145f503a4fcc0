"""Training on tiny models: it learns, it can be cut anywhere, and its files fit only the model they were made on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fakes import worded_runtime

from swiftopt.core.errors import InvalidInput, SettingsError
from swiftopt.core.records import LearnedRecord, ModelInfo
from swiftopt.core.types import Prompt, Sampling
from swiftopt.decoding.methods import PLAIN
from swiftopt.decoding.session import Session
from swiftopt.models.rows import Pass
from swiftopt.models.runtime import Runtime
from swiftopt.papers.early_exit import Heads, learned_from_bytes, learned_to_bytes
from swiftopt.papers.training.features import Checkpoint, Features, features_of
from swiftopt.papers.training.settings import HeadSettings, ProbeSettings, Trained, TrainingStep
from swiftopt.papers.training.trainer import acceptances, train

SETTINGS = HeadSettings(epochs=12, batch=16, max_new_tokens=24, learning_rate=1e-2)
PROMPTS = [Prompt(id=str(i), task="t", text=f"w{i + 5} w{3 * i} w{7 * i + 1}") for i in range(10)]


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return worded_runtime()


@pytest.fixture(scope="module")
def whole(runtime: Runtime) -> Trained:
    """What training without a cut gives."""
    return train(runtime, PROMPTS, SETTINGS)


def a_record(runtime: Runtime, **changes: object) -> LearnedRecord:
    record = LearnedRecord("heads", "tiny", "t", runtime.info.fingerprint, (1, 3), 2048)
    return replace(record, **changes)  # type: ignore[arg-type]


def test_features_equal_the_states_of_decoding(runtime: Runtime) -> None:
    found = features_of(Session(runtime, Sampling(), 6), PROMPTS[0], (2,))
    done = next(iter(Session(runtime, Sampling(), 6).run(PROMPTS[0], PLAIN)))[1]
    assert runtime.head(found.final).argmax(-1).tolist() == list(done.token_ids[1:])
    assert found.hidden[2].shape == (5, 32)


def test_features_cover_every_turn(runtime: Runtime) -> None:
    runtime = worded_runtime()
    runtime.tokenizer.chat_template = "words"
    two_turns = Prompt(id="1", task="t", turns=("w1 w2", "w3"))
    assert features_of(Session(runtime, Sampling(), 6), two_turns, (2,)).n_rows == 10


def test_prompts_are_completed_concurrently(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    n_together, forward = list[int](), Runtime.forward_together

    def noting(own: Runtime, passes: Sequence[Pass]) -> list[torch.Tensor]:
        n_together.append(len(passes))
        return forward(own, passes)

    monkeypatch.setattr(Runtime, "forward_together", noting)
    train(runtime, PROMPTS, replace(SETTINGS, epochs=1))
    assert max(n_together) == 8


@pytest.mark.parametrize("full", [False, True], ids=["light", "full"])
def test_training_lowers_the_divergence(runtime: Runtime, full: bool) -> None:
    trained = train(runtime, PROMPTS, replace(SETTINGS, full=full))
    losses = [loss for _, loss in trained.curve]
    assert losses[-1] < 0.5 * losses[0]
    assert trained.model.depths == (2, 3)
    shape = (97, 32) if full else (32, 32)
    assert all(tuple(trained.model.transforms[depth].shape) == shape for depth in trained.model.depths)


def test_untrained_heads_equal_early_reads_of_the_models_head(runtime: Runtime) -> None:
    eye = Heads({2: torch.eye(32, dtype=runtime.dtype)})
    hidden = torch.randn(3, 32, dtype=runtime.dtype)
    torch.testing.assert_close(eye.logits(runtime, 2, hidden), runtime.logits(hidden))


@pytest.mark.parametrize("cut_at", [("collect", 4), ("train", 1), ("train", 9), ("measure", 0)], ids=str)
def test_interrupted_training_equals_uninterrupted_training(
    runtime: Runtime, whole: Trained, tmp_path: Path, cut_at: tuple[str, int]
) -> None:
    notes: list[str] = []

    def cut(step: TrainingStep) -> None:
        if (step.phase, step.done) == cut_at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(runtime, PROMPTS, SETTINGS, cut, checkpoint=Checkpoint(tmp_path, {}, SETTINGS.to_json(), every_s=0))
    kept = Checkpoint(tmp_path, {}, SETTINGS.to_json())
    again = train(runtime, PROMPTS, SETTINGS, lambda step: notes.append(step.note), checkpoint=kept)
    assert any("resumed: " in note for note in notes)
    assert again.curve == whole.curve
    for depth, transform in whole.model.transforms.items():
        assert torch.equal(again.model.transforms[depth], transform)
    kept.remove()
    assert list(tmp_path.iterdir()) == []


def test_damaged_checkpoint_changes_no_result(runtime: Runtime, whole: Trained, tmp_path: Path) -> None:
    kept = Checkpoint(tmp_path, {}, {})
    train(runtime, PROMPTS, SETTINGS, checkpoint=kept)
    for path in kept.folder.glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-9])
    assert train(runtime, PROMPTS, SETTINGS, checkpoint=Checkpoint(tmp_path, {}, {})).curve == whole.curve


def test_time_budget_ends_training(runtime: Runtime) -> None:
    trained = train(runtime, PROMPTS, replace(SETTINGS, epochs=1_000_000), budget_s=1.5)
    assert trained.figures["train_s"] > 0 and 0 < trained.figures["steps"] < 1_000_000


def test_probe_learns_which_tokens_are_accepted(runtime: Runtime) -> None:
    settings = ProbeSettings(epochs=60, max_new_tokens=24, learning_rate=1e-2)
    trained = train(runtime, PROMPTS, settings)
    assert trained.model.depths == (1,) and trained.model.direction.shape == (32,)
    assert trained.curve[-1][1] < 0.6 * trained.curve[0][1]
    assert 0 <= trained.figures["base_rate"] <= 1


def test_acceptance_of_top_p_draws_equals_the_overlap_of_distributions(runtime: Runtime) -> None:
    """Labels are drawn; the mean of 5,000 may differ from the overlap by 5 standard deviations, that is by 0.036."""
    one, final = 0.1 * torch.randn(1, 32, dtype=runtime.dtype), runtime.normed(torch.randn(1, 32, dtype=runtime.dtype))
    data = Features({1: one.repeat(5000, 1)}, 0.3 * final.detach().repeat(5000, 1))
    rate = float(acceptances(runtime, data, 1, ProbeSettings(sampling="top-p", top_p=1.0)).float().mean())
    draft, target = runtime.logits(one).softmax(-1), runtime.head(data.final[:1]).softmax(-1)
    overlap = float(torch.minimum(draft, target).sum())
    assert 0.1 < overlap < 0.95 and abs(rate - overlap) < 0.036


def test_files_restore_trained_parts(runtime: Runtime) -> None:
    heads = train(runtime, PROMPTS, replace(SETTINGS, epochs=1)).model
    probe = train(runtime, PROMPTS, ProbeSettings(epochs=1, max_new_tokens=24)).model
    again = learned_from_bytes("heads", learned_to_bytes(heads, a_record(runtime, depths=heads.depths)), runtime)
    assert again.depths == heads.depths and again.full == heads.full
    assert all(torch.equal(again.transforms[depth], heads.transforms[depth]) for depth in heads.depths)
    read = learned_from_bytes("probe", learned_to_bytes(probe, a_record(runtime, kind="probe", depths=(1,))), runtime)
    assert torch.equal(read.direction, probe.direction) and (read.depth, read.bias) == (probe.depth, probe.bias)


def test_weights_of_another_model_are_refused(runtime: Runtime) -> None:
    heads = Heads({1: torch.eye(32)})
    data = learned_to_bytes(heads, a_record(runtime, depths=(1,)))
    other = worded_runtime()
    other.info = ModelInfo("v1:other", "llama", 4, 1)
    with pytest.raises(InvalidInput, match="trained on tiny"):
        learned_from_bytes("heads", data, other)
    with pytest.raises(InvalidInput, match="not probe"):
        learned_from_bytes("probe", data, runtime)
    deep = learned_to_bytes(Heads({9: torch.eye(32)}), a_record(runtime, depths=(9,)))
    narrow = learned_to_bytes(Heads({1: torch.eye(5)}), a_record(runtime, depths=(1,)))
    for wrong, words in ((deep, "the state after 9 layers"), (narrow, r"has the shape \(5, 5\)")):
        with pytest.raises(InvalidInput, match=words):
            learned_from_bytes("heads", wrong, runtime)


@pytest.mark.parametrize("data", [b"", b"no tensors at all", bytes(8) + b"{}"], ids=["empty", "text", "zeros"])
def test_broken_file_is_refused_in_a_sentence(runtime: Runtime, data: bytes) -> None:
    with pytest.raises(InvalidInput, match="cannot be read as safetensors"):
        learned_from_bytes("heads", data, runtime)


def test_training_refuses_unusable_prompts(runtime: Runtime) -> None:
    with pytest.raises(InvalidInput, match="at least 2 prompts"):
        train(runtime, PROMPTS[:1], SETTINGS)
    with pytest.raises(InvalidInput, match="raise --max-new-tokens"):
        train(runtime, PROMPTS[:2], replace(SETTINGS, max_new_tokens=4))
    with pytest.raises(SettingsError, match="layer 9 is out of range"):
        train(runtime, PROMPTS, replace(SETTINGS, layers=(9,)))
    wordless = worded_runtime()
    wordless.tokenizer = None
    with pytest.raises(InvalidInput, match="has no tokenizer"):
        train(wordless, PROMPTS, ProbeSettings())
