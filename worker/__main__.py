"""The process of one model's engine, which `swiftopt serve` starts as `python -m swiftopt.worker MODEL`."""

from __future__ import annotations

import gc


def run() -> None:
    """Import the engine and serve the model that the first argument describes."""
    gc.disable()  # half a million objects come to stay: to walk them again and again takes a quarter of the import
    from .serving import main

    gc.enable()
    main()


if __name__ == "__main__":
    run()
