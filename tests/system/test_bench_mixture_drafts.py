"""Drafts of the small trained mixture with fewer experts: rounds confirm the value that windows predict."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from api import serving, until_ready

from swiftopt.bench.mixture_drafts import EXAMPLES, unit_costs, value_of
from swiftopt.bench.small_mixture import LAST_LINES, prompts, trained
from swiftopt.core.layer_sets import LayerSet
from swiftopt.core.settings import SwiftSettings
from swiftopt.core.streams import read_stream, stream_lines
from swiftopt.core.types import Sampling
from swiftopt.decoding.session import Session
from swiftopt.models.loading import load
from swiftopt.store import Store

# The first test trains the model: 300 steps of about two seconds on a slow core.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

FIXED_DRAFTS = SwiftSettings(early_stop=False, max_draft_length=3, dynamic_verification=False)


def test_value_of_drafts_with_fewer_experts_is_as_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The value is in units of cost, so nothing is timed.

    How well a single expert drafts depends on the processor that trained the model.
    """
    monkeypatch.delenv("SWIFTOPT_CACHE_DIR", raising=False)
    runtime = load(str(trained()), dtype="auto", device="cpu")
    session = Session(runtime, Sampling(), 96, ignore_eos=True)
    prompts = read_stream(str(EXAMPLES / "stream.jsonl"), limit=16)
    for number in (2, 1):
        draft = LayerSet(runtime.n_layers, experts=(("mlp", number),))
        value = value_of(session, prompts, draft, unit_costs(runtime), FIXED_DRAFTS)
        assert value.acceptance is not None and value.acceptance > (0.5 if number == 2 else 0.3)
        assert 0.95 < value.ratio < 1.05
        assert value.observed > 1 or number == 1


def test_trained_mixture_is_tuned_stored_and_served_with_plain_decodings_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command tunes, the store keeps the set, and a server drafts with it even if the verdict is "plain"."""
    monkeypatch.delenv("SWIFTOPT_CACHE_DIR", raising=False)
    folder, stream, database = str(trained()), tmp_path / "library.jsonl", str(tmp_path / "a.db")
    texts = prompts()
    stream.write_text(stream_lines(texts[:8]))
    how = ["--model", folder, "--stream", str(stream), "--max-new-tokens", "48", "--db", database]
    command = [sys.executable, "-m", "swiftopt", "tune", *how, "--out", str(tmp_path / "completions.jsonl")]
    subprocess.run(command, check=True, capture_output=True, text=True)
    runtime = load(folder, dtype="auto", device="cpu")
    session = Session(runtime, Sampling(), 48, ignore_eos=True)
    with Store.open(database) as store:
        (job,) = store.jobs.latest()
        trials = [trial for task in LAST_LINES for trial in store.trials(job.id, task)]
        for task in LAST_LINES:
            stored = store.lookup(folder, task).plan.layer_set
            assert stored is not None
            drafted = value_of(session, texts[8:10], stored.layer_set, unit_costs(runtime), FIXED_DRAFTS)
            assert drafted.acceptance is not None and drafted.acceptance > 0
    assert any(trial.layer_set.experts for trial in trials)
    with serving(database, tmp_path / "log", "--model", f"mixture={folder}", "--rate", "0", "--no-tune") as served:
        until_ready(served)
        for prompt in texts[8:12]:
            body = {
                "model": "mixture",
                "prompt": prompt.text,
                "max_tokens": 48,
                "temperature": 0,
                "return_metrics": True,
            }
            answers = [
                served.client.post("/v1/completions", json=body | {"swiftopt": {"task": prompt.task, "plan": plan}})
                for plan in ("plain", 1, "best")
            ]
            assert all(answer.status_code == 200 for answer in answers), [answer.text for answer in answers]
            written = {answer.json()["choices"][0]["text"] for answer in answers}
            assert len(written) == 1
