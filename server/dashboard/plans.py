"""The pages of plans: for each model and task its versions, their layer maps and evidence, and the one in use."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

from fastapi import Form
from markupsafe import Markup
from pydantic import StringConstraints
from starlette.concurrency import run_in_threadpool
from starlette.responses import RedirectResponse, Response

from ...core.errors import StoreError
from ...core.events import TaskFinished, TaskTuning, Way
from ...core.layer_sets import KINDS, SubLayer
from ...core.messages import Steer
from ...core.records import PlanVersion
from ...store import Store
from ..engines import EngineProcess
from ..errors import Refused
from ..middleware import Shared, State
from ..schemas import Depth
from . import CurrentSession, FormSession, PageNumber, number, pages, shown_page, templates
from .drawing import differing_parts, layer_map, map_words, spans

Name = Annotated[str, StringConstraints(min_length=1, pattern=r"^[^\x00-\x1f\x7f]+$")]
NameField = Annotated[Name, Form()]

PER_PAGE = 100  # Tasks on a page of the list.
SELDOM_S = 10.0  # Seconds between two updates of a table that rarely changes.
NOTICES = {
    "promoted": "This version is the best one now.",
    "rolled-back": "The last choice was undone.",
    "plain": "Plain decoding is pinned.",
    "best": "Drafts are pinned.",
    "judged": "It is judged by its requests again.",
}

router = pages()


# --- versions and their evidence


@dataclass(frozen=True, slots=True)
class JudgedText:
    """A text of a verdict: (tokens, seconds) of plain decoding and with drafts; None: not stored."""

    name: str
    plain: tuple[int, float]
    drafted: tuple[int, float] | None
    text: str = ""

    @property
    def ratio(self) -> float | None:
        """Seconds per token, plain / with drafts."""
        if self.drafted is None:
            return None
        scaled_s = self.plain[0] * self.drafted[1]
        return self.drafted[0] * self.plain[1] / scaled_s if scaled_s else None


@dataclass(frozen=True, slots=True)
class Evidence:
    """The stored evidence for a version's verdict; `words` describe it.

    `finished` is the last event of the job that created the version, `compared` the rows of the comparison that did.
    """

    words: str
    judged: Sequence[JudgedText] = ()
    finished: TaskFinished | None = None
    compared: Sequence[dict[str, Any]] = ()


def evidence_of(store: Store, version: PlanVersion) -> Evidence:
    """Return the evidence of a version."""
    stored_set = version.own_set
    if stored_set is None:
        return _comparison_evidence(store, version)
    pairs: list[tuple[tuple[int, float], tuple[int, float] | None]]
    pairs = [
        ((n_plain, plain_s), (n_drafted, drafted_s))
        for n_plain, plain_s, n_drafted, drafted_s in stored_set.evidence
        if None not in (plain_s, drafted_s)
    ]
    if stored_set.job is None:
        description = (
            "Served requests: plain and drafted rounds of each." if pairs else "No pairs of timings are stored."
        )
        return Evidence(description, [JudgedText(f"request {i}", *pair) for i, pair in enumerate(pairs, 1)])
    finished, held_out = store.jobs.evidence(stored_set.job, version.task)
    reason = "no verdict is stored" if finished is None else finished.verdict.reason or "no reason is stored"
    texts = [(event.prompt.id, event.completion.text) for event in held_out]
    # Old versions have no stored pairs: show the plain timings, from the job's output.
    if not pairs:
        pairs = [((event.completion.n_tokens, event.completion.timings.total_s), None) for event in held_out]
    if len(texts) > len(pairs):
        texts = []
    # If held-out prompts left the verdict open, pairs of served prompts follow. Their texts are not in `held_out`.
    texts += [(f"text {i}", "") for i in range(len(texts) + 1, len(pairs) + 1)]
    judged = [JudgedText(name, *pair, text) for pair, (name, text) in zip(pairs, texts, strict=True)]
    return Evidence(f"Job {stored_set.job}, on prompts that its search did not score: {reason}.", judged, finished)


def _comparison_evidence(store: Store, version: PlanVersion) -> Evidence:
    """Return the comparison that created a version."""
    for row in store.comparisons(version.model, version.task, 100):
        if (row["report"].get("plan") or {}).get("version") == version.version:
            description = f"A comparison of methods on {row['device']}, {row['created_at']}."
            return Evidence(description, compared=row["report"]["results"])
    return Evidence("The evidence of its verdict is not stored.")


def overview_of(versions: Sequence[PlanVersion]) -> list[tuple[PlanVersion, int]]:
    """Return for each model and task the version that lookups find, or else the newest, and the number of versions."""
    counts = Counter((version.model, version.task) for version in versions)
    current: dict[tuple[str, str], PlanVersion] = {}
    for version in versions:
        shown_version = current.setdefault((version.model, version.task), version)
        if version.plan.engine is None and (
            shown_version.plan.engine is not None or _since(version) > _since(shown_version)
        ):
            current[version.model, version.task] = version
    return [(current[key], counts[key]) for key in sorted(current)]


def _since(version: PlanVersion) -> str:
    return max((promoted_at for _, _, promoted_at in version.best_for), default="")


def choose_version(versions: Sequence[PlanVersion], number: int | None) -> PlanVersion:
    """Return the version of that number; None: the one that lookups find.

    Raises: Refused: 404, there is no such version.
    """
    if number is None:
        return overview_of(versions)[0][0]
    for version in versions:
        if version.version == number:
            return version
    numbers = ", ".join(str(version.version) for version in versions)
    raise Refused(404, "layer-set-not-found", f"there is no version {number} here: stored are {numbers}")


def figures_of(version: PlanVersion) -> list[tuple[str, str]]:
    """Return the figures of a version, each with its name."""
    plan, stored_set = version.plan, version.plan.layer_set
    low, high = plan.measured_interval or (None, None)
    interval = "" if low is None else f" ({number(low)}–{number(high)})"
    heads = plan.learned
    rows: list[tuple[str, str | None]] = [
        ("Method", plan.method),
        ("Engine", plan.engine),
        ("Verdict", plan.verdict),
        ("Ratio to plain", number(plan.measured_speedup, 2, "x") + interval),
        ("α, acceptance rate", number(plan.acceptance_rate)),
        ("M, tokens per pass", number(plan.mean_generated_length)),
    ]
    if stored_set is not None:
        rows += [
            ("Expected ratio", number(stored_set.expected_speedup, 2, "x")),
            ("Matchness", number(stored_set.matchness)),
            ("r, share skipped", number(stored_set.skip_ratio)),
        ]
    rows += [
        (heads.kind.capitalize() if heads else "", f"version {heads.version} of {heads.task}" if heads else None),
        ("Draft model", plan.draft_model),
        ("Device", plan.device or "–"),
        ("dtype", plan.dtype or "–"),
        ("Stored", (version.created_at or "–")[:16].replace("T", " ")),
    ]
    return [(name, value) for name, value in rows if value is not None]


def settings_of(version: PlanVersion) -> dict[str, str]:
    """Return the settings of a version as texts."""
    record = version.plan.layer_set
    merged = {**(record.settings if record is not None else {}), **version.plan.settings}
    return {key: json.dumps(value, ensure_ascii=False) for key, value in merged.items() if value is not None}


async def engines_serving(app: State, version: PlanVersion) -> list[tuple[EngineProcess, TaskTuning | str]]:
    """Return the engines that serve the model, each with the tuning of the task, or the reason for no answer."""
    serving: list[tuple[EngineProcess, TaskTuning | str]] = []
    for engine in app.engines.of.values():
        if engine.served.name in version.names or (version.fingerprint or "") == engine.card()["fingerprint"]:
            tuning = await engine.ask_tuning()
            tasks = [task for task in tuning.tasks if task.task == version.task]
            serving += [(engine, task_state) for task_state in ([tuning.unavailable] if tuning.unavailable else tasks)]
    return serving


def _map(version: PlanVersion, framed: Collection[SubLayer] = ()) -> Markup | None:
    record = version.plan.layer_set
    title = f"Layer map of version {version.version}"
    return None if record is None else layer_map(record.layer_set, title, framed)


def versions_of(store: Store, model: str, task: str) -> list[PlanVersion]:
    """Return the versions of a model's task.

    Raises: LayerSetNotFound: there are none.
    """
    versions = store.plan_versions(model, task)
    if not versions:
        store.plan(model, task, 1)  # Raises an error that suggests the most similar names.
    return versions


def task_values(store: Store, model: str, task: str, number: int | None) -> dict[str, Any]:
    """Return the values of the page of a model's task.

    Raises: LayerSetNotFound: nothing is stored for it; Refused: 404, there is no such version.
    """
    versions = versions_of(store, model, task)
    version_shown, alias_moves = choose_version(versions, number), store.alias_moves(model, task)
    other_versions = sorted(
        (version for version in versions if version is not version_shown), key=lambda version: not version.best_for
    )
    valid_moves = [move for move in alias_moves if not (move.is_rollback or move.taken_back)]
    record = version_shown.plan.layer_set
    try:
        evidence = evidence_of(store, version_shown)
    except StoreError as error:
        evidence = Evidence(str(error))
    return {
        "model": version_shown.model,
        "task": task,
        "versions": versions,
        "found": version_shown,
        "other": next(iter(other_versions), None),  # Default version to compare with: the best one, else the newest.
        "map": _map(version_shown),
        "map_words": None if record is None else map_words(record.layer_set),
        "figures": figures_of(version_shown),
        "settings": settings_of(version_shown),
        "evidence": evidence,
        "moves": alias_moves,
        "back_to": next(iter(valid_moves[1:]), None),  # The version that a rollback would restore.
    }


def plan_address(model: str, task: str, **query: object) -> str:
    """Return the address of a task's page; names may have slashes, so they are in the query."""
    return f"/plans/task?{urlencode({'model': model, 'task': task, **query})}"


templates.globals["plan_address"] = plan_address


# --- routes


@shown_page(router, "/plans", "plans", SELDOM_S)
def plans(app: Shared, at: PageNumber = 1) -> dict[str, Any]:
    """Return for each model and task the plan in use, for one page of the list (from 1)."""
    versions, n_tasks = app.store.plan_page(PER_PAGE, (at - 1) * PER_PAGE)
    return {"rows": overview_of(versions), "at": at, "n_pages": max(1, -(-n_tasks // PER_PAGE))}


@shown_page(router, "/plans/task", "plan")
async def task_plans(
    app: Shared, model: Name, task: Name, version: Depth | None = None, said: str = ""
) -> dict[str, Any]:
    """Return the versions of a model's task, with all details of one of them."""
    values = await run_in_threadpool(task_values, app.store, model, task, version)
    return {**values, "served": await engines_serving(app, values["found"]), "notice": NOTICES.get(said)}


@shown_page(router, "/plans/compare", "plan_compare")
def compare(app: Shared, model: Name, task: Name, left: Depth, right: Depth) -> dict[str, Any]:
    """Return the figures, settings and maps of two versions side by side.

    Raises: as `task_values`.
    """
    versions = versions_of(app.store, model, task)
    pair = [choose_version(versions, left), choose_version(versions, right)]
    sets = [version.plan.layer_set.layer_set for version in pair if version.plan.layer_set is not None]
    differing_layers = differing_parts(*sets) if len(sets) == 2 else []
    rows = []
    for values in ([dict(figures_of(version)) for version in pair], [settings_of(version) for version in pair]):
        names = dict.fromkeys([*values[0], *values[1]])
        rows.append([(name, *(version.get(name, "–") for version in values)) for name in names])
    return {
        "model": pair[0].model,
        "task": task,
        "pair": pair,
        "maps": [_map(version, differing_layers) for version in pair],
        "figures": rows[0],
        "settings": [row for row in rows[1] if row[1] != row[2]],
        "differing": [
            (name, spans(i for layer_kind, i in differing_layers if layer_kind == kind)) for kind, name in KINDS.items()
        ],
        "comparable": len(sets) == 2,
    }


@router.get("/plans/export")
async def export(app: Shared, session: CurrentSession, model: Name, task: Name, version: Depth) -> Response:
    """A version's layer set, the file that `swiftopt layers export` writes."""
    record = await run_in_threadpool(app.store.layer_set, model, task, version)
    headers = {"Content-Disposition": f'attachment; filename="layer-set-v{version}.json"'}
    return Response(json.dumps(record.to_json(), indent=2) + "\n", 200, headers, "application/json")


@router.post("/plans/promote")
async def promote(
    app: Shared, session: FormSession, model: NameField, task: NameField, version: Annotated[Depth, Form()]
) -> Response:
    """Make a version the best one."""
    await run_in_threadpool(app.store.promote, model, task, version)
    return RedirectResponse(plan_address(model, task, version=version, said="promoted"), 303)


@router.post("/plans/rollback")
async def roll_back(app: Shared, session: FormSession, model: NameField, task: NameField) -> Response:
    """Undo the last choice of the best version."""
    rolled_back = await run_in_threadpool(app.store.rollback, model, task)
    return RedirectResponse(plan_address(model, task, version=rolled_back.version, said="rolled-back"), 303)


@router.post("/plans/pin")
async def pin(
    app: Shared,
    session: FormSession,
    served: NameField,
    model: NameField,
    task: NameField,
    way: Annotated[Way | Literal["judged"], Form()],
) -> Response:
    """Pin a served task to plain decoding or to its drafts, or unpin it."""
    engine = app.engines.find(served)
    await engine.steer(Steer("pin", task, None if way == "judged" else way))
    return RedirectResponse(plan_address(model, task, said=way), 303)
