"""Methods side by side on one stream: what they need is found or made, they run by turns, and the best is the plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from .. import __version__
from ..core.times import now
from ..core.types import Prompt
from ..decoding.draft_models import OtherModel
from ..decoding.session import Session
from ..models.costs import machine_name
from ..models.loading import load
from ..models.runtime import Runtime
from ..store import Store
from .comparison_entry import Entry, Generate, about, contender, enter
from .comparison_perplexity import surprise
from .comparison_pieces import PieceMaker
from .comparison_plan import with_plan
from .energy import EnergyMeter
from .maker import Made, Workshop
from .recipes import DEFAULT_TASK, StoredPieces
from .report import SCHEMA, About, Figures, by_ratio, figures
from .requests import BASE, CompareRequest
from .runs import Interleaved, OnRun, Run


class Comparison:
    """A comparison from loading to report.

    Args: others: prompts that are not compared, which brief searches and trainings may see; without any they see the
          compared ones. peer: runs the methods of PEERS.
    """

    def __init__(
        self,
        request: CompareRequest,
        prompts: Sequence[Prompt],
        store: Store | None,
        others: Sequence[Prompt] = (),
        peer: Generate | None = None,
        on_step: Callable[[str], None] = lambda words: None,
        on_run: OnRun | None = None,
    ) -> None:
        self.request, self.store, self.on_step, self.on_run, self.peer = request, store, on_step, on_run, peer
        self.prompts = [replace(prompt, turns=prompt.turns[:1]) for prompt in prompts]
        self.others = [replace(prompt, turns=prompt.turns[:1]) for prompt in others]
        tasks = {prompt.task for prompt in self.prompts}
        self.task = request.task or (tasks.pop() if len(tasks) == 1 else DEFAULT_TASK)
        self._surprises: dict[tuple[int, tuple[int, ...]], float] = {}

    def run(self) -> dict[str, Any]:
        """The object that `swiftopt compare --json` prints; `interrupted` if Ctrl-C came while methods ran.

        Raises: InvalidInput: the draft model's tokenizer is not the target's, or a prompt does not fit.
        """
        request = self.request
        runtime = self._load(request.model)
        draft = self._load_draft(runtime)
        if self.store is not None:
            self.store.remember_model(runtime.info)
        session = Session(runtime, request.sampling, request.max_new_tokens)
        n_positions = max(session.check(prompt) for prompt in self.prompts)
        keep = self.store if request.keep else None
        workshop = Workshop(session, request.model, self.task, self.others or self.prompts, keep, self.on_step)
        maker = PieceMaker(StoredPieces(runtime, self.store, draft, self.on_step), workshop)
        entries = [enter(name, maker, request.settings.get(name, {})) for name in request.methods]
        able = [contender(entry, session, draft, self.peer) for entry in entries if entry.error is None]
        meter = EnergyMeter.of(runtime.device.type, runtime.device.index or 0)
        runs = Interleaved(able, self.prompts, meter, self.on_run)
        finished = runs.run()
        if finished:
            self.on_step("perplexity of the outputs under the model")
        rows = [
            self._row(entry, about(entry, session, draft, n_positions), runs, session if finished else None)
            for entry in entries
        ]
        report = self._report(by_ratio(rows), runtime, workshop.made, meter.source, finished)
        pieces = {entry.name: entry.pieces for entry in entries if entry.pieces is not None}
        return with_plan(report, rows, pieces, runtime.info.fingerprint, keep)

    def _load(self, name: str) -> Runtime:
        request = self.request
        return load(
            name, request.dtype, request.device, lambda step: self.on_step(f"load: {step}"), speed=request.speed
        )

    def _load_draft(self, runtime: Runtime) -> Runtime | None:
        request = self.request
        if request.draft_model is None:
            return None
        draft = self._load(request.draft_model)
        OtherModel(draft).check(runtime)
        return draft

    def _row(self, entry: Entry, known: About, runs: Interleaved, session: Session | None) -> Figures:
        """`session` computes perplexities; None: Ctrl-C came, and nobody wants to wait for them."""
        if entry.error is not None:
            return Figures.missing(known, len(self.prompts), entry.error)

        def surprise_of(number: int, run: Run) -> float:
            assert session is not None
            key = number, run.token_ids
            if key not in self._surprises:
                prompt_ids = session.encode(self.prompts[number])
                self._surprises[key] = surprise(session.runtime, prompt_ids, run.token_ids)
            return self._surprises[key]

        own, base = runs.runs[entry.name], runs.runs[BASE]
        row = figures(known, own, base, len(self.prompts), None if session is None else surprise_of)
        if session is not None and row.reason is None and row.prompts < row.of:
            return replace(row, reason="for it is less than half as fast as plain decoding")
        return row

    def _report(
        self, rows: Sequence[Figures], runtime: Runtime, made: Sequence[Made], energy: str | None, finished: bool
    ) -> dict[str, Any]:
        request = self.request
        return {
            "schema": SCHEMA,
            "model": request.model,
            "draft_model": request.draft_model,
            "task": self.task,
            "device": machine_name(runtime),
            "dtype": runtime.dtype_name,
            "torch": torch.__version__,
            "swiftopt": __version__,
            "created_at": now(),
            "max_new_tokens": request.max_new_tokens,
            "sampling": asdict(request.sampling),
            "prompts": len(self.prompts),
            "base": BASE,
            "energy": energy,
            "made": [{"piece": one.piece, "how": one.how, "seconds": round(one.seconds, 1)} for one in made],
            "made_on": "other prompts" if self.others else "the compared prompts",
            "results": [row.to_json() for row in rows],
            "interrupted": not finished,
        }
