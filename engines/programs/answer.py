"""The process of an engine beside others: loads it, then answers JSON lines until its standard input ends.

    python -P answer.py <program> '<options as JSON>'

The program has `load(options)`, which returns a function from a line to its answer. A line in: {"prompt_ids":
[...], "max_new_tokens": 128, "task": "code"}. Lines out: {"ready": true} once, then for each line {"token_ids": [...],
"seconds": s, "prefill_s": s}, where the seconds until the first token may be null; or {"error": "..."}, after which the
process ends. Whatever a library prints goes to standard error.

Options of all programs: `model`, `dtype`, `threads`, `n_ctx`. What drafts is `draft` (a file or folder) or `ngram`
(true), with `draft_tokens` in a round, `min_confidence` (0: drafts have that length whatever they say) and
`ngram_tokens`; or, instead of these numbers, `settings` by the engine's own names. A program that drafts answers also
how many tokens were `drafted`, and `accepted` of them.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from time import perf_counter
from typing import Any

MESSAGE = 300  # characters of a library's message that are told; all of it is in standard error


def main(file: str, options: dict[str, Any]) -> int:
    """Answer every line; returns the exit code."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)

        def say(answer: dict[str, Any]) -> None:
            answers.write(json.dumps(answer) + "\n")
            answers.flush()

        try:
            decode = runpy.run_path(file)["load"](options)
            say({"ready": True})
            for line in sys.stdin:
                asked = json.loads(line)
                begun = perf_counter()
                answer = decode(asked)
                say({**answer, "seconds": perf_counter() - begun})
        except Exception as error:  # an engine can raise anything: the parent makes a row of it
            words = " ".join(str(error).split()) or "no message"
            say({"error": f"{type(error).__name__}: {words[:MESSAGE]}"})
            raise
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], json.loads(sys.argv[2])))
