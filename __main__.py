"""`python -m swiftopt`."""

from .cli.main import main

main()
