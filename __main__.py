"""`python -m swiftopt`, and the program that pip installs."""

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line; Ctrl-C while its libraries are imported ends it as later."""
    try:
        from .cli.main import main
    except KeyboardInterrupt:
        sys.exit(130)  # `terminal.output.INTERRUPTED`, which is not there yet
    main()


if __name__ == "__main__":
    main()
