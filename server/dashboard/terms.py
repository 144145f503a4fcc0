"""The terms of the pages: a table to whose sentences headings and figures link, and the page of terms."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from markupsafe import Markup, escape

from ..middleware import Shared
from . import pages, shown_page, templates

# Term -> the sentence that explains it. `docs/serving.md` has the formulas of figures.
TERMS: Mapping[str, str] = {
    "Acceptance rate α": "Accepted draft tokens / drafted tokens.",
    "Adopted": "The search started to use this layer set, in place of the previous one.",
    "Cost c": "Seconds of a draft pass / seconds of a plain pass of the model.",
    "Draft": "Tokens that are predicted cheaply and then verified by the model in one pass; the output stays the same.",
    "Front": "The layer sets for which no cheaper set has as high a matchness (Pareto front).",
    "Interval": "Confidence interval of the ratio: 99.5 % for served requests, 95 % for jobs and comparisons.",
    "Layer set": "The sub-layers (attention, MLP) that a draft skips, and the weight format of the others.",
    "Matchness": "Share of tokens that a draft predicts as the model itself would have written them.",
    "Pair of timings": "Plain and drafted rounds of the same request; the ratio compares them.",
    "Plan": "How to decode a task: a method, and the layer set, heads or probe that it needs.",
    "Plain decoding": "The model writes one token per pass, without drafts.",
    "Ratio to plain": "Tokens per second with drafts / without, on the same text: above 1 drafts pay.",
    "Round": "One draft and the pass of the model that verifies it; without a draft, only the pass.",
    "Score": "The quantity that a search maximises: expected speed by measured costs, plain decoding = 1.",
    "Skip ratio r": "Share of the sub-layers that a draft skips.",
    "Task": "A kind of text, such as code or summaries, with its own drafts and verdict.",
    "Time saved": "Extra time that plain decoding would have taken, by the ratio; negative if drafts are slower.",
    "Tokens per pass M": "Tokens / passes of the model after the prompt.",
    "Tokens per second of decoding": "Tokens / seconds of a request's rounds, without prompt, search and waits.",
    "Trial": "One scoring of a layer set by a search.",
    "Verdict": "Whether drafts are used: only if the whole interval of the ratio is above 1.",
    "Version": "A stored plan of a task; lookups return the best one.",
}
# Label of a heading or a figure -> its term, if that differs from the label.
LABELS: Mapping[str, str] = {
    **dict.fromkeys(("α", "Acceptance α", "α, acceptance rate", "Drafts accepted"), "Acceptance rate α"),
    "Drafts accepted, last minute": "Acceptance rate α",
    **dict.fromkeys(("c", "c, draft pass / plain pass"), "Cost c"),
    **dict.fromkeys(("Best matchness", "Mean matchness", "Matchness, best"), "Matchness"),
    **dict.fromkeys(("Pairs", "Pairs of timings"), "Pair of timings"),
    **dict.fromkeys(("Ratio", "Rounds with drafts / without"), "Ratio to plain"),
    "Expected ratio": "Score",
    "Rounds": "Round",
    **dict.fromkeys(("Best score", "Mean score", "Best expected speed, plain = 1"), "Score"),
    **dict.fromkeys(("Skip ratio", "r, share skipped"), "Skip ratio r"),
    "Saved": "Time saved",
    **dict.fromkeys(("M", "M, tokens per pass", "Tokens per pass"), "Tokens per pass M"),
    **dict.fromkeys(("Tokens/s", "Tokens per second of decoding, last minute"), "Tokens per second of decoding"),
    "Trials": "Trial",
}

router = pages()


def slug(term: str) -> str:
    """Return the anchor of a term on its page."""
    return re.sub(r"[^a-z]+", "-", term.lower()).strip("-")


def explained(label: object) -> Markup:
    """Return a label, as a link with its term's sentence if it has a term."""
    term = LABELS.get(str(label), str(label))
    if term not in TERMS:
        return escape(label)
    return Markup('<a class="term" href="/terms#{}" title="{}">{}</a>').format(slug(term), TERMS[term], label)


templates.filters |= {"explained": explained, "slug": slug}


@shown_page(router, "/terms", "terms")
async def terms(app: Shared) -> dict[str, Any]:
    """Return the terms and their sentences."""
    return {"terms": TERMS}
