"""The pages of requests: the latest ones, and one with its rounds and the reasons for how it was decoded."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args

from fastapi import Query, Request
from markupsafe import Markup

from ...core.rounds import RoundFigures
from ...core.types import TokenSource, VerdictWord
from ..errors import Refused
from ..middleware import Shared
from ..request_log import MOST_REQUESTS, Constraint, EndedRequest
from ..schemas import Word
from . import LIVE_S, CurrentSession, number, pages, percent, seconds, shown_page, templates
from .drawing import path, svg
from .playground import SOURCES

PER_PAGE = 50
BAR_WIDTH, GAP, STRIP_HEIGHT, PER_STRIP = 8, 3, 48, 56  # Three sizes in SVG units, and rounds per strip.
MARKS: dict[TokenSource, str] = {  # SVG path below a round's bar, by drafter, because colour alone is not accessible.
    "draft": "",
    "text": "h8",
    "corpus": "h2m2 0h2m2 0h2",
    "prediction": "h3m2 0h3",
    "grammar": "m0 3h8m0 -3h-8",
    "target": "",
}
DRAFTERS = {**SOURCES, "draft": "the model's draft"}  # Names of the drafters of a round.
VERDICTS: dict[VerdictWord, str] = {
    "use": "drafts were measured to be faster",
    "plain": "drafts were measured to be slower, or not reliably faster",
    "unmeasured": "too few timings for a verdict",
}
CONSTRAINTS: dict[Constraint, str] = {
    "json": "the text is constrained by a JSON schema",
    "tool": "the text is constrained to a tool call",
}

router = pages()


# --- requests in words


def why(request: EndedRequest) -> str:
    """Return in a few words the reason for how a request was decoded, or why it failed."""
    if request.error:
        return request.error
    if request.why_plain is not None:
        return request.why_plain.message
    if request.asked:
        return f"the request asks for {request.asked}"
    reason = "drafts are tried" if request.verdict is None else VERDICTS[request.verdict]
    return f"{plan_words(request)}: {reason}"


def plan_words(request: EndedRequest) -> str:
    """Return the plan from which the drafts of a request came, or would have come."""
    if request.version is not None:
        return f"stored version {request.version} of {request.task}"
    return "the best set of the search so far"


def aspects(request: EndedRequest) -> list[tuple[str, str]]:
    """Return the aspects of how a request was decoded, each with a sentence."""
    if request.error:
        return [("Failed", request.error)]
    rounds, sums, n_crowded = request.rounds, request.sums, request.crowded_rounds
    drafted_by = Counter(DRAFTERS[figures.drafter] for figures in rounds.first if figures.steps)
    drafters = ", ".join(f"{n} by {name}" for name, n in drafted_by.most_common())
    company = "alone" if rounds.beside < 0.05 else f"with {rounds.beside:.1f} other requests on average"
    crowded = f"; in {n_crowded} rounds there were too many for drafts to pay" if n_crowded else ""
    cached = f", {sums.cached_tokens:,} of them read before" if sums.cached_tokens else ""
    way = (
        f"plainly: {why(request)}"
        if request.way == "plain"
        else f"with drafts in {drafted_by.total()} of {rounds.n} rounds: {drafters}"
    )
    verdict = "none: this server does not learn" if request.verdict is None else VERDICTS[request.verdict]
    return [
        ("Way", way),
        ("Plan", f"the request asks for {request.asked}" if request.asked else plan_words(request)),
        ("Verdict", verdict),
        ("Load", company + crowded),
        ("Context", f"{sums.prompt_tokens:,} tokens of the prompt{cached}, {sums.tokens:,} of the answer"),
        ("Grammar", "none" if request.constraint is None else CONSTRAINTS[request.constraint]),
    ]


def figures_of(request: EndedRequest) -> list[tuple[str, str]]:
    """Return the figures of a request, each with its name."""
    sums, rounds = request.sums, request.rounds
    if request.error:
        return [("Failed after", seconds(request.total_s))]
    return [
        ("Tokens", number(sums.tokens, 0)),
        ("Tokens per second of decoding", number(sums.decode_tok_s, 1)),
        ("First token after", seconds(sums.first_token_s)),
        ("Waited for a slot", seconds(request.queued_s)),
        ("Took", seconds(request.total_s)),
        ("Rounds", number(rounds.n, 0)),
        ("Drafts accepted", percent(sums.acceptance_rate)),
        ("Rounds with drafts / without", number(sums.ratio, 2, "x")),
        ("Ended by", request.finish_reason),
    ]


# --- the strip of rounds


def round_strip(rounds: Sequence[RoundFigures]) -> Markup:
    """Draw a bar per round, as high as its draft and filled up to its accepted length; a short line: no draft."""
    highest = max((figures.steps for figures in rounds), default=0) or 1
    unit = (STRIP_HEIGHT - 14) / highest
    frames: list[str] = []
    marks: list[str] = []
    filled: dict[TokenSource, list[str]] = {source: [] for source in SOURCES}
    for i, (_, steps, accepted, drafter) in enumerate(rounds):
        x, floor = (BAR_WIDTH + GAP) * (i % PER_STRIP), STRIP_HEIGHT * (i // PER_STRIP) + STRIP_HEIGHT - 10
        if steps:
            frames.append(f"M{x} {floor}h{BAR_WIDTH}v{-unit * steps:.1f}h-{BAR_WIDTH}z")
            if accepted:
                filled[drafter].append(f"M{x} {floor}h{BAR_WIDTH}v{-unit * accepted:.1f}h-{BAR_WIDTH}z")
            if MARKS[drafter]:
                marks.append(f"M{x} {floor + 3}{MARKS[drafter]}")
        else:
            filled["target"].append(f"M{x} {floor}h{BAR_WIDTH}v-2h-{BAR_WIDTH}z")
    n_drafted = sum(figures.steps > 0 for figures in rounds)
    n_accepted = sum(figures.accepted for figures in rounds)
    description = (
        f"{len(rounds)} rounds, {n_drafted} with a draft; {n_accepted} of {sum(figures.steps for figures in rounds)}"
        " drafted tokens were accepted."
    )
    n_rows, n_columns = -(-len(rounds) // PER_STRIP), min(len(rounds), PER_STRIP)
    paths = [path(f"by-{source}", commands) for source, commands in filled.items()]
    size = (BAR_WIDTH + GAP) * n_columns + 2, STRIP_HEIGHT * n_rows
    return svg("strip", size, "Rounds", description, *paths, path("frame", frames), path("mark", marks), left_x=-1)


def legend(rounds: Sequence[RoundFigures]) -> list[tuple[Markup, str]]:
    """Return a sample and a name for each kind of mark in a strip."""
    sources = [source for source in SOURCES if any(figures.drafter == source for figures in rounds)]
    samples = [
        round_strip([RoundFigures(3, 0 if source == "target" else 3, 2 * (source != "target"), source)])
        for source in sources
    ]
    names = ["no draft" if source == "target" else f"drafted by {DRAFTERS[source]}" for source in sources]
    return list(zip(samples, names, strict=True))


templates.filters["why"] = why
templates.filters["clock"] = lambda at: time.strftime("%H:%M:%S", time.localtime(at))


# --- routes

Way = Literal["drafts", "plain", "failed"]
# A name that a form sends; empty without a choice.
Chosen = Annotated[Word | Literal[""] | None, Query()]


@shown_page(router, "/requests", "requests", LIVE_S)
async def requests(
    request: Request,
    app: Shared,
    model: Chosen = None,
    task: Chosen = None,
    way: Annotated[Way | Literal[""] | None, Query()] = None,
    at: Annotated[int, Query(alias="page", ge=1, le=MOST_REQUESTS)] = 1,
) -> dict[str, Any]:
    """Return the latest requests of a model, a task and a way of decoding, or of all."""
    log = app.engines.requests
    kept_requests = log.latest(PER_PAGE + 1, (at - 1) * PER_PAGE, model or None, task or None, way or None)
    tasks = app.engines.metrics.history.tasks
    return {
        "rows": kept_requests[:PER_PAGE],
        "has_more": len(kept_requests) > PER_PAGE,
        "at": at,
        "chosen": {"model": model or "", "task": task or "", "way": way or ""},
        "choices": {
            "model": sorted({*app.engines.of, *(name for name, _ in tasks)}),
            "task": sorted({name for _, name in tasks}),
            "way": list(get_args(Way)),
        },
        "n_kept": len(log),
        "most": MOST_REQUESTS,
        "query": request.url.query,
    }


@shown_page(router, "/requests/{id}", "request")
async def show(app: Shared, session: CurrentSession, id: str) -> dict[str, Any]:
    """Return one request.

    Raises: Refused: 404, it is not stored.
    """
    kept_request = app.engines.requests.find(id)
    if kept_request is None:
        detail = (
            f"there is no request {id[:80]!r} here: only the last {MOST_REQUESTS:,} since the server's start are stored"
        )
        raise Refused(404, "not-found", detail)
    rounds = kept_request.rounds.first
    engine = app.engines.of.get(kept_request.model)
    return {
        "ended": kept_request,
        "aspects": aspects(kept_request),
        "figures": figures_of(kept_request),
        "strip": round_strip(rounds) if rounds else None,
        "legend": legend(rounds),
        "drafters": DRAFTERS,
        "has_texts": bool(kept_request.prompt or kept_request.answer) and kept_request.owner == session.owner,
        "fingerprint": None if engine is None else engine.card()["fingerprint"],
    }
