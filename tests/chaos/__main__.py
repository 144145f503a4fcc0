"""The long crash runs, each with the figure that it has to reach.

    cd tests && python -m chaos [--only recovery,random] [--attacks 50]

Starts its own servers; prints a table, then one line of JSON, and keeps the figures in bench/chaos.json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from figures import CHAOS, Figure, table, write
from servers import Valkey, server_folder

from . import delivery
from .tuning import N_ATTACKS, N_PROMPTS, tuning

Section = Callable[[Path, Valkey], list[Figure]]


def main() -> int:
    """The exit code: 0 if every figure was reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sections: dict[str, Section] = {
        "noop": delivery.noop,
        "dedup": delivery.dedup,
        "cancel": delivery.cancel,
        "flush": delivery.flush,
        "recovery": delivery.recovery,
    }
    parser.add_argument("--only", help=f"some of {','.join([*sections, 'random'])}, separated by commas")
    parser.add_argument("--attacks", type=int, default=N_ATTACKS, help="of the random section")
    parser.add_argument("--prompts", type=int, default=N_PROMPTS, help="of each of its jobs")
    given = parser.parse_args()
    sections["random"] = partial(tuning, n_attacks=given.attacks, n_prompts=given.prompts)
    chosen = given.only.split(",") if given.only else list(sections)
    unknown = sorted(set(chosen) - set(sections))
    if unknown:
        parser.error(f"there is no section {unknown[0]!r}: choose from {', '.join(sections)}")
    figures: list[Figure] = []
    line = ""
    for name in chosen:
        print(f"{name} …", file=sys.stderr, flush=True)
        with server_folder() as folder, Valkey(folder) as redis:
            figures += sections[name](folder, redis)
        line = write(figures, CHAOS)  # after each section: the next one may fail
    print(table(figures))
    print(line)
    return 0 if all(figure.ok for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
