"""The terms of the pages: one table, from which headings and figures link to their sentence, and the page of terms."""

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
    "Adopted": "The search put this layer set into use, in place of the one before.",
    "Cost c": "Seconds of a draft's pass / seconds of a plain pass of the model.",
    "Draft": "Tokens that are guessed cheaply, then checked by the model in one pass: the output stays the same.",
    "Front": "The layer sets to which nothing cheaper has as high a matchness (Pareto front).",
    "Interval": "Where the ratio lies: at 99.5 % for served requests, at 95 % for jobs and comparisons.",
    "Layer set": "Which sub-layers (attention, MLP) a draft leaves out, and the format of the weights of the others.",
    "Matchness": "Share of tokens at which a draft guesses what the model itself would have written.",
    "Pair of timings": "Plain and drafted rounds of the same request, which the ratio compares.",
    "Plan": "How to decode a task: a method, and the layer set, heads or probe that it needs.",
    "Plain decoding": "The model writes one token per pass, without drafts.",
    "Ratio to plain": "Tokens per second with drafts / without, on the same text: above 1 drafts pay.",
    "Round": "One draft and the pass of the model that checks it; without a draft, the pass alone.",
    "Score": "What a search maximises: the speed that a layer set promises by measured costs, plain decoding = 1.",
    "Skip ratio r": "Share of the sub-layers that a draft leaves out.",
    "Task": "A kind of text, such as code or summaries, with its own drafts and verdict.",
    "Time saved": "What plain decoding would have taken longer, by the ratio; below 0 where drafts are slower.",
    "Tokens per pass M": "Tokens / passes of the model after the prompt.",
    "Tokens per second of decoding": "Tokens / seconds of rounds of a request, without its prompt, search and waits.",
    "Trial": "A layer set that a search has scored once.",
    "Verdict": "Whether drafts are used: only if the whole interval of the ratio is above 1.",
    "Version": "A stored plan of a task: lookups find the one that is called best.",
}
# Label of a heading or a figure -> its term, where that is not the label itself.
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
    """Return the place of a term on its page."""
    return re.sub(r"[^a-z]+", "-", term.lower()).strip("-")


def explained(label: object) -> Markup:
    """Return a label, as a link with the sentence of its term where it has one."""
    term = LABELS.get(str(label), str(label))
    if term not in TERMS:
        return escape(label)
    return Markup('<a class="term" href="/terms#{}" title="{}">{}</a>').format(slug(term), TERMS[term], label)


templates.filters |= {"explained": explained, "slug": slug}


@shown_page(router, "/terms", "terms")
async def terms(app: Shared) -> dict[str, Any]:
    """Return the terms and their sentences."""
    return {"terms": TERMS}
